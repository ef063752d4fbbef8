"""Until when calls are waited for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Broadcast, Call
from fluster.actors.protocol.clock import Clock
from fluster.actors.protocol.frames import Moment
from fluster.actors.protocol.members import Member


class Deadlines:
    """Those of one client's calls; `on_timeout` is told of each that has passed."""

    def __init__(
        self, clock: Clock, loop: asyncio.AbstractEventLoop, on_timeout: Callable[[Call | Broadcast], object]
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._on_timeout = on_timeout

    def after(self, timeout_s: float | None) -> Moment | None:
        """The moment at which nobody waits any more."""
        return None if timeout_s is None or math.isinf(timeout_s) else self._clock.now().after(timeout_s)

    def take_declared(self, call: Call | Broadcast, member: Member) -> None:
        """A call that came without a timeout gets the one that its method declares, as the registry tells it."""
        if call.timeout_s is None and call.deadline is None and member.timeouts and call.method in member.timeouts:
            call.timeout_s = member.timeouts[call.method]
            call.deadline = self.after(call.timeout_s)

    def watch(self, call: Call | Broadcast) -> None:
        """Tell when the deadline of a call has passed, if it has one. On the loop.

        Once a broadcast knows its members, each of its calls is watched instead.
        """
        if call.deadline is not None and call.timer is None:
            left_s = frames.seconds_between(self._clock.now(), call.deadline)
            call.timer = self._clock.call_later(self._loop, left_s, self._on_timeout, call)
