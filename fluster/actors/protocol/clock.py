"""What time it is for calls and timers, and having something done later: by the system's clocks, or by a test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from fluster.actors.protocol import frames
from fluster.actors.protocol.frames import Moment

_TIMER_RESOLUTION_S = 0.001


class Alarm(Protocol):
    """Something that is to be done later."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Tells the time, and wakes."""

    def now(self) -> Moment: ...

    def call_later(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[..., object], *args: object
    ) -> Alarm:
        """Have `callback(*args)` run on `loop`, in whose thread this is called."""
        ...


class SystemClock:
    """The clocks of this machine."""

    now = staticmethod(frames.now)

    @staticmethod
    def call_later(
        loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[..., object], *args: object
    ) -> Alarm:
        # Not a moment early, as timers may be: an actor must find a call late whose caller has given up.
        return loop.call_later(delay_s + _TIMER_RESOLUTION_S, callback, *args)


SYSTEM_CLOCK = SystemClock()
