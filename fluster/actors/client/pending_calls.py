"""What calls of a client wait for: a connection, room or a member in their pool, their deadlines, and the pause before a retry."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable

from fluster.actors.client.arrivals import MAX_QUEUED
from fluster.actors.client.rosters import Rosters
from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Broadcast, Call, Done
from fluster.actors.protocol.clock import Clock
from fluster.actors.protocol.failures import RETRY, advice_of
from fluster.actors.protocol.frames import Moment
from fluster.actors.protocol.members import Member
from fluster.actors.results.reader import StreamReader
from fluster.actors.routing.router import Router
from fluster.actors.routing.routing_pass import NobodyServesError
from fluster.errors import ActorDiedError, ConnectionLostError, MailboxFullError

_HELD_FOR_S = 30.0  # calls without a deadline
_PAUSE_S = 0.05  # until mailboxes that were full, and members that may be on their way back, are tried again
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class HeldCalls:
    """Calls that wait for the connection, in the order in which they came. `finish` gets those that end here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, finish: Callable[[list[Done]], object]) -> None:
        self._loop = loop
        self._finish = finish
        self._held: deque[tuple[float, Call | Broadcast]] = deque()  # (since when, item)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, items: Iterable[Call | Broadcast]) -> None:
        """Keep calls until there is a connection again, those without a deadline for a while only."""
        now = self._loop.time()
        for item in items:
            if len(self._held) >= MAX_QUEUED:
                text = f"{item}: there is no connection, and {MAX_QUEUED:,} calls wait for it already"
                self._finish([Done(item, ok=False, error=MailboxFullError(text))])
                continue
            if not self._held:
                self._loop.call_later(_HELD_FOR_S, self._drop)
            self._held.append((now, item))

    def take(self) -> list[Call | Broadcast]:
        """All of them, which are held no more."""
        held = [item for _since, item in self._held]
        self._held.clear()
        return held

    def _drop(self) -> None:
        latest = self._loop.time() - _HELD_FOR_S
        too_old = [item for since, item in self._held if since <= latest and item.deadline is None]
        self._held = deque(held for held in self._held if held[0] > latest or held[1].deadline is not None)
        lost = f"no connection to the bus for {_HELD_FOR_S:g} s; it was not sent"
        self._finish([Done(item, ok=False, error=ConnectionLostError(f"{item}: {lost}")) for item in too_old])
        if self._held:
            self._loop.call_later(max(self._held[0][0] - latest, 1.0), self._drop)


class Deadlines:
    """The deadlines of one client's calls. `on_timeout` gets each call whose deadline has passed."""

    def __init__(
        self, clock: Clock, loop: asyncio.AbstractEventLoop, on_timeout: Callable[[Call | Broadcast], object]
    ) -> None:
        self._clock = clock
        self._loop = loop
        self._on_timeout = on_timeout

    def after(self, timeout_s: float | None) -> Moment | None:
        """The moment from which the call is no longer waited for."""
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


class WaitingPools:
    """Pools of one client whose waiting calls are to be looked at again. `wake` has the loop ask for them with `take`."""

    def __init__(self, router: Router, loop: asyncio.AbstractEventLoop, wake: Callable[[], object]) -> None:
        self._router = router
        self._loop = loop
        self._wake = wake
        self._moving: set[str] = set()
        self._pausing: set[str] = set()
        self._probing: set[str] = set()  # their mailboxes were full; they are looked at again in a moment

    def move(self, name: str) -> None:
        """The calls that wait in a pool may have found room."""
        if self._router.has_waiting(name):
            self._moving.add(name)
            self._wake()

    def take(self) -> set[str]:
        """The pools whose calls may go."""
        moving, self._moving = self._moving, set()
        return moving

    def on_turned_away(self) -> None:
        """Calls may have found mailboxes full."""
        for name in self._router.turned_away():
            self.move(name)
            self._probe_later(name)

    def on_paused(self) -> None:
        """Pools may have been paused."""
        for name in self._router.paused():
            if name not in self._pausing:
                self._pausing.add(name)
                self._loop.call_later(_PAUSE_S, self._resume, name)

    def _probe_later(self, name: str) -> None:
        if name not in self._probing:
            self._probing.add(name)
            self._loop.call_later(_PAUSE_S, self._probe, name)

    def _probe(self, name: str) -> None:
        self._probing.discard(name)
        self._router.probe(name)
        self.move(name)
        if name in self._router.turned_away():
            self._probe_later(name)

    def _resume(self, name: str) -> None:
        self._pausing.discard(name)
        self._router.resume(name)
        self.move(name)


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
