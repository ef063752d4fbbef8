"""The calls of one client on their way: carries out what the desk decides, on the loop of the client's connection."""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fluster.actors import frames, json_frames
from fluster.actors.actor_lane import lanes_are_on
from fluster.actors.calls import Broadcast, Call, Done, Part, Send
from fluster.actors.census import is_coming_back, why_nobody_serves
from fluster.actors.clock import SYSTEM_CLOCK, Clock
from fluster.actors.definition import near
from fluster.actors.desk import Desk
from fluster.actors.failures import decode_failure
from fluster.actors.frames import Moment, WireReply
from fluster.actors.futures import ActorFuture, is_running
from fluster.actors.lane_calls import AloneCall, LaneCalls
from fluster.actors.members import Member
from fluster.actors.notices import Notices
from fluster.actors.policies import RoundRobin
from fluster.actors.reader import ActorStream, StreamReader
from fluster.actors.retries import pause_before_retry
from fluster.actors.rosters import Change, Joined, Known, Left, Roster, Unknown
from fluster.actors.routing import NobodyServesError
from fluster.actors.windows import Window
from fluster.cluster import AsyncCluster
from fluster.errors import ActorDiedError, ActorNotFoundError, ActorTimeoutError, ConnectionLostError, MailboxFullError
from fluster_bus import arenas, codec, payloads, subjects
from fluster_bus.bus import Bus
from fluster_bus.carrier import Carrier
from fluster_bus.delivery import Delivery
from fluster_bus.errors import (
    BusError,
    ClosedError,
    DisconnectedError,
    InvalidMessageError,
    MessageTooLargeError,
)
from fluster_bus.messages import JobId, JobInfo, StatusReply, StatusRequest
from fluster_bus.object_kinds import PAYLOADS
from fluster_bus.objects import ObjectStore
from fluster_bus.registry import Registry

log = logging.getLogger(__name__)

