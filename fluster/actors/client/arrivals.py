"""What threads give a client to send, until its loop comes to it, which an alarm wakes."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from fluster.actors.protocol.calls import Broadcast, Call
from fluster.actors.results.loop_calls import LoopWake, is_any_running
from fluster.errors import MailboxFullError
from fluster_bus.running.linux_calls import TimerFd

MAX_QUEUED = 100_000  # calls that have not been sent yet
_HAND_OVER = 256  # calls that a thread gives one after the other, until it lets the loop come to them
_HAND_OVER_FOR_S = 0.0004  # at most
_UNTIL_TAKEN_BACK_S = 0.0003  # amply, for a thread that goes on to wait for what it has given


class Arrivals:
    """One wake-up of the loop for all that arrives until it looks. `drop` ends what came when it was too late."""

    def __init__(self, loop: asyncio.AbstractEventLoop, drop: Callable[[Call | Broadcast, Exception], object]) -> None:
        self._loop = loop
        self._drop = drop
        self._items: deque[Call | Broadcast] = deque()
        self._wake = LoopWake(loop)
        self._taken = threading.Event()  # all that was there
        self._alarm: LoopAlarm | None = None  # has the loop come to what was not taken back
        self.in_hand = False  # while the loop sends what it took
        self.closed: Exception | None = None  # why nothing is taken from now on

    def __len__(self) -> int:
        return len(self._items)

    # ---- from any thread --------------------------------------------------------------------------------

    def put(self, item: Call | Broadcast, *, may_be_taken_back: bool = False) -> None:
        """Have the loop come to it as soon as it can. Raises MailboxFullError, ClosedError.

        What may be taken back it comes to a moment later, or with what is put next, or when told to `hurry`: to wake it in vain
        costs a fifth of a broadcast.
        """
        if self.closed is not None:
            raise copy.copy(self.closed)
        if len(self._items) >= MAX_QUEUED:
            raise MailboxFullError(f"{item}: this client has {MAX_QUEUED:,} calls waiting to be sent: wait for some")
        waits = may_be_taken_back and self._alarm is not None and not self._items
        self._items.append(item)
        if self.closed is not None:  # it closed at this very moment, and may have looked before
            self._drop_all(self.closed)
        elif waits and self._alarm is not None and not self._wake.is_coming:
            self._alarm.set()
        elif not self._wake.is_coming:
            self._wake.wake()
        elif len(self._items) % _HAND_OVER == 0:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the loop begin with what is there: Python's own turns, of 5 ms, would have the actors idle meanwhile."""
        if not is_any_running():
            self._taken.clear()
            if self._items:
                self._taken.wait(_HAND_OVER_FOR_S)

    def take_back(self, item: Call | Broadcast) -> bool:
        """True when an item is given up again that was the only one here, and that the loop has not taken."""
        try:
            if len(self._items) != 1 or self._items[0] is not item:
                return False
            self._items.remove(item)
        except (IndexError, ValueError):  # the loop was quicker
            return False
        if self._alarm is not None:
            self._alarm.call_off()
            self.hurry()  # what another thread has put meanwhile, as it may have been its alarm
        return True

    def hurry(self) -> None:
        """Have the loop come to all that is here, as it will not be taken back."""
        if self._items:
            self._wake.wake_soon()

    def wake_soon(self) -> None:
        """Have the loop look, also from within the collector of garbage."""
        self._wake.wake_soon()

    def _drop_all(self, error: Exception) -> None:
        while self._items:
            try:
                item = self._items.popleft()
            except IndexError:  # another thread took the last one
                return
            self._drop(item, error)

    # ---- on the loop ------------------------------------------------------------------------------------

    def use_alarm(self) -> None:
        """Wake the loop late for what may be taken back, where the system has alarms."""
        if self._alarm is None and self.closed is None:
            with contextlib.suppress(OSError):
                self._alarm = LoopAlarm(self._loop, _UNTIL_TAKEN_BACK_S, self._ring)

    def _ring(self) -> None:
        if self._items:
            self._wake.set()

    async def wait(self) -> None:
        """Return when there is something to look at."""
        await self._wake.wait()

    def wake(self) -> None:
        """Look again."""
        self._wake.set()

    def take(self) -> list[Call | Broadcast]:
        """All that is there, in order."""
        taken: list[Call | Broadcast] = []
        with contextlib.suppress(IndexError):  # another thread may take its item back
            for _ in range(len(self._items)):
                taken.append(self._items.popleft())  # noqa: PERF401 - what was taken must not get lost by an IndexError
        self._taken.set()
        return taken

    def put_back(self, items: Iterable[Call]) -> None:
        """Calls that go before all that has arrived since."""
        self._items.extendleft(reversed(list(items)))
        self.wake()

    def put_again(self, call: Call) -> None:
        """A call that goes behind those that have arrived."""
        self._items.append(call)
        self.wake()

    def close(self, error: Exception) -> None:
        """Take no more. What is there is dropped by `drop_rest`."""
        self.closed = error

    def drop_rest(self) -> None:
        if self._alarm is not None:
            self._alarm.close()
        if self.closed is not None:
            self._drop_all(self.closed)


class LoopAlarm:
    """Rings on `loop` so long after it was set last: a timer of the kernel's, which the loop waits for beside its sockets.

    Threads set it and call it off without giving the interpreter's lock away.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, after_s: float, on_ring: Callable[[], object]) -> None:
        """To be made on the loop. Raises OSError, also where there is no such timer."""
        self._timer = TimerFd(time.CLOCK_MONOTONIC)
        self._set, self._call_off = self._timer.setter(after_s), self._timer.setter(0)
        self._loop, self._on_ring = loop, on_ring
        loop.add_reader(self._timer.fileno(), self._ring)

    def __del__(self) -> None:
        # Not before: a thread that sets it must not find another's descriptor.
        if hasattr(self, "_timer"):
            self._timer.close()

    def set(self) -> None:
        """Have it ring once, counted from now."""
        self._set()

    def call_off(self) -> None:
        """Have it not ring, if it has not yet."""
        self._call_off()

    def _ring(self) -> None:
        if self._timer.take():  # else it was set anew, or called off, at this very moment
            self._on_ring()

    def close(self) -> None:
        """Ring no more. On the loop."""
        self._loop.remove_reader(self._timer.fileno())
