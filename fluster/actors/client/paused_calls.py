"""Calls that pause before they are sent again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fluster.actors.client.arrivals import MAX_QUEUED
from fluster.actors.membership.rosters import Rosters
from fluster.actors.protocol.calls import Broadcast, Call, Done
from fluster.actors.protocol.clock import Clock
from fluster.actors.results.reader import StreamReader
from fluster.actors.routing.retries import pause_before_retry
from fluster.actors.routing.routing import NobodyServesError


class PausedCalls:
    """`send_again` is given each when its pause is over."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        rosters: Rosters,
        send_again: Callable[[Call], object],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._rosters = rosters
        self._send_again = send_again
        self._timers: dict[Call, asyncio.TimerHandle] = {}
        self._lonely: dict[str, set[Call]] = {}  # {pool: those that pause since nobody serves it}

    def take(self, done: Done) -> bool:
        """Whether a call is sent again, after a pause, rather than over."""
        call, roster = done.call, self._rosters.get(done.call.pool)
        if isinstance(call, Broadcast) or roster is None or call.ticket.done() or len(self._timers) >= MAX_QUEUED:
            return False
        if isinstance(call.ticket, StreamReader):
            return False  # its reader has seen the beginning
        allowed = roster.retries.get(call.method, 0) if call.retries is None else call.retries
        pause_s = pause_before_retry(done, allowed, self._clock.now()) if allowed else None
        if pause_s is None:
            return False
        call.retried += 1
        self._timers[call] = self._loop.call_later(pause_s, self._end_pause, call)
        if isinstance(done.error, NobodyServesError):
            self._lonely.setdefault(call.pool, set()).add(call)
        return True

    def on_member(self, pool: str) -> None:
        """There is somebody who serves that pool: those that pause for want of him pause no longer."""
        for call in sorted(self._lonely.pop(pool, ()), key=lambda each: each.order):
            self._end_pause(call)

    def _end_pause(self, call: Call) -> None:
        self._timers.pop(call).cancel()
        self._lonely.get(call.pool, set()).discard(call)
        if call.ticket.done():  # it ran into its deadline, or was taken back
            return
        call.over, call.tried = False, ()
        self._send_again(call)

    def of(self, pool: str) -> list[Call]:
        return [call for call in self._timers if call.pool == pool]

    def all(self) -> list[Call]:
        return list(self._timers)