MAX_QUEUED = 100_000  # calls that have not been sent yet
_MAX_BYTES_OUT = 1 << 30
_HELD_FOR_S = 30.0  # calls without a deadline while there is no connection
_PAUSE_S = 0.05  # until a pool whose members may be on their way back is asked again
_JOBS_TIMEOUT_S = 2.0
_FRAME_OVERHEAD = 4096  # of a call around its payload, amply
_NO_RESPONDERS = "503"

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
        self.namespace = namespace
        self._bus = bus
        self._registry = registry
        self._store = ObjectStore(bus, namespace, PAYLOADS)
        self._max_payload = bus.max_payload - _FRAME_OVERHEAD
        self._desk = Desk()
        self._rosters: dict[str, Roster] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._inbox = payloads.inbox_here(bus.inbox())
        self._json_inbox = ""  # of actors that take JSON only: what comes there is never unpickled
        self._notices = Notices(bus, self._desk, self._inbox)
        self._arrived: deque[Call | Broadcast] = deque()  # by any thread
        self._held: deque[tuple[float, Call | Broadcast]] = deque()  # (since when, item), while there is no connection
        self._retrying: dict[Call, asyncio.TimerHandle] = {}  # they pause before they are sent again
        self._lonely: dict[str, set[Call]] = {}  # {pool: those that pause since nobody serves it}
        self._probing: set[str] = set()  # pools whose mailboxes were full are looked at again in a moment
        self._moving: set[str] = set()  # pools whose waiting calls may have found room
        self._awake = False
        self._flushing = False
        self._lane: LaneCalls | None = None
        self._wake = asyncio.Event()
        self._closed: Exception | None = None
        self._tell(self._start)

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
        if self._closed is not None:
            raise copy.copy(self._closed)
        if len(self._arrived) >= MAX_QUEUED:
            raise MailboxFullError(f"{item}: this client has {MAX_QUEUED:,} calls waiting to be sent: wait for some")
        self._arrived.append(item)
        if self._closed is not None:  # it closed at this very moment, and may have looked before
            self._drop_arrived(self._closed)
        elif not self._awake:  # one wake-up for all that is submitted until the loop looks
            try:
                self._awake = True
                self._tell(self._wake.set)
            except BaseException:  # Ctrl-C: else nobody would wake the loop any more
                self._awake = False
                raise

    def use_lane(self) -> None:
        """Let threads that wait for their calls make them by themselves, where that changes nothing but the time."""
        with _callers_lock:
            if self._lane is None and self._closed is None and isinstance(self._bus, Bus) and lanes_are_on():
                self._notices.lane_inbox = payloads.inbox_here(self._bus.inbox())
                self._lane = LaneCalls(
                    self._bus.address,
                    self._notices.lane_inbox,
                    tell=self._tell_soon,
                    settle=lambda done: _settle(done, None),
                    on_other=self._on_lane_delivery,
                    on_timeout=self._on_lane_timeout,
                    on_lost=self._on_lane_lost,
                )

    def submit_alone(self, call: Call) -> None:
        """As `submit`, for a call whose thread waits for it next."""
        lane = self._lane
        if lane is None or not lane.connected or self._arrived or self._flushing or self._held:
            self.submit(call)
            return
        now = self._clock.now()
        member = self._desk.choose_alone(call)
        if member is None or member.takes_json_only or is_running(self.loop):
            self.submit(call)
            return
        self._take_declared_timeout(call, member)
        if not lane.send(call, member, now):
            self.submit(call)
            return
        roster = self._rosters.get(call.pool)
        if roster is not None and member.endpoint_id not in roster.members:
            # It ended between the choice and the sending, and what ends its calls may have been here before this one.
            lane.when_seen(lambda: self._end_calls(call.pool, Left(member.endpoint_id)))

    def deadline_of(self, timeout_s: float | None) -> Moment | None:
        """The moment at which nobody waits any more."""
        return None if timeout_s is None or math.isinf(timeout_s) else self._clock.now().after(timeout_s)

    def withdraw(self, call: Call) -> None:
        """Tell the actor that has this call that nobody waits for it any more."""
        self._notices.withdrawn.append(call)
        self._wake_soon()

    def tell_read(self, call: Call) -> None:
        """Tell the actor how far its stream is read."""
        self._notices.read.append(call)
        self._wake_soon()

    def _wake_soon(self) -> None:
        if not self._awake:
            try:
                self._awake = True
                self._tell_soon(self._wake.set)
            except BaseException:  # as above
                self._awake = False
                raise

    def open_pool(self, name: str, *, fixed: Sequence[Member] | None = None) -> None:
        """Watch who serves `name`, unless `fixed` tells it. Each needs its `close_pool`."""
        self._tell(self._open_pool, name, fixed)

    def close_pool(self, name: str, error: Exception | None = None) -> None:
        """Give a pool up; once all that were opened under its name are, its calls end with `error`."""
        self._tell_soon(self._close_pool, name, error or _shut_down(name))

    def size(self, name: str) -> int:
        """How many members are known to take calls."""
        roster = self._rosters.get(name)
        return len(roster.present()) if roster is not None else 0

    def _tell(self, callback: Callable[..., object], *args: object) -> None:
        """Have something done on the loop: at once if this is its thread."""
        if is_running(self.loop):
            callback(*args)
            return
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError as error:
            raise _closed() from error

    def _tell_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Never at once: pools are also given up by the collector of garbage, in the middle of anything."""
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("the loop is closed, and all calls with it")

    # ---- on the loop ------------------------------------------------------------------------------------

    async def roster(self, name: str) -> Roster:
        """The roster of an open pool, once it is known. Raises the BusError that keeps it from being read."""
        roster = self._rosters.get(name)
        if roster is None:
            raise _shut_down(name)
        while not roster.known and roster.error is None and self._closed is None:
            await roster.change()
        error = self._closed or (None if roster.known else roster.error)
        if error is not None:
            raise copy.copy(error)
        return roster

    async def jobs(self, job_ids: Iterable[JobId]) -> list[JobInfo]:
        """Those of the jobs of which the controller tells; none when it does not answer at once."""
        request = StatusRequest(job_ids=tuple(sorted(job_ids)))
        if not request.job_ids:
            return []
        try:
            subject = subjects.jobs_verb(self.namespace, "status")
            answer = await self._bus.request(subject, request.to_json(), timeout_s=_JOBS_TIMEOUT_S)
            return list(StatusReply.from_json(answer.data).jobs)
        except BusError as error:
            log.info("how the jobs of actors are cannot be told: %s", error)
            return []

    def _start(self) -> None:
        self._bus.on_disconnect(self._on_disconnect)
        self._bus.on_reconnect(self._on_reconnect)
        self._bus.spawn(self._run(), "calls")

    async def _run(self) -> None:
        error: Exception = _closed()
        try:
            await self._bus.subscribe(f"{self._inbox}.{subjects.ANY_TOKEN}", self._on_delivery)
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._flush()
        except Exception as unexpected:
            error = unexpected
            raise
        finally:
            self._close(error)

    def _close(self, error: Exception) -> None:
        self._closed = error
        self._bus.off(self._on_disconnect)
        self._bus.off(self._on_reconnect)
        for task in self._watches.values():
            task.cancel()
        self._adopt_all()
        self._finish(self._desk.close(error), final=True)
        if self._lane is not None:
            self._lane.close()
        held, self._held = self._held, deque()
        self._finish((Done(item, ok=False, error=error) for _since, item in held), final=True)
        self._finish([Done(call, ok=False, error=error) for call in self._retrying], final=True)
        self._drop_arrived(error)
        for roster in self._rosters.values():
            roster.tell(Known())

    def _drop_arrived(self, error: Exception) -> None:
        while self._arrived:
            try:
                item = self._arrived.popleft()
            except IndexError:  # another thread took the last one
                return
            _settle(Done(item, ok=False, error=error), error)

    async def _flush(self) -> None:
        self._awake = False  # before looking: who submits from here on wakes the loop again
        self._flushing = True
        try:
            await self._send_arrived()
        finally:
            self._flushing = False

    async def _send_arrived(self) -> None:
        for call in list(self._notices.withdrawn):
            if call.number is not None:
                self._adopt(call.number)
        self._notices.take_withdrawn()
        arrived = self._take_arrived()
        if not self._bus.connected:
            self._hold(arrived)
            self._notices.clear()
            return
        # First, as they make room. Whatever they concern was published when this was last here.
        await self._notices.publish()
        items = [item for _since, item in self._held] + arrived
        self._held.clear()
        now = self._clock.now()
        sends, done = self._desk.route(items, now) if items else ([], [])
        moving, self._moving = self._moving, set()
        for name in moving:
            more_sends, more_done = self._desk.route_waiting(name, now)
            sends += more_sends
            done += more_done
        self._finish(done)
        for send in sends:
            await self._publish(send)

    def _take_arrived(self) -> list[Call | Broadcast]:
        arrived = []
        while self._arrived:
            item = self._arrived.popleft()
            if self._desk.bytes_out + self._desk.bytes_turned_away > _MAX_BYTES_OUT:
                self._finish([_too_much_out(item)])
                continue
            if isinstance(item, Call) and item.deadline is not None and item.timer is None:
                self._set_timer(item, item.deadline)
            arrived.append(item)
        return arrived

    def _set_timer(self, call: Call, deadline: Moment) -> None:
        left_s = frames.seconds_between(self._clock.now(), deadline)
        call.timer = self._clock.call_later(self.loop, left_s, self._on_timeout, call)

    async def _publish(self, send: Send) -> None:
        self._set_deadlines(send)
        first = send.calls[0]
        token = first.method if len(send.calls) == 1 else frames.JOINED
        if send.member is None:
            subject = subjects.actor_all(self.namespace, send.pool, token)
        else:
            subject = subjects.method_of_member(send.member.address, token)
        try:
            if send.member is not None and send.member.takes_json_only:
                await self._publish_json(subject, send)
                return
            calls = send.calls if send.member is not None else send.calls[:1]  # a broadcast is one call for all
            wire = [call.to_wire(call.payload) for call in calls]
            if any(type(call.payload) is not bytes or len(call.payload) > self._max_payload for call in calls):
                shares_memory = self._shares_memory(send)
                wire = [call.to_wire(await self._carried(call.payload, shares_memory)) for call in calls]
                if all(call.number != send.number for call in send.calls):
                    return  # they have ended meanwhile
            body = frames.encode_calls(wire)
            await self._bus.publish(subject, body, reply=f"{self._inbox}.{send.number}")
        except DisconnectedError:
            self._hold(self._desk.take_back(send.number))
        except MessageTooLargeError as error:
            calls = self._desk.take_back(send.number)
            if len(calls) <= 1 or send.member is None:
                self._finish([Done(call, ok=False, error=error) for call in calls])
                return
            for call in calls:  # together they were too large
                sends, done = self._desk.route([call], self._clock.now())
                self._finish(done)
                for each in sends:
                    await self._publish(each)
        except BusError as error:
            self._finish([Done(call, ok=False, error=error) for call in self._desk.take_back(send.number)])

    async def _publish_json(self, subject: str, send: Send) -> None:
        call = send.calls[0]
        try:
            body = json_frames.encode_call(call.payload)
        except TypeError as error:
            self._finish(self._desk.on_refused(send.number, error))
            return
        if not self._json_inbox:
            inbox = self._bus.inbox()
            await self._bus.subscribe(f"{inbox}.{subjects.ANY_TOKEN}", self._on_json_delivery)
            self._json_inbox = self._notices.json_inbox = inbox
        headers = json_frames.headers_of(frames.plain(call.deadline), call.trace)
        await self._bus.publish(subject, body, reply=f"{self._json_inbox}.{send.number}", headers=headers)

    def _shares_memory(self, send: Send) -> bool:
        """Whether all who get the message can read what this process lends."""
        members = [send.member] if send.member is not None else self._desk.members(send.pool)
        return all(member.place is not None and member.place == arenas.place() for member in members)

    async def _carried(self, payload: bytes, shares_memory: bool) -> bytes:
        """As it travels: what no message can carry is put into the object store. The calls behind it wait for that."""
        payload = bytes(payload if shares_memory else payloads.spelled_out(payload))
        if len(payload) > self._max_payload:
            payload = await payloads.stored(payload, self._store)
        return payload

    def _set_deadlines(self, send: Send) -> None:
        """Calls that came without a timeout get the one that their method declares, as the registry tells it."""
        for call in send.calls:
            if call.timer is not None:
                continue
            if call.deadline is None:
                members = [send.member] if send.member is not None else self._desk.members(send.pool)[:1]
                if members:
                    self._take_declared_timeout(call, members[0])
            if call.deadline is not None:
                self._set_timer(call, call.deadline)

    def _take_declared_timeout(self, call: Call, member: Member) -> None:
        if call.timeout_s is None and call.deadline is None and member.timeouts and call.method in member.timeouts:
            call.timeout_s = member.timeouts[call.method]
            call.deadline = self._clock.now().after(call.timeout_s)

    # ---- what happens -----------------------------------------------------------------------------------

    def _on_delivery(self, delivery: Delivery) -> None:
        number = int(subjects.last_token(delivery.subject))
        if delivery.headers is not None and delivery.status == _NO_RESPONDERS:
            self._on_no_responders(number)
            return
        try:
            endpoint_id, replies = frames.decode_replies(delivery.data)
        except InvalidMessageError as error:
            if not codec.is_pickle(delivery.data):
                self._finish(self._desk.on_refused(number, _refusal(delivery.data)))
                return
            log.warning("an answer was dropped: %s", error)
            return
        if any(kind == frames.ITEMS or (kind is True and payloads.is_lent(each)) for _index, kind, each in replies):
            # Also what nobody waits for any more: so its sender knows that it is dropped.
            replies = [_held(reply) for reply in replies]
        if delivery.reply:
            word = self._notices.answer(delivery.reply, number, endpoint_id, replies)
            self._bus.spawn(word, "word of a reader")
            return
        self._on_replies(number, endpoint_id, replies)

    def _on_json_delivery(self, delivery: Delivery) -> None:
        number = int(subjects.last_token(delivery.subject))
        if delivery.headers is not None and delivery.status == _NO_RESPONDERS:
            self._on_no_responders(number)
            return
        member = self._desk.recipient(number)
        if member is None or not member.takes_json_only:
            return  # nobody waits any more, or it is somebody else's who shall not be answered from here
        try:
            ok, payload = json_frames.decode_reply(delivery.data)
        except InvalidMessageError as error:
            self._finish(self._desk.on_refused(number, error))
            return
        self._on_replies(number, member.endpoint_id, [(0, ok, payload)])

    def _on_replies(self, number: int, endpoint_id: str, replies: list[WireReply]) -> None:
        self._finish(self._desk.on_reply(number, endpoint_id, replies))
        for name in self._desk.turned_away():
            self._move(name)
            self._probe_later(name)

    def _on_no_responders(self, number: int) -> None:
        again, done = self._desk.on_no_responders(number, self._clock.now())
        self._finish(done)
        for name in self._desk.paused():
            self.loop.call_later(_PAUSE_S, self._resume, name)
        if again:
            self._arrived.extendleft(reversed(again))
            self._wake.set()

    def _on_part(self, part: Part) -> None:
        call = part.call
        ticket = call.ticket
        if part.kind == frames.OPENED and isinstance(ticket, ActorFuture):
            if call.timer is not None:
                call.timer.cancel()
            reader = StreamReader(
                str(call),
                Window(*part.payload),
                timeout_s=None if call.deadline is None else call.timeout_s,
                loop=self.loop,
                on_read=lambda: self.tell_read(call),
                withdraw=lambda: self.withdraw(call),
            )
            call.ticket = reader
            ticket.set_result(ActorStream(reader))  # nobody else holds on to it: so it is closed when nobody wants it
        elif part.kind == frames.ITEMS and isinstance(ticket, StreamReader) and not ticket.take(*part.payload):
            self.withdraw(call)

    def _adopt(self, number: int, alone: AloneCall | None = None) -> Call | None:
        """Have the desk know a call that was sent alone; None when it has ended, or was adopted before."""
        if alone is None:
            alone = self._lane.take(number) if self._lane is not None else None
        if alone is None:
            return None
        call = alone.call
        self._finish(self._desk.adopt(number, call, alone.member, alone.sent_at))
        if call.deadline is not None:
            self._set_timer(call, call.deadline)
        return call

    def _adopt_all(self, pool: str | None = None) -> None:
        for number in self._lane.numbers(pool) if self._lane is not None else ():
            self._adopt(number)

    def _on_lane_delivery(self, number: int, alone: AloneCall | None, delivery: Delivery) -> None:
        self._adopt(number, alone)
        self._on_delivery(delivery)

    def _on_lane_timeout(self, number: int) -> None:
        call = self._adopt(number)
        if call is not None:
            self._on_timeout(call)

    def _on_lane_lost(self, next_number: int) -> None:
        for number in self._lane.numbers() if self._lane is not None else ():
            if number > next_number:
                self._adopt(number)
        self._finish(self._desk.on_disconnected(lambda number: next_number < number < 0))

    def _move(self, name: str) -> None:
        if self._desk.has_waiting(name):
            self._moving.add(name)
            self._wake.set()

    def _probe_later(self, name: str) -> None:
        if name not in self._probing:
            self._probing.add(name)
            self.loop.call_later(_PAUSE_S, self._probe, name)

    def _probe(self, name: str) -> None:
        self._probing.discard(name)
        self._desk.probe(name)
        self._move(name)
        if name in self._desk.turned_away():
            self._probe_later(name)

    def _resume(self, name: str) -> None:
        self._desk.resume(name)
        self._move(name)

    def _on_timeout(self, call: Call) -> None:
        self._notices.on_timeout(call)
        self._wake.set()
        self._finish(
            [
                Done(
                    call,
                    ok=False,
                    error=ActorTimeoutError(f"{call}: no answer within {call.timeout_s:g} s; it may have run"),
                )
            ]
        )

    def _on_disconnect(self) -> None:
        self._finish(self._desk.on_disconnected())

    def _on_reconnect(self) -> None:
        self._desk.on_reconnected(self._clock.now())
        self._wake.set()

    def _hold(self, items: Iterable[Call | Broadcast]) -> None:
        """Keep calls until there is a connection again, those without a deadline for a while only."""
        now = self.loop.time()
        for item in items:
            if len(self._held) >= MAX_QUEUED:
                error = MailboxFullError(
                    f"{item}: there is no connection, and {MAX_QUEUED:,} calls wait for it already"
                )
                self._finish([Done(item, ok=False, error=error)])
                continue
            if not self._held:
                self.loop.call_later(_HELD_FOR_S, self._drop_held)
            self._held.append((now, item))

    def _drop_held(self) -> None:
        latest = self.loop.time() - _HELD_FOR_S
        too_old = [item for since, item in self._held if since <= latest and item.deadline is None]
        self._held = deque(held for held in self._held if held[0] > latest or held[1].deadline is not None)
        self._finish(
            Done(
                item,
                ok=False,
                error=ConnectionLostError(f"{item}: no connection to the bus for {_HELD_FOR_S:g} s; it was not sent"),
            )
            for item in too_old
        )
        if self._held:
            self.loop.call_later(max(self._held[0][0] - latest, 1.0), self._drop_held)

    # ---- pools ------------------------------------------------------------------------------------------

    def _open_pool(self, name: str, fixed: Sequence[Member] | None) -> None:
        roster = self._rosters.get(name)
        if roster is None:
            roster = self._rosters[name] = Roster(name, self._on_change)
            self._desk.open_pool(name, RoundRobin(), shares_subject=fixed is None)
            if fixed is None:
                self._watches[name] = self.loop.create_task(roster.watch(self._registry), name=f"members of {name}")
            else:
                for member in fixed:
                    roster.tell(Joined(member))
                roster.tell(Known())
        roster.users += 1

    def _close_pool(self, name: str, error: Exception) -> None:
        roster = self._rosters.get(name)
        if roster is None or self._closed is not None:
            return
        roster.users -= 1
        if roster.users == 0:
            del self._rosters[name]
            watch = self._watches.pop(name, None)
            if watch is not None:
                watch.cancel()
            self._adopt_all(name)
            paused = [Done(call, ok=False, error=error) for call in self._retrying if call.pool == name]
            self._finish([*self._desk.close_pool(name, error), *paused], final=True)

    def _on_change(self, name: str, change: Change) -> None:
        if self._closed is not None:
            return
        match change:
            case Joined(member):
                self._desk.on_member(name, replace(member, disconnected_at=None))
                for call in sorted(self._lonely.pop(name, ()), key=lambda each: each.order):
                    self._send_again(call)
            case Left(endpoint_id):
                self._desk.on_member_leaving(name, endpoint_id)
            case Known():
                self._desk.on_known(name)
            case Unknown(error):
                self._fail_waiting(name, error)
        self._move(name)
        if self._lane is None:
            self._end_calls(name, change)
        elif isinstance(change, Left) or (isinstance(change, Joined) and change.member.disconnected_at is not None):
            # What a member answered before comes on another connection, and may be on its way.
            self._lane.when_seen(lambda: self._end_calls(name, change))

    def _end_calls(self, name: str, change: Change) -> None:
        """End what is out at a member that has ended or lost its connection, if that is still the newest of it."""
        roster = self._rosters.get(name)
        if roster is None or self._closed is not None:
            return
        self._adopt_all(name)
        match change:
            case Joined(member) if roster.members.get(member.endpoint_id) == member:
                self._finish(self._desk.on_member(name, member))
            case Left(endpoint_id) if endpoint_id not in roster.members:
                self._finish(self._desk.on_member_gone(name, endpoint_id))
        self._move(name)

    def _fail_waiting(self, name: str, error: Exception) -> None:
        if name in self._rosters:
            self._finish(self._desk.fail_waiting(name, error), final=True)

    # ---- the end of a call ------------------------------------------------------------------------------

    def _finish(self, done: Iterable[Done | Part], *, final: bool = False) -> None:
        unexplained: list[Done] = []
        for each in done:
            if isinstance(each, Part):
                self._on_part(each)
                continue
            if not (each.ok or final) and self._retry(each):
                continue
            if isinstance(each.error, NobodyServesError) and not final:
                unexplained.append(each)
            elif each.ok and payloads.is_stored(each.payload):
                self._bus.spawn(self._fetch(each), "stored result")
            else:
                _settle(each, each.error)
        if unexplained:
            self._bus.spawn(self._explain(unexplained), "explanation")

    def _retry(self, done: Done) -> bool:
        """Whether the call is sent again, after a pause, rather than over."""
        call, roster = done.call, self._rosters.get(done.call.pool)
        if isinstance(call, Broadcast) or roster is None or call.ticket.done() or len(self._retrying) >= MAX_QUEUED:
            return False
        if isinstance(call.ticket, StreamReader):
            return False  # its reader has seen the beginning
        allowed = roster.retries.get(call.method, 0) if call.retries is None else call.retries
        pause_s = pause_before_retry(done, allowed, self._clock.now()) if allowed else None
        if pause_s is None:
            return False
        call.retried += 1
        self._retrying[call] = self.loop.call_later(pause_s, self._send_again, call)
        if isinstance(done.error, NobodyServesError):
            self._lonely.setdefault(call.pool, set()).add(call)
        return True

    def _send_again(self, call: Call) -> None:
        self._retrying.pop(call).cancel()
        self._lonely.get(call.pool, set()).discard(call)
        if call.ticket.done():  # it ran into its deadline, or was taken back
            return
        call.over, call.tried = False, ()
        self._arrived.append(call)
        self._wake.set()

    async def _fetch(self, done: Done) -> None:
        """End a call whose result lies in the object store."""
        try:
            payload = await payloads.fetched(done.payload, self._store)
        except Exception as error:
            _settle(done, error)
        except asyncio.CancelledError:
            _settle(done, _closed())
            raise
        else:
            _settle(done._replace(payload=payload), None)

    async def _explain(self, done: list[Done]) -> None:
        """End calls for which there is nobody with names that are near, and with what to do."""
        try:
            names = {endpoint.name for endpoint in await self._registry.list()}
        except BusError as error:
            log.info("the registry could not be read: %s", error)
            names = set()
        for each in done:
            name = each.call.pool
            roster = self._rosters.get(name)
            jobs = await self.jobs(roster.jobs) if roster is not None else []
            died = why_nobody_serves(name, jobs)
            if died is not None:
                _settle(each, ActorDiedError(f"{each.error}: {died}"))
                continue
            hint = near(name, names) if name not in names and not is_coming_back(name, jobs) else ""
            _settle(each, ActorNotFoundError(f"{each.error}{hint or '; pool.wait_for_size(1) waits for one'}"))


def _settle(done: Done, error: Exception | None) -> None:
    call = done.call
    if isinstance(call, Broadcast):
        call.fail(error or _closed())
        return
    if call.ticket.done():
        return  # its caller took it back, or it ran into its timeout where it waited
    call.over = True
    if call.timer is not None:
        call.timer.cancel()
    if not call.begin():
        return
    if error is not None:
        call.ticket.set_exception(error)
    else:
        call.ticket.settle(done.ok, done.payload)


def _refusal(data: bytes) -> Exception:
    """What an actor says, in JSON, of a message that it does not read."""
    try:
        ok, payload = json_frames.decode_reply(data)
    except InvalidMessageError as error:
        return error
    return InvalidMessageError("an actor answered in JSON to a call that was none") if ok else decode_failure(payload)


def _too_much_out(item: Call | Broadcast) -> Done:
    text = f"{item}: {_MAX_BYTES_OUT >> 30} GiB of this client's calls are not answered yet: wait for some of them"
    return Done(item, ok=False, error=MailboxFullError(text))


def _held(reply: WireReply) -> WireReply:
    index, kind, payload = reply
    if kind == frames.ITEMS:
        first, items = payload
        payload = first, [payloads.held(item) for item in items]
    elif kind is True:
        payload = payloads.held(payload)
    return index, kind, payload


def _shut_down(name: str) -> ActorNotFoundError:
    return ActorNotFoundError(f"the pool {name!r} was shut down: make another")


def _closed() -> ClosedError:
    return ClosedError("the connection to the cluster was closed")
