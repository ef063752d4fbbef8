"""What a job writes as the record of an actor of its namespace concerns that actor alone: others serve, and nothing waits on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluster.actors import ActorPool, ActorServer, actor
from fluster.actors.server.durable import CallLog
from fluster.cluster import Cluster
from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.core.roles import Role
from fluster_bus.messages import ActorSeat, HandledCalls
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.leadership import Leadership
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS
from tests.hostile.test_messages import VALUES
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
NOT_READABLE = [b"", b"{", b"null", b"\xff", b"[]", b'{"instance": 3}', b"[" * 500]


@actor(durable=True)
class Ledger:
    def add(self, number: int) -> int:
        return number + 1


@actor(singleton=True)
class Only:
    def add(self, number: int) -> int:
        return number + 1


async def write(bus: Bus, key: str, data: bytes) -> None:
    await bus.request(buckets.bucket_key(buckets.actors_bucket(NS), key), data)


async def serve(cluster: Cluster, name: str, instance: object) -> ActorServer:
    server = ActorServer(cluster)
    server.register(name, instance)
    await asyncio.wait_for(asyncio.to_thread(server.serve_background), PATIENCE_S)
    return server


def added(cluster: Cluster, name: str, kind: type) -> Any:
    pool: ActorPool[Any] = ActorPool(cluster, name, actor_class=kind)
    return pool.call(timeout=PATIENCE_S).add(1)


@pytest.mark.parametrize(
    "written", [*NOT_READABLE, b'{"instance": "x", "lease_s": -1e308}', b'{"instance": "", "holder": "\\u0000"}']
)
async def test_a_seat_that_is_none_is_taken(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster, written: bytes
) -> None:
    job = await connect_bus(own_server, Role.JOB, NS)
    await write(job, buckets.seat_key("odd"), written)
    with Cluster(own_server.credentials(Role.JOB, NS)) as serving:
        server = await serve(serving, "odd", Only())
        assert await asyncio.to_thread(added, serving, "odd", Only) == 2
        await asyncio.to_thread(server.shutdown)


async def test_one_whose_seat_is_overwritten_ends_and_the_others_serve(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster
) -> None:
    job = await connect_bus(own_server, Role.JOB, NS)
    with Cluster(own_server.credentials(Role.JOB, NS)) as serving:
        server = await serve(serving, "odd", Only())
        other = await serve(serving, "even", Only())
        pool: ActorPool[Any] = ActorPool(serving, "odd")
        await write(job, buckets.seat_key("odd"), b"{")
        await asyncio.to_thread(wait_until, lambda: pool.size == 0)
        assert await asyncio.to_thread(added, serving, "even", Only) == 2
        await asyncio.to_thread(other.shutdown)
        await asyncio.to_thread(server.shutdown)


@pytest.mark.parametrize("written", NOT_READABLE)
async def test_one_that_cannot_know_what_was_handled_is_refused_and_the_others_serve(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster, written: bytes
) -> None:
    """To run all of its calls again would be worse."""
    job = await connect_bus(own_server, Role.JOB, NS)
    await write(job, buckets.handled_key("odd"), written)
    with Cluster(own_server.credentials(Role.JOB, NS)) as serving:
        with pytest.raises(InvalidMessageError):
            await serve(serving, "odd", Ledger())
        server = await serve(serving, "even", Ledger())
        assert await asyncio.to_thread(added, serving, "even", Ledger) == 2
        await asyncio.to_thread(server.shutdown)


@pytest.mark.parametrize("subject", [subjects.heartbeats("w1"), "a b", "", "*", "_INBOX.a\r\nPUB x 0\r\n"])
async def test_an_answer_that_was_kept_goes_to_an_inbox_or_nowhere(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster, subject: str
) -> None:
    """An actor may be served with more rights than those have who may write what is kept of it."""
    job, service = await connect_bus(own_server, Role.JOB, NS), await connect_bus(own_server, Role.SERVICE)
    heard: list[Delivery] = []
    await service.subscribe(subjects.heartbeats("w1"), heard.append)
    await service.flush()
    kept = {"subject": subject, "ok": True, "payload": ""}
    await write(job, buckets.handled_key("odd"), json.dumps({"instance": "x", "answer": kept}).encode())
    with Cluster(own_server.credentials(Role.OPERATOR), namespace=NS) as serving:
        server = await serve(serving, "odd", Ledger())
        assert await asyncio.to_thread(added, serving, "odd", Ledger) == 2
        await asyncio.to_thread(server.shutdown)
    await service.flush()
    assert heard == []


@given(st.dictionaries(st.sampled_from(sorted(ActorSeat.model_fields)), VALUES, max_size=5))
@example({"instance": "x", "lease_s": -1})
@example({"instance": "x", "lease_s": 1e308})
def test_any_seat_is_somebodys_for_a_time_or_none(fields: dict[str, object]) -> None:
    try:
        seat = ActorSeat.from_json(json.dumps(fields).encode())
    except InvalidMessageError:
        return
    view = Leadership(instance="me", lease_s=10.0)
    view.on_seat(1, instance=seat.instance, holder=seat.holder, lease_s=seat.lease_s, now=0.0)
    assert view.pause_s(0.0) >= 0


@given(st.dictionaries(st.sampled_from(sorted(HandledCalls.model_fields)), VALUES, max_size=3))
@example({"instance": "x", "sequence": -(1 << 80)})
@example({"instance": "x", "sequence": 1 << 80})
def test_any_count_of_handled_calls_says_which_are_new(fields: dict[str, object]) -> None:
    try:
        handled = HandledCalls.from_json(json.dumps({"instance": "x", **fields}).encode())
    except InvalidMessageError:
        return
    assert CallLog(handled.sequence).is_new(5, "call", 1) == (handled.sequence < 5)
