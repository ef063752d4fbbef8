"""The calls of one client on their way: carries out what the router decides, on the loop of the client's connection.

threads ── arrivals ──► router ── sends ──► publisher ──► bus
threads ◄── outcomes ◄── router ◄── replies, members, losses ──┘
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

from fluster.actors.client.arrivals import Arrivals
from fluster.actors.client.carried_calls import CarriedCalls
from fluster.actors.client.census import Explanations
from fluster.actors.client.inboxes import Inboxes
from fluster.actors.client.outcomes import Outcomes, settle
from fluster.actors.client.pending_calls import Deadlines, HeldCalls, PausedCalls, WaitingPools
from fluster.actors.client.publisher import Notices, Publisher
from fluster.actors.client.rosters import Change, Joined, Left, Roster, Rosters, Synced, WatchFailed, was_shut_down
from fluster.actors.client.stored_calls import StoredCalls
from fluster.actors.protocol.calls import Broadcast, Call, Done, Send, failed, faulted
from fluster.actors.protocol.clock import SYSTEM_CLOCK, Clock
from fluster.actors.protocol.frames import Moment, WireReply
from fluster.actors.protocol.json_frames import NoJsonError
from fluster.actors.protocol.members import Member, lanes_are_on
from fluster.actors.protocol.policies import RoundRobin
from fluster.actors.results.loop_calls import closed, tell, tell_soon
from fluster.actors.routing.router import Router
from fluster.cluster import AsyncCluster
from fluster.cluster.portal import forked
from fluster.errors import ActorTimeoutError, MailboxFullError
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import Carrier
from fluster_bus.core.errors import BusError, DisconnectedError, MessageTooLargeError
from fluster_bus.core.stream_bounds import PAYLOADS
from fluster_bus.messages import JobId, JobInfo
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.registry import Registry

log = logging.getLogger(__name__)

_MAX_BYTES_OUT = 1 << 30

_callers: weakref.WeakKeyDictionary[AsyncCluster, Caller] = weakref.WeakKeyDictionary()
_callers_lock = threading.Lock()


class Caller:
    """Sends calls and hands out the answers, for all pools of one client: so its calls to a member stay in order."""

    def __init__(
        self,
        bus: Carrier,
        registry: Registry,
        namespace: str,
        loop: asyncio.AbstractEventLoop,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.loop = loop
        self._clock = clock
        self.bus = bus
        self._namespace = namespace
        self.router = Router()
        self._inboxes = Inboxes(
            bus,
            namespace,
            self.router.recipient,
            expects=self.router.expects,
            on_replies=self._on_replies,
            on_question=self._on_question,
            on_no_responders=self._on_no_responders,
            on_refused=self._on_refused,
        )
        self.arrivals = Arrivals(loop, drop=lambda item, error: settle(Done(item, ok=False), error))
        self._deadlines = Deadlines(clock, loop, self._on_timeout)
        self._notices = Notices(bus, self.router, self._inboxes)
        self._rosters = Rosters(loop, registry, self._on_change)
        self._paused = PausedCalls(loop, clock, self._rosters, self.arrivals.put_again)
        self._explanations = Explanations(bus, registry, namespace, self._rosters)
        store = ObjectStore(bus, namespace, PAYLOADS)
        self._outcomes = Outcomes(
            bus,
            store,
            self._explanations,
            loop=loop,
            retry=self._paused.take,
            tell_read=self.tell_read,
            withdraw=self.withdraw,
        )
        self._finish = self._outcomes.finish
        self._held = HeldCalls(loop, self._finish)
        # What the loop has yet to open: the name of a pool, the members if they are fixed, whether they are durable.
        self._openings: deque[tuple[str, Sequence[Member] | None, bool]] = deque()
        self.carried = CarriedCalls(
            loop,
            clock,
            self.router,
            self._inboxes,
            self.arrivals,
            held=self._held,
            deadlines=self._deadlines,
            rosters=self._rosters,
            openings=self._openings,
            finish=self._finish,
            on_timeout=self._on_timeout,
            end_calls=self._end_calls,
        )
        self._waiting = WaitingPools(self.router, loop, self.arrivals.wake)
        self._publisher = Publisher(bus, namespace, store, self._inboxes)
        self.stored = StoredCalls(cast("Bus", bus), namespace, self._finish, prepare=self._prepare_stored)
        tell(loop, self._start)

    @classmethod
    def of(cls, cluster: AsyncCluster, loop: asyncio.AbstractEventLoop, clock: Clock = SYSTEM_CLOCK) -> Caller:
        """The one that all pools of this client share; the first of them brings the clock."""
        with _callers_lock:
            caller = _callers.get(cluster)
            if caller is None:
                caller = _callers[cluster] = cls(cluster.bus, cluster.registry, cluster.namespace, loop, clock)
            return caller

    # ---- from any thread --------------------------------------------------------------------------------

    def submit(self, item: Call | Broadcast) -> None:
        """Send a call as soon as the loop comes to it. Raises MailboxFullError, ClosedError."""
        self.arrivals.put(item)

    @property
    def is_sending(self) -> bool:
        """True while something that was submitted is not with the bus yet."""
        return bool(self.arrivals) or self.arrivals.in_hand

    def use_lane(self) -> None:
        """Let threads that wait for their calls carry them, where that changes nothing but the time."""
        with _callers_lock:
            if self._closed is None and isinstance(self.bus, Bus) and lanes_are_on():
                self.carried.open(self.bus.address, self._namespace)

    def deadline_of(self, timeout_s: float | None) -> Moment | None:
        """The moment from which the call is no longer waited for."""
        return self._deadlines.after(timeout_s)

    def withdraw(self, call: Call) -> None:
        """Tell the actor that has this call that it is no longer waited for."""
        self._notices.withdrawn.append(call)
        self.arrivals.wake_soon()

    def tell_read(self, call: Call) -> None:
        """Tell the actor how far its stream is read."""
        self._notices.read.append(call)
        self.arrivals.wake_soon()

    def open_pool(self, name: str, *, fixed: Sequence[Member] | None = None, is_durable: bool = False) -> None:
        """Watch who serves `name`, unless `fixed` tells it. Each needs its `close_pool`."""
        self._openings.append((name, fixed, is_durable))
        tell(self.loop, self._open_pools)

    def close_pool(self, name: str, error: Exception | None = None) -> None:
        """Give a pool up; once all that were opened under its name are, its calls end with `error`."""
        tell_soon(self.loop, self._close_pool, name, error or was_shut_down(name))

    def size(self, name: str) -> int:
        """How many members are known to take calls."""
        roster = self._rosters.get(name)
        return len(roster.present()) if roster is not None else 0

    # ---- on the loop ------------------------------------------------------------------------------------

    async def roster(self, name: str) -> Roster:
        """The roster of an open pool, once it is known. Raises the BusError that keeps it from being read."""
        return await self._rosters.known(name)

    async def jobs(self, job_ids: Iterable[JobId]) -> list[JobInfo]:
        """Those of the jobs of which the controller tells; none when it does not answer at once."""
        return await self._explanations.jobs(job_ids)

    @property
    def _closed(self) -> Exception | None:
        return self.arrivals.closed

    def _start(self) -> None:
        self.bus.on_disconnect(self._on_disconnect)
        self.bus.on_reconnect(self._on_reconnect)
        if isinstance(self.bus, Bus):
            self.bus.on_leaving(self.arrivals.wake)  # what may have been taken back, and was not, goes before
        self.bus.spawn(self._run(), "calls")

    async def _run(self) -> None:
        error: Exception = closed()
        try:
            await self._inboxes.open()
            while True:
                await self.arrivals.wait()
                self.arrivals.in_hand = True
                try:
                    await self._flush()
                finally:
                    self.arrivals.in_hand = False
        except Exception as unexpected:
            error = unexpected
            raise
        finally:
            self._close(error)

    def _close(self, error: Exception) -> None:
        self.arrivals.close(error)
        self.bus.off(self._on_disconnect)
        self.bus.off(self._on_reconnect)
        self.bus.off(self.arrivals.wake)
        self.carried.hand_all_to_router()
        self._finish(self.router.close(error), final=True)
        self.carried.close()
        kept = [*self._held.take(), *self._paused.all(), *self.stored.take_all()]
        self._finish([Done(item, ok=False, error=error) for item in kept], final=True)
        self.arrivals.drop_rest()
        self._rosters.close_all(error)

    async def _flush(self) -> None:
        for call in list(self._notices.withdrawn):
            if call.number is not None:
                self.carried.hand_to_router(call.number)
        self._notices.take_withdrawn()
        arrived = self._take_arrived()
        if not self.bus.connected:
            self._held.add(arrived)
            self._notices.clear()
            return
        # First, as they make room. Whatever they concern was published when this was last here.
        await self._publish_notices()
        items = self._held.take() + arrived
        if self.stored.in_use:
            items = self.stored.take(items)
        now = self._clock.now()
        sends, done = self.router.route(items, now) if items else ([], [])
        for name in self._waiting.take():
            more_sends, more_done = self.router.route_waiting(name, now)
            sends += more_sends
            done += more_done
        if self.router.in_grace(now):
            self._waiting.on_paused()
        self._finish(done)
        for send in sends:
            if self._held:  # the connection was lost meanwhile: what follows must not go before what is held
                self._held.add(self.router.take_back(send.number))
            else:
                await self._publish(send)

    async def _publish_notices(self) -> None:
        try:
            await self._notices.publish()
        except Exception:  # a fault of ours: not a reason to keep back calls
            log.exception("actors did not learn what became of calls")

    def _take_arrived(self) -> list[Call | Broadcast]:
        arrived = self.arrivals.take()
        self._open_pools()  # woken by another thread, the loop may be here before it has opened a call's pool
        if self.router.bytes_out + self.router.bytes_turned_away > _MAX_BYTES_OUT:
            self._finish(map(_too_much_out, arrived))
            return []
        for item in arrived:
            if item.deadline is not None:
                self._deadlines.watch(item)
        return arrived

    async def _publish(self, send: Send) -> None:
        members = [send.member] if send.member is not None else self.router.members(send.pool)
        for call in send.calls:
            if members and members[0].timeouts:
                self._deadlines.take_declared(call, members[0])
            if call.deadline is not None:
                self._deadlines.watch(call)
        try:
            await self._publisher.publish(send, members)
        except DisconnectedError:
            self._held.add(self.router.take_back(send.number))
        except MessageTooLargeError as error:
            await self._publish_apart(send, error, failed)
        except (BusError, NoJsonError) as error:
            self._finish([Done(call, ok=False, error=error) for call in self.router.take_back(send.number)])
        except Exception as error:
            await self._publish_apart(send, error, faulted)

    async def _publish_apart(self, send: Send, error: Exception, end: Callable[[Call, Exception], Done]) -> None:
        """Publish calls one by one that could not be published together; one that was alone ends."""
        calls = self.router.take_back(send.number)
        if len(calls) <= 1 or send.member is None:
            self._finish([end(call, error) for call in calls])
            return
        for call in calls:
            sends, done = self.router.route([call], self._clock.now())
            self._finish(done)
            for each in sends:
                await self._publish(each)

    # ---- what happens -----------------------------------------------------------------------------------

    def _on_replies(self, number: int, endpoint_id: str, replies: list[WireReply]) -> None:
        self._finish(self.router.on_reply(number, endpoint_id, replies))
        self._waiting.on_turned_away()

    def _on_question(self, reply: str, number: int, endpoint_id: str, replies: list[WireReply]) -> None:
        self.bus.spawn(self._notices.answer(reply, number, endpoint_id, replies), "word of a reader")

    def _on_refused(self, number: int, error: Exception) -> None:
        self._finish(self.router.on_refused(number, error))

    def _on_no_responders(self, number: int) -> None:
        again, done = self.router.on_no_responders(number, self._clock.now())
        self._finish(done)
        self._waiting.on_paused()
        if again:
            self.arrivals.put_back(again)

    def _on_timeout(self, call: Call | Broadcast) -> None:
        if isinstance(call, Broadcast):
            text = f"{call}: it could not be sent within {call.timeout_s:g} s; it was not run"
            self._finish([failed(call, ActorTimeoutError(text))])
            return
        self._notices.on_timeout(call)
        self.arrivals.wake()
        text = f"{call}: no answer within {call.timeout_s:g} s; it may have run"
        self._finish([Done(call, ok=False, error=ActorTimeoutError(text))])

    def _on_disconnect(self) -> None:
        self._finish(self.router.on_disconnected())
        self.stored.on_disconnected()

    def _on_reconnect(self) -> None:
        self.router.on_reconnected(self._clock.now())
        self.arrivals.wake()

    # ---- pools ------------------------------------------------------------------------------------------

    def _open_pools(self) -> None:
        while self._openings:
            self._open_pool(*self._openings.popleft())

    def _open_pool(self, name: str, fixed: Sequence[Member] | None, is_durable: bool) -> None:
        is_new = self._rosters.open(name)
        if is_new:
            self.router.open_pool(name, RoundRobin(), shares_subject=fixed is None)
        if is_durable:
            self._store_calls_to(name)
        if is_new and fixed is None:
            self._rosters.watch(name)
        elif is_new:
            self._rosters.fill(name, fixed or ())

    def _store_calls_to(self, name: str) -> None:
        """Its actor is durable: what waits for it, and what comes, goes to its stream."""
        self.stored.add_name(name)
        self.stored.take(self.router.take_waiting(name))

    def _prepare_stored(self, call: Call) -> None:
        """A call is about to be stored. Raises ActorDeadlockError for one that would wait for itself."""
        for member in self.router.members(call.pool)[:1]:
            self._deadlines.take_declared(call, member)
        if call.blocks is not None and (deadlock := call.blocks.stored_deadlock(call)) is not None:
            raise deadlock
        self._deadlines.watch(call)

    def _close_pool(self, name: str, error: Exception) -> None:
        if self._rosters.close(name):
            self.carried.hand_all_to_router(name)
            kept = [*self._paused.of(name), *self.stored.close_pool(name)]
            ended = [Done(call, ok=False, error=error) for call in kept]
            self._finish([*self.router.close_pool(name, error), *ended], final=True)

    def _on_change(self, name: str, change: Change) -> None:
        if self._closed is not None:
            return
        match change:
            case Joined(member):
                if member.is_durable:
                    self._store_calls_to(name)
                else:
                    self.stored.remove_name(name)
                self.router.on_member(name, replace(member, disconnected_at=None))
                self._paused.on_member(name)
            case Left(endpoint_id):
                self.router.on_member_leaving(name, endpoint_id)
            case Synced(is_durable):
                if is_durable:
                    self._store_calls_to(name)
                self.router.on_known(name)
            case WatchFailed(error):
                if name in self._rosters:
                    self._finish(self.router.fail_waiting(name, error), final=True)
        self._waiting.move(name)
        if isinstance(change, Left) or (isinstance(change, Joined) and change.member.disconnected_at is not None):
            # What a member answered before may come on another connection, and be on its way.
            self.carried.when_seen(lambda: self._end_calls(name, change))

    def _end_calls(self, name: str, change: Change) -> None:
        """End what is out at a member that has ended or lost its connection, if that is still the newest of it."""
        roster = self._rosters.get(name)
        if roster is None or self._closed is not None:
            return
        self.carried.hand_all_to_router(name)
        match change:
            case Joined(member) if roster.members.get(member.endpoint_id) == member:
                self._finish(self.router.on_member(name, member))
            case Left(endpoint_id, reason) if endpoint_id not in roster.members:
                self._finish(self.router.on_member_gone(name, endpoint_id, reason))
            case _:
                pass
        self._waiting.move(name)


def _too_much_out(item: Call | Broadcast) -> Done:
    text = f"{item}: {_MAX_BYTES_OUT >> 30} GiB of this client's calls are not answered yet: wait for some of them"
    return Done(item, ok=False, error=MailboxFullError(text))


def _after_fork() -> None:
    """A forked child has its parent's objects and none of their threads: what it asked for would never be sent."""
    global _callers_lock  # noqa: PLW0603 - a thread that stayed behind may hold it
    _callers_lock = threading.Lock()
    for caller in list(_callers.values()):
        caller.arrivals.close(forked())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
