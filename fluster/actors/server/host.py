"""The actors of one process on the bus: subscribed, announced, registered, and taken away again."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import platform
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from fluster.actors.definition.context import ActorContext
from fluster.actors.definition.definition import ON_RESTORE
from fluster.actors.protocol import frames
from fluster.actors.protocol.frames import JSON
from fluster.actors.protocol.members import (
    CODEC,
    DISCONNECTED_AT,
    DURABLE,
    LAST_ERROR,
    LEAVING,
    PLACE,
    RECONNECTED_AT,
    RESTARTING,
    RESTARTS,
    RETRIES,
    TIMEOUTS,
    lanes_are_on,
)
from fluster.actors.results.loop_calls import StoredPayloads
from fluster.actors.server.actor_lane import ActorLane
from fluster.actors.server.durable import DurableActor
from fluster.actors.server.hosted import HostedActor
from fluster.actors.server.mailbox import DeliveryOrder
from fluster.actors.server.outbox import Outbox
from fluster.actors.server.producer import Producer
from fluster.actors.server.seats import Seat
from fluster.actors.server.supervision import HOOK_TIMEOUT_S
from fluster.cluster import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import Carrier, Interest
from fluster_bus.connection.services_api import Announcement, ServedEndpoint
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, NoRespondersError
from fluster_bus.core.stream_bounds import PAYLOADS
from fluster_bus.core.version import VERSION
from fluster_bus.messages import ActorSeat, Endpoint, EndpointId
from fluster_bus.payloads import arenas
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.registry import LEASE_S

log = logging.getLogger(__name__)

_POOL_QUEUE = "members"
_REGISTER_TIMEOUT_S = 30.0
_TAKEN_TIMEOUT_S, _TAKEN_PAUSE_S = 2.0, 0.002
LAST_CALLS_S = 1.0  # for those that are under way at an actor that is given up, or whose cluster is closed
_ASK_READERS_S = 5.0  # between questions whether a stream that hears nothing still has a reader
_MAX_LANES = 32  # of one process; further actors share its connection


@dataclass(eq=False)
class Served:
    """An actor and where it stands in the registry."""

    actor: HostedActor
    endpoint: Endpoint
    subscriptions: list[Interest] = field(default_factory=list)
    lane: ActorLane | None = None  # on which calls come, where it is not the connection of all
    renewals: asyncio.Task[None] | None = None
    lost_at: frames.Moment | None = None  # when the connection was lost on which calls come, until pools know it

    def note(self, **notes: str) -> None:
        """Tell pools something, from the next registration on."""
        self.endpoint = self.endpoint.model_copy(update={"metadata": {**self.endpoint.metadata, **notes}})


class Host:
    """Takes calls off the bus for actors. Lives on the loop of the cluster's connection."""

    def __init__(self, cluster: AsyncCluster) -> None:
        self._cluster = cluster
        self._bus: Carrier = cluster.bus
        self._loop = asyncio.get_running_loop()
        self._open: list[Served] = []
        self._lanes = 0
        store = ObjectStore(self._bus, cluster.namespace, PAYLOADS)
        self.stored = StoredPayloads(store, self._loop)
        self.outbox = Outbox(self._bus, self._loop, store)
        self._replies = asyncio.create_task(self.outbox.run(), name="replies of actors")
        self._questions = asyncio.create_task(self._ask_readers(), name="readers of streams")
        self._bus.on_disconnect(self._on_disconnect)
        self._bus.on_reconnect(self._on_reconnect)

    def endpoint(self, name: str, endpoint_id: EndpointId, actor: HostedActor, metadata: Mapping[str, str]) -> Endpoint:
        """What the registry will have about an actor."""
        address = subjects.actor_member(self._cluster.namespace, name, endpoint_id)
        methods = actor.methods.values()
        told = {
            TIMEOUTS: {method.name: method.timeout for method in methods if method.timeout is not None},
            RETRIES: {method.name: method.retries for method in methods if method.retries},
        }
        notes = {note: json.dumps(values) for note, values in told.items() if values}
        if actor.durable is not None:
            notes[DURABLE] = "yes"
        if actor.takes_json_only:
            notes[CODEC] = JSON
        elif (place := arenas.place()) is not None:
            notes[PLACE] = place
        return self._cluster.new_endpoint(name, address, endpoint_id=endpoint_id, metadata={**metadata, **notes})

    def seat(self, context: ActorContext, *, is_durable: bool) -> Seat:
        """The place of an actor of which there is one."""
        name, instance = str(context.actor_name), str(context.endpoint_id)
        if context.job_id is None:
            holder, who = "", f"process {os.getpid()} on {platform.node()}"
        else:  # its attempts follow each other
            holder, who = f"{context.job_id}.{context.task}", f"task {context.task} of job {context.job_id}"
        me = ActorSeat(instance=instance, holder=holder, who=who, is_durable=is_durable)
        registry = self._cluster.registry
        return Seat(self._bus, registry.seats, name, me, loop=self._loop, lease_s=registry.seat_lease_s)

    def durable(self, name: str, endpoint_id: EndpointId, instance: object) -> DurableActor:
        """What keeps a durable actor's calls and state."""
        bus, namespace = self._cluster.bus, self._cluster.namespace
        return DurableActor(
            bus,
            namespace,
            name,
            endpoint_id,
            outbox=self.outbox,
            store=self.stored.objects,
            loop=self._loop,
            has_hook=hasattr(instance, ON_RESTORE),
        )

    async def acquire_seat(self, served: Served) -> None:
        """Take the seat of an actor of which there is one, and what is kept of it. Raises ActorNameTakenError."""
        seat, durable = served.actor.seat, served.actor.durable
        if seat is None:
            return
        await seat.take(served.actor.supervisor.end)
        if durable is not None:
            served.actor.supervisor.saved = lambda: durable.saved
            await durable.take_over()

    async def _unregister(self, name: str, endpoint_id: str) -> None:
        """Have no call wait for an instance that was superseded. It may be stopped, and not tell by itself."""
        try:
            for endpoint in await self._cluster.registry.lookup(name):
                if endpoint.endpoint_id == endpoint_id:
                    await self._cluster.registry.unregister(endpoint)
        except BusError as error:
            log.info("%s of %s stays registered for now: %s", endpoint_id, name, error)

    async def release_seat(self, served: Served) -> None:
        """Have another take it."""
        if served.actor.seat is not None:
            await served.actor.seat.release()

    async def open(self, served: Served) -> None:
        """Take calls: listen first, then be known, so that a caller that finds the actor reaches it."""
        served.lane = await self._lane_for(served)
        try:
            await self._listen(served)
            await self._cluster.registry.register(served.endpoint)
        except BaseException:
            if served.lane is not None:
                await served.lane.close()
            raise
        self._open.append(served)
        seat, durable = served.actor.seat, served.actor.durable
        if seat is not None and seat.predecessor is not None:
            await self._unregister(served.endpoint.name, seat.predecessor)
        if seat is not None and durable is not None:
            durable.start(served.actor, seat)
        if served.endpoint.lease_s is not None:
            served.renewals = asyncio.create_task(self._renew(served), name=f"lease of {served.endpoint.name}")

    async def _listen(self, served: Served) -> None:
        namespace, name = self._cluster.namespace, served.endpoint.name
        to_any, to_all = subjects.actor_any(namespace, name), subjects.actor_all(namespace, name)
        to_one = subjects.actor_one(namespace, name, served.endpoint.endpoint_id)
        actor, lane = served.actor, served.lane
        accept = actor.accept if actor.durable is None else actor.accept_unstored
        if lane is not None:
            served.actor.attach_lane(lane)
            served.actor.start()
            await lane.subscribe(accept, (to_any, _POOL_QUEUE), (to_one, ""), (to_all, ""))
        else:
            served.actor.start()
            in_order = DeliveryOrder(accept, self._loop)
            served.subscriptions += [
                await self._bus.subscribe(to_any, in_order.on_call, queue=_POOL_QUEUE),
                await self._bus.subscribe(to_one, in_order.on_call),
                await self._bus.subscribe(to_all, in_order.on_broadcast),
            ]
        if actor.durable is not None:
            served.subscriptions.append(await actor.durable.listen())
        served.subscriptions += await _announcement(served, namespace).serve(self._bus)
        await self._bus.flush()

    async def _lane_for(self, served: Served) -> ActorLane | None:
        """A lane, where it can be had and is of use: for an actor whose calls run on one thread."""
        if not (isinstance(self._bus, Bus) and lanes_are_on() and served.actor.has_one_thread):
            return None
        if self._lanes >= _MAX_LANES:
            return None
        lane = ActorLane(
            self._bus.address,
            f"{served.endpoint.name} {served.endpoint.endpoint_id}",
            self.outbox,
            on_lost=lambda: self._on_lane_lost(served),
            on_back=lambda: self._on_lane_back(served),
        )
        try:
            await lane.open()
        except BusError as error:
            log.warning("%s takes its calls over the connection of all: %s", served.endpoint.name, error)
            return None
        self._lanes += 1
        return lane

    def _on_lane_lost(self, served: Served) -> None:
        served.lost_at = frames.now()

    def _on_lane_back(self, served: Served) -> None:
        if served in self._open:
            self._bus.spawn(self._until_told(self._come_back, served), f"return of {served.endpoint.name}")

    async def _renew(self, served: Served) -> None:
        while True:
            await asyncio.sleep((served.endpoint.lease_s or LEASE_S) / 3)
            try:
                await self._cluster.registry.register(served.endpoint)
            except BusError as error:
                log.info("the lease of %s was not renewed: %s", served.endpoint.name, error)

    async def _ask_readers(self) -> None:
        while True:
            await asyncio.sleep(_ASK_READERS_S)
            streams = [producer for served in self._open for producer in served.actor.streams.all()]
            await asyncio.gather(*(self._ask_reader(producer) for producer in streams if not producer.was_heard_of()))

    async def _ask_reader(self, producer: Producer) -> None:
        """End a stream whose reader is gone. Silence alone says nothing: the server knows who is there."""
        question = frames.encode_replies(producer.endpoint_id, [(producer.index, frames.PROBE, None)])
        try:
            answer = await self._bus.request(producer.subject, question)
            gone = answer.data == frames.UNWANTED
        except NoRespondersError:
            gone = True
        except BusError as error:
            log.debug("the reader of %s did not answer: %s", producer.subject, error)
            return
        if gone:
            producer.cancel()

    def _on_disconnect(self) -> None:
        for served in self._open:
            if served.lane is None:
                served.lost_at = frames.now()

    def _on_reconnect(self) -> None:
        for served in self._open:
            self._bus.spawn(self._until_told(self._come_back, served), f"return of {served.endpoint.name}")

    async def _come_back(self, served: Served) -> None:
        """Tell pools that a connection was lost, once calls reach the actor again: who hears of it may call at once."""
        await (self._bus.flush() if served.lane is None else served.lane.seen())
        if served.lane is not None and not served.lane.connected:
            return  # it is reported when the lane is back
        if served.lost_at is not None:
            away = {DISCONNECTED_AT: served.lost_at, RECONNECTED_AT: frames.now()}
            served.note(**{note: json.dumps(moment) for note, moment in away.items()})
            served.lost_at = None
        await self._cluster.registry.register(served.endpoint)

    async def _register(self, served: Served) -> None:
        await self._cluster.registry.register(served.endpoint)

    async def _until_told(self, tell: Callable[[Served], Awaitable[None]], served: Served) -> None:
        try:
            await retried(lambda _left_s: tell(served), on=(BusError,), timeout_s=_REGISTER_TIMEOUT_S)
        except BusError:
            log.exception("%s could not be registered again", served.endpoint.name)

    def tell(self, served: Served) -> None:
        """Have the pools know how an actor is. From any thread."""

        def register() -> None:
            if served in self._open:
                supervisor = served.actor.supervisor
                restarting = "yes" if supervisor.replacing is not None else ""
                restarts, last_error = str(supervisor.restarts), supervisor.last_error
                served.note(**{RESTARTING: restarting, RESTARTS: restarts, LAST_ERROR: last_error})
                self._bus.spawn(self._until_told(self._register, served), f"news of {served.endpoint.name}")

        try:
            self._loop.call_soon_threadsafe(register)
        except RuntimeError:
            log.debug("the connection was closed, and %s is no longer looked for", served.endpoint.name)

    async def withdraw(self, served: Served) -> None:
        """Take an actor that was given up out of its pool; calls that wait for it end with the reason."""
        if served in self._open:
            self._open.remove(served)
            await self._close(served, LAST_CALLS_S)

    async def close(self, timeout_s: float) -> None:
        """Leave the pools, finish what has arrived, and be known no more."""
        self._bus.off(self._on_disconnect)
        self._bus.off(self._on_reconnect)
        actors, self._open = self._open, []
        await asyncio.gather(*(self._close(served, timeout_s) for served in actors))
        self._replies.cancel()
        self._questions.cancel()

    async def _close(self, served: Served, timeout_s: float) -> None:
        if served.renewals is not None:
            served.renewals.cancel()
        if served.actor.durable is not None:
            began_at = time.monotonic()
            await served.actor.durable.stop(timeout_s)
            timeout_s = max(timeout_s - (time.monotonic() - began_at), 0.0)
        try:
            # Known as leaving before it stops to listen: callers choose others, and still wait for what they sent.
            served.note(**{LEAVING: "yes"})
            await self._cluster.registry.register(served.endpoint)
            notices = await self._hear_notices(served)
            await asyncio.gather(*(each.drain() for each in (*served.subscriptions, served.lane) if each is not None))
            await served.actor.drain(timeout_s)
            await asyncio.gather(*(subscription.drain() for subscription in notices))
            await self.outbox.wait_empty()
            if served.lane is not None:
                await served.lane.wait_sent()
            await _results_taken()
            await self._cluster.registry.unregister(served.endpoint)
            await served.actor.supervisor.stop(HOOK_TIMEOUT_S)
        except BusError as error:
            log.warning("%s was ended without a word to its pool: %s", served.endpoint.name, error)
            await served.actor.drain(timeout_s)
            await served.actor.supervisor.stop(HOOK_TIMEOUT_S)
        finally:
            if served.lane is not None:
                self._lanes -= 1
                await served.lane.close()
            await self.release_seat(served)

    async def _hear_notices(self, served: Served) -> list[Interest]:
        """Calls that run to their end may still be cancelled, and streams go on only as they are read."""
        namespace, endpoint = self._cluster.namespace, served.endpoint
        return [
            await self._bus.subscribe(
                subjects.actor_one(namespace, endpoint.name, endpoint.endpoint_id, notice), served.actor.accept
            )
            for notice in frames.NOTICES
        ]


