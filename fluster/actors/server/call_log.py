"""Which of the stored calls of a durable actor are to be run: decided here, without any I/O."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 64  # calls that were handled last, by whose ids those that come again are known
REMEMBERED_BYTES = 4 << 20  # of them, as they stay in the stream for the next instance


class CallLog:
    """How far the calls are handled, and which of them came last.

    It sees every call that the stream still holds, in order, and so knows after a restart what it knew before:
    what is remembered is never dropped from the stream.
    """

    def __init__(self, handled: int = 0) -> None:
        self.handled = handled  # the sequence of the last call that is not to be run again
        self._sizes: OrderedDict[str, tuple[int, int]] = OrderedDict()  # {call id: (sequence, bytes)}, the oldest first
        self._bytes = 0
        self._forgotten = 0  # since `droppable` last returned some

    def is_new(self, sequence: int, call_id: str, size: int) -> bool:
        """Whether a call is to be run. One that is not counts as handled."""
        if sequence > self.handled and call_id not in self._sizes:
            return True
        self.on_handled(sequence, call_id, size)
        return False

    def on_handled(self, sequence: int, call_id: str, size: int) -> None:
        """A call was run, or has come again."""
        self.handled = max(sequence, self.handled)
        if call_id in self._sizes:
            return  # remembered from when it came first, as it will be after a restart
        self._sizes[call_id] = sequence, size
        self._bytes += size
        while len(self._sizes) > REMEMBERED or (self._bytes > REMEMBERED_BYTES and len(self._sizes) > 1):
            _id, (_sequence, forgotten) = self._sizes.popitem(last=False)
            self._bytes -= forgotten
            self._forgotten += 1

    def droppable(self) -> int | None:
        """Before which sequence calls can be dropped from the stream; None when it is not worth the while yet."""
        if self._forgotten < REMEMBERED and self._bytes < REMEMBERED_BYTES // 2:
            return None
        if self._forgotten == 0:
            return None
        self._forgotten = 0
        return next(iter(self._sizes.values()))[0]
