"""Where a reader is in a stream of a container's output, so that it misses and repeats nothing when the engine was away.

What comes live is also in the engine's log, which can be read again from its beginning. But an engine that ends may have told
lines that it had not logged yet: so the log goes on after what both have, which is not always what was told.
"""

from __future__ import annotations

_TAIL_BYTES = 64 << 10  # by which the two are compared


class LogPosition:
    """Give `new` all that is read, and call `again` whenever that begins anew."""

    def __init__(self) -> None:
        self._end = 0  # in the engine's log, as far as is known
        self._tail = bytearray()  # what lies before it, that much of it at least
        self._skip = 0  # bytes, read again, that lie before the tail
        self._expected = b""  # of the tail, what is still to be read again

    def again(self) -> None:
        self._skip = self._end - len(self._tail)
        self._expected = bytes(self._tail)

    def new(self, data: bytes) -> bytes:
        """What of `data` was not told before."""
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        data = self._compared(data[skipped:]) if self._expected else data[skipped:]
        self._end += len(data)
        self._tail += data
        if len(self._tail) > 2 * _TAIL_BYTES:  # not each time: most pieces are small
            del self._tail[:-_TAIL_BYTES]
        return data

    def _compared(self, data: bytes) -> bytes:
        both = min(len(self._expected), len(data))
        if self._expected[:both] == data[:both]:
            self._expected = self._expected[both:]
            return data[both:]
        same = next(index for index in range(both) if self._expected[index] != data[index])
        # The rest of the tail was told and never logged. The log has whole lines, so what follows begins with one.
        matched = bytes(self._tail[: len(self._tail) - len(self._expected) + same])
        line = matched.rfind(b"\n") + 1
        if line == 0 and self._end > len(self._tail):  # it began before the tail
            line = len(matched)
        self._end -= len(self._tail) - line
        del self._tail[line:]
        self._expected = b""
        return matched[line:] + data[same:]
