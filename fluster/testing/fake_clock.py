"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable

from fluster.actors.protocol.clock import Alarm
from fluster.actors.protocol.frames import Moment

_TOLERANCE_S = 1e-9  # sums of floats are not what they look like


class FakeClock:
    """Deadlines of calls and the beats of `@every` go by this clock, once it was handed to who keeps them.

    `settle(wait)` is called before and after each alarm: it returns when the loops have done what there was for them,
    and with `wait` when also the runs of timers have ended.
    """

    def __init__(self, settle: Callable[[bool], None]) -> None:
        self._settle = settle
        self._began_at = time.time()
        self._elapsed_s = 0.0
        self._numbers = itertools.count()
        self._alarms: list[tuple[float, int, _Alarm]] = []  # a heap of (when, number, alarm)
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        """By how many seconds it was moved so far."""
        return self._elapsed_s

    def now(self) -> Moment:
        elapsed_s = self._elapsed_s
        return Moment("fake", elapsed_s, self._began_at + elapsed_s)

    def call_later(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[..., object], *args: object
    ) -> Alarm:
        if delay_s <= 0:
            return loop.call_soon(callback, *args)
        alarm = _Alarm(loop, callback, args)
        with self._lock:
            heapq.heappush(self._alarms, (self._elapsed_s + delay_s, next(self._numbers), alarm))
        return alarm

    def advance(self, seconds: float, *, wait: bool = True) -> None:
        """Let that much time pass: what falls due meanwhile happens, each at its time, before this returns.

        Runs of `@every` methods are waited for, so that the next beat finds their actor idle. With `wait=False` they
        are not: for an actor that the test holds up. Raises ValueError for a negative number, and TimeoutError when a
        run does not end.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not go backwards")
        until = self._elapsed_s + seconds
        self._settle(wait)
        while (alarm := self._next(until)) is not None:
            alarm.ring()
            self._settle(wait)
        self._elapsed_s = max(until, self._elapsed_s)
        self._settle(wait)

    def _next(self, until: float) -> _Alarm | None:
        with self._lock:
            while self._alarms and self._alarms[0][0] <= until + _TOLERANCE_S:
                due, _number, alarm = heapq.heappop(self._alarms)
                if not alarm.cancelled:
                    self._elapsed_s = max(due, self._elapsed_s)
                    return alarm
        return None


class _Alarm:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[..., object], args: tuple[object, ...]
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def ring(self) -> None:
        """Return when the callback has run on its loop."""
        asyncio.run_coroutine_threadsafe(self._run(), self._loop).result()

    async def _run(self) -> None:
        if not self.cancelled:
            self._callback(*self._args)
