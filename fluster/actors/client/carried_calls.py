"""Calls that the waiting thread sends itself over a lane ("carried"), without the client's loop and mostly without the router.

    thread ── submit, take_over ──► LaneCalls ──► bus        the router chooses the member, and records nothing
    loop ──── hand_to_router ──► router                      for what does not end with plain results

A call that may not be carried goes through `Arrivals`, as all others do.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sized

from fluster.actors.client.arrivals import Arrivals
from fluster.actors.client.inboxes import Inboxes
from fluster.actors.client.lane_calls import LaneCalls, Wait
from fluster.actors.client.outcomes import settle, settle_result
from fluster.actors.client.pending_calls import Deadlines, HeldCalls
from fluster.actors.client.rosters import Change, Left, Rosters
from fluster.actors.protocol.calls import Broadcast, Call, Done
from fluster.actors.protocol.clock import Clock
from fluster.actors.protocol.members import Member
from fluster.actors.results.loop_calls import is_running, tell_soon
from fluster.actors.routing.messages_out import MessageOut
from fluster.actors.routing.router import Router
from fluster.errors import MailboxFullError
from fluster_bus.access.address import BusAddress
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import ClosedError


class CarriedCalls:
    """Those of one client; none until `open`.

    `openings` are the pools that the loop has yet to open. `on_timeout` is given calls that the router has by then,
    `end_calls` what became of a member while it was sent to.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        router: Router,
        inboxes: Inboxes,
        arrivals: Arrivals,
        *,
        held: HeldCalls,
        deadlines: Deadlines,
        rosters: Rosters,
        openings: Sized,
        finish: Callable[[Iterable[Done]], object],
        on_timeout: Callable[[Call], object],
        end_calls: Callable[[str, Change], object],
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._router = router
        self._inboxes = inboxes
        self._arrivals = arrivals
        self._held = held
        self._deadlines = deadlines
        self._rosters = rosters
        self._openings = openings
        self._finish, self._on_timeout, self._end_calls = finish, on_timeout, end_calls
        self.lane: LaneCalls | None = None

    # ---- from any thread --------------------------------------------------------------------------------

    def open(self, address: BusAddress, namespace: str) -> None:
        """Have calls carried from now on. For one thread at a time."""
        if self.lane is None:
            self.lane = LaneCalls(
                address,
                namespace,
                self._inboxes.open_alone(),
                tell=lambda *callback: tell_soon(self._loop, *callback),
                settle=settle_result,
                on_other=self._on_delivery,
                on_timeout=self._on_late,
                on_left=self.hand_to_router,
                on_lost=self._on_lost,
            )
            tell_soon(self._loop, self._arrivals.use_alarm)

    def submit(self, call: Call) -> Wait | None:
        """Send a call whose thread waits for it next: with what this gives, if anything.

        Raises ActorDeadlockError for one that would wait for itself, MailboxFullError, ClosedError.
        """
        lane = self.free_lane() if not self._arrivals else None
        message = self._router.choose_alone(call, self._clock.now()) if lane is not None else None
        wait: Wait | None = None
        if lane is not None and message is not None and message.member is not None:
            if call.blocks is not None and (deadlock := call.blocks.deadlock(call, message.member)) is not None:
                raise deadlock
            wait = self._carry(message, message.member, lane)
        if wait is None:
            self._arrivals.put(call)
        return wait

    def offer(self, broadcast: Broadcast) -> BroadcastOffer:
        """Submit a broadcast that its thread may wait for next. Raises MailboxFullError, ClosedError."""
        # Whether it really may go that way is asked when it does: it waits for that a moment at most.
        self._arrivals.put(broadcast, may_be_taken_back=self.lane is not None and self.lane.connected)
        return BroadcastOffer(self, broadcast)

    def take_over(self, broadcast: Broadcast) -> Wait | None:
        """What the thread that submitted a broadcast waits with, if it waits next and the loop has not come to it yet."""
        lane = self.free_lane()
        if lane is None or not self._arrivals.take_back(broadcast):
            self.hurry()
            return None
        message = self._router.choose_alone_all(broadcast, self._clock.now())
        if message is None:
            self._put_again([broadcast])
            return None
        first = message.members[0]
        if first.timeouts:
            self._deadlines.take_declared(broadcast, first)
        wait = lane.send(message)
        if wait is None:
            calls = message.make_calls().calls
            for endpoint_id, call in calls.items():
                call.pinned = endpoint_id
            self._put_again(calls.values())
        else:
            self._end_early(lane, message.pool.name, [member.endpoint_id for member in message.members])
        return wait

    def hurry(self) -> None:
        """Have the loop come to what was offered: its thread does not take it over."""
        self._arrivals.hurry()

    def _put_again(self, items: Iterable[Call | Broadcast]) -> None:
        for item in items:
            try:
                self._arrivals.put(item)
            except (MailboxFullError, ClosedError) as error:
                settle(Done(item, ok=False), error)

    def free_lane(self) -> LaneCalls | None:
        """The lane, if a message that is sent there overtakes nothing that goes the other way."""
        lane = self.lane
        in_hand = self._arrivals.in_hand
        is_free = lane is not None and lane.connected and not (in_hand or self._held or is_running(self._loop))
        # The members known of a pool that is still to be opened may be those of one before it, which is about to close.
        return lane if is_free and not self._openings else None

    def _carry(self, message: MessageOut, member: Member, lane: LaneCalls) -> Wait | None:
        """Send a message to a member by this very thread, which waits with what this gives; None when it cannot be."""
        if member.timeouts:
            for call in message.calls.values():
                self._deadlines.take_declared(call, member)
        wait = lane.send(message)
        if wait is not None:
            self._end_early(lane, message.pool.name, [member.endpoint_id])
        return wait

    def _end_early(self, lane: LaneCalls, pool: str, endpoint_ids: list[str]) -> None:
        """End what was sent to a member that ended between its choice and the sending: what ends calls may have been here before."""
        roster = self._rosters.get(pool)
        for endpoint_id in endpoint_ids:
            if roster is not None and endpoint_id not in roster.members:
                lane.when_seen(functools.partial(self._end_calls, pool, Left(endpoint_id)))

    # ---- on the loop ------------------------------------------------------------------------------------

    def hand_to_router(self, number: int, message: MessageOut | None = None) -> list[Call]:
        """Give the router a message that is carried; returns its calls, none when it has ended or the router has it already."""
        if message is None:
            message = self.lane.take(number) if self.lane is not None else None
        if message is None:
            return []
        calls = list(message.calls.values())
        self._finish(self._router.take_in(number, message))
        for call in calls:
            self._deadlines.watch(call)
        return calls

    def hand_all_to_router(self, pool: str | None = None) -> None:
        """The same, for all that are out, or those of one pool."""
        for number in self.lane.numbers(pool) if self.lane is not None else ():
            self.hand_to_router(number)

    def when_seen(self, callback: Callable[[], object]) -> None:
        """Have `callback` run once all answers that are on their way to threads have been handed out."""
        if self.lane is None:
            callback()
        else:
            self.lane.when_seen(callback)

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()

    def _on_delivery(self, number: int, message: MessageOut | None, delivery: Delivery) -> None:
        self.hand_to_router(number, message)
        self._inboxes.on_delivery(delivery)

    def _on_late(self, number: int) -> None:
        for call in self.hand_to_router(number):
            self._on_timeout(call)

    def _on_lost(self, next_number: int) -> None:
        for number in self.lane.numbers() if self.lane is not None else ():
            if number > next_number:
                self.hand_to_router(number)
        self._finish(self._router.on_disconnected(lambda number: next_number < number < 0))


class BroadcastOffer:
    """A broadcast that was submitted, for the thread that did: it takes it over at once, or leaves it to the loop."""

    def __init__(self, carried: CarriedCalls, broadcast: Broadcast) -> None:
        self._carried, self._broadcast = carried, broadcast

    def take_over(self) -> Wait | None:
        """What to wait with for the answers, where the thread may read them itself."""
        return self._carried.take_over(self._broadcast)

    def leave(self) -> None:
        """Have the loop come to it now."""
        self._carried.hurry()
