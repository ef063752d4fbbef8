"""A job fills its namespace's registry, rewrites it without end, and has it read: what that costs is bounded, and its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.cluster.client import AsyncCluster
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.direct import wire
from fluster_bus.messages import Capacity, EndpointList, EndpointQuery, Heartbeat, JobId, WorkerId
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.streams import endpoint_key
from fluster_bus.storage.tables import Deleted, Row
from fluster_services.controller.answers import service
from fluster_services.controller.sweeps.endpoint_index import EndpointIndex
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController, job_request
from tests.hostile.test_registry_records import endpoint
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

FLOOD = 20_000
PATIENCE_S = 60.0
DELETION = b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n"


async def _write_all(server: EmbeddedServer, commands: Iterable[bytes]) -> None:
    """As fast as the server takes it, with a job's credentials."""
    address = server.credentials(Role.JOB, NS)
    reader, writer = await asyncio.open_connection(*address.servers[0].removeprefix("nats://").split(":"))
    writer.write(wire.connect(user=address.user, **{"pass": address.password}, verbose=False, headers=True))
    for number, command in enumerate(commands):
        writer.write(command)
        if number % 100 == 0:
            await writer.drain()
    writer.write(wire.PING)
    assert b"-ERR" not in await asyncio.wait_for(reader.readuntil(b"PONG"), PATIENCE_S)
    writer.close()
    await writer.wait_closed()


def _key(key: str) -> bytes:
    return buckets.bucket_key(buckets.endpoints_bucket(NS), key).encode()


async def test_heartbeats_are_answered_while_a_registry_is_filled(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster, controller: RunningController
) -> None:
    """All of them say that they are of one job, which made each cost as much as there were before it."""
    job = str(await cluster.launch(job_request("held", cpu=1_000)))
    plain = {"name": "x", "address": subjects.actor_member(NS, "x", "e"), "namespace": NS, "job_id": job, "attempt": 9}
    records = [json.dumps({**plain, "endpoint_id": f"e{n}"}).encode() for n in range(FLOOD)]
    commands = [b"PUB %b %d\r\n%b\r\n" % (_key(f"x.{job}.0.9.e{n}"), len(each), each) for n, each in enumerate(records)]
    worker = await connect_bus(own_server, Role.SERVICE, name="worker")
    index = controller.controller.registry.index(NS)
    beat = Heartbeat(worker_id=WorkerId("w1"), free=Capacity()).to_json()
    flood = asyncio.create_task(_write_all(own_server, commands))
    beats = 0
    async with asyncio.timeout(PATIENCE_S):  # it took minutes
        while len(index) < FLOOD:
            await worker.request(subjects.heartbeats("w1"), beat, timeout_s=PATIENCE_S)
            beats += 1
    await flood
    assert beats > 4


async def test_what_is_removed_again_and_again_is_remembered_once(
    own_server: EmbeddedServer, controller: RunningController
) -> None:
    deletion = b"HPUB %b %d %d\r\n%b\r\n" % (_key("x.-.0.0.e"), len(DELETION), len(DELETION), DELETION)
    last = b"HPUB %b %d %d\r\n%b\r\n" % (_key("y.-.0.0.e"), len(DELETION), len(DELETION), DELETION)
    index = controller.controller.registry.index(NS)
    await _write_all(own_server, [deletion] * 2_000 + [last])
    await wait_until_async(lambda: "y.-.0.0.e" in index.marks)
    assert index.marks == ["x.-.0.0.e", "y.-.0.0.e"]


async def test_an_answer_holds_no_more_of_a_registry_than_is_bounded(
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    controller: RunningController,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_MAX_ENDPOINTS_BYTES", 20_000)
    bus = await connect_bus(own_server, Role.JOB, NS)
    registry = Registry(bus, NS)
    for number in range(100):
        await registry.register(endpoint(endpoint_id=f"e{number}", metadata={"text": "x" * 500}))
    one = await registry.register(endpoint(endpoint_id="one", name="other"))
    subject = subjects.endpoints_verb(NS, "list")
    with pytest.raises(ServiceError, match="ask for those of one name"):
        await bus.ask(subject, EndpointQuery(), EndpointList)
    assert await bus.ask(subject, EndpointQuery(name="other"), EndpointList) == EndpointList(endpoints=(one,))


async def test_endpoints_beyond_the_bound_are_removed(
    own_server: EmbeddedServer, connect_bus: ConnectBus, controller: RunningController
) -> None:
    index = controller.controller.registry.index(NS)
    index.most = 3
    registry = Registry(await connect_bus(own_server, Role.JOB, NS), NS)
    for number in range(5):
        await registry.register(endpoint(endpoint_id=f"e{number}"))
        await wait_until_async(lambda: len(index) == min(number + 1, 3))  # noqa: B023

    async def left() -> list[str]:
        return [each.endpoint_id for each in await registry.list()]

    async def are_as_many_as_may_be() -> bool:
        return await left() == ["e0", "e1", "e2"]

    await wait_until_async(are_as_many_as_may_be)
    await registry.unregister(endpoint(endpoint_id="e0"))
    await wait_until_async(lambda: len(index) == 2)
    await registry.register(endpoint(endpoint_id="e9"))
    await wait_until_async(lambda: len(index) == 3)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["learn", "delete", "over"]),
        st.sampled_from(["j1", "j2"]),
        st.integers(min_value=-1, max_value=3),
        st.integers(min_value=0, max_value=4) | st.just(2**70),
        st.sampled_from(["a", "b"]),
    ),
    max_size=15,
)


@given(STEPS)
def test_the_index_knows_what_a_plain_list_does(steps: list[tuple[str, str, int, int, str]]) -> None:
    index, known = EndpointIndex(), dict[str, tuple[str, int, int]]()
    stale: set[str] = set()
    for revision, (step, job, task, attempt, name) in enumerate(steps, start=1):
        each = endpoint(endpoint_id=name, job_id=job, task=task, attempt=attempt)
        key = endpoint_key(each)
        if step == "learn":
            index.learn(Row(key, each, revision), now=float(revision))
            known[key] = (job, task, attempt)
            stale.discard(key)
        elif step == "delete":
            index.on_deleted(Deleted(key, revision), now=float(revision))
            known.pop(key, None)
            stale.discard(key)
        else:
            found = index.of_task(JobId(job), task, upto=attempt if attempt < 9 else 4)
            upto = attempt if attempt < 9 else 4
            assert sorted(found) == sorted(k for k, (j, t, a) in known.items() if (j, t) == (job, task) and a <= upto)
            for each_key in found:
                index.mark_stale(each_key)
            stale.update(found)
        assert len(index) == len(known)
        assert set(index.stale) == stale
        assert set(index.tasks_of(JobId(job))) == {t for j, t, _ in known.values() if j == job}
