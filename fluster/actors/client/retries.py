"""Retries: which calls are sent again, after which pause, and those that pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fluster.actors.client.arrivals import MAX_QUEUED
from fluster.actors.client.rosters import Rosters
from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Broadcast, Call, Done
from fluster.actors.protocol.clock import Clock
from fluster.actors.protocol.failures import RETRY, advice_of
from fluster.actors.protocol.frames import Moment
from fluster.actors.results.reader import StreamReader
from fluster.actors.routing.routing_pass import NobodyServesError
from fluster.errors import ActorDiedError, ConnectionLostError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


def pause_before_retry(done: Done, allowed: int, now: Moment) -> float | None:
    """Seconds until a call is sent again; None when it is over, as it is when its deadline would come first.

    `allowed` is how many retries its method declares.
    """
    call = done.call
    if isinstance(call, Broadcast) or call.retried >= allowed or not _is_worth_another_try(done):
        return None
    # Spread by a quarter to either side, so that those that failed together do not come back together.
    spread = 0.75 + (call.order * 0.618) % 1 / 2
    pause_s = min(FIRST_PAUSE_S * 2.0 ** min(call.retried, 16), LONGEST_PAUSE_S) * spread
    if call.deadline is not None and frames.seconds_between(now, call.deadline) <= pause_s:
        return None
    return pause_s


def _is_worth_another_try(done: Done) -> bool:
    match done.error:
        case None:  # the actor's own answer
            return advice_of(done.payload) == RETRY
        case ActorDiedError():  # one that is meant for this actor alone cannot go to another
            return getattr(done.call, "pinned", None) is None
        case error:
            return isinstance(error, ConnectionLostError | NobodyServesError)


class PausedCalls:
    """The calls of one client that wait for their retry. `send_again` gets each when its pause is over."""

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
        self._lonely: dict[str, set[Call]] = {}  # {pool: those that pause since no actor serves it}

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
        """An actor serves that pool: calls that pause for want of one go on."""
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