async def _results_taken() -> None:
    """Results that lie in this process's memory are lost when it ends: give their receivers the time to take them."""
    latest = time.monotonic() + _TAKEN_TIMEOUT_S
    while arenas.untaken() and time.monotonic() < latest:  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(_TAKEN_PAUSE_S)


def _announcement(served: Served, namespace: str) -> Announcement:
    """What plain NATS tools see of an actor."""
    endpoint, kind = served.endpoint, served.actor.kind
    return Announcement(
        endpoint.name,
        endpoint.endpoint_id,
        VERSION,
        description=f"actors of class {kind} in namespace {namespace}",
        endpoints=[
            ServedEndpoint(
                name=method.name,
                subject=subjects.actor_any(namespace, endpoint.name, method.name),
                queue=_POOL_QUEUE,
                metadata={"signature": method.signature, "doc": method.doc},
                describe=functools.partial(served.actor.describe, method.name),
            )
            for method in served.actor.methods.values()
        ]
        + [
            # No subject, as it cannot be asked for: it is listed for its counts.
            ServedEndpoint(name=timer.key, subject="", metadata={"every": f"{timer.every.seconds:g} s"})
            for timer in served.actor.timers
        ],
        counts=lambda: served.actor.counts,
        metadata={"namespace": namespace, "class": kind},
    )
