"""What a job writes into its namespace's registry misleads at most those who call what it serves."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluster.actors import ActorPool, ActorServer
from fluster.actors.protocol.members import DISCONNECTED_AT, RESTARTS, RETRIES, TIMEOUTS, Member
from fluster.cluster import Cluster
from fluster.cluster.client import AsyncCluster
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.core.roles import Role
from fluster_bus.direct import wire
from fluster_bus.messages import Endpoint
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.streams import endpoint_key
from tests.component.actor_env import Calculator
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController, StartWorker, job_request, published_events
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

PATIENCE_S = 60
ADDRESS = subjects.actor_member(NS, "ledger", "e1")
ODD = st.one_of(
    st.text(max_size=20), st.sampled_from(["[]", "{}", "null", "[1]", '{"a": "b"}', '{"a": NaN}', "[" * 5000])
)


def endpoint(**fields: object) -> Endpoint:
    plain = {"endpoint_id": "e1", "name": "ledger", "address": ADDRESS, "namespace": NS}
    return Endpoint.from_json(json.dumps({**plain, **fields}).encode())


async def test_a_key_that_is_written_for_other_jobs_and_taken_away_ends_nothing(
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    cluster: AsyncCluster,
    controller: RunningController,
    start_worker: StartWorker,
) -> None:
    await start_worker()
    job = await connect_bus(own_server, Role.JOB, NS)
    registry = Registry(job, NS)
    first, second = [await cluster.launch(job_request("held", cpu=1_000)) for _ in range(2)]
    key = endpoint_key(endpoint(job_id=str(first)))
    where = buckets.bucket_key(buckets.endpoints_bucket(NS), key)
    for written in (
        endpoint(job_id=str(first), attempt=9),
        endpoint(job_id=str(second), attempt=9),
        endpoint(job_id=str(first), attempt=9, endpoint_id="e*"),
        endpoint(job_id=str(first), namespace="other"),
    ):
        await job.request(where, written.to_json())
    for odd in (b"", b"{", b"null", b'{"name": 1}', b"\xff"):
        await job.request(where, odd)
    assert await registry.list() == []
    await registry.table.delete(key)
    for each in (first, second):
        await cluster.terminate(each)
    assert await cluster.launch(job_request("after"))


async def _write_raw(server: EmbeddedServer, records: Sequence[tuple[bytes, bytes]]) -> None:
    """Write to keys that no client library would, all by one connection."""
    address = server.credentials(Role.JOB, NS)
    reader, writer = await asyncio.open_connection(*address.servers[0].removeprefix("nats://").split(":"))
    writer.write(wire.connect(user=address.user, **{"pass": address.password}, verbose=False))
    bucket = buckets.bucket_key(buckets.endpoints_bucket(NS), "").encode()
    for key, data in records:
        writer.write(b"PUB %b %d\r\n%b\r\n" % (bucket + key, len(data), data))
    writer.write(wire.PING)
    assert b"-ERR" not in await asyncio.wait_for(reader.readuntil(b"PONG"), PATIENCE_S)
    writer.close()
    await writer.wait_closed()


def _use_the_pool(server: EmbeddedServer) -> str:
    """What `fluster actors` shows, after a new client has called the actor."""
    operator = server.credentials(Role.OPERATOR)
    with Cluster(operator) as cluster:
        pool: ActorPool[Any] = ActorPool(cluster, "ledger")
        pool.wait_for_size(1, timeout=PATIENCE_S)
        assert pool.call(timeout=PATIENCE_S).add(1, 2) == 3
    environment = {**os.environ, "FLUSTER_CLUSTER_ADDRESS": operator.to_url()}
    words = [str(Path(sys.executable).with_name("fluster")), "actors"]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


@pytest.mark.parametrize("letter", [b"a", b"\xff"])
async def test_what_lies_under_a_key_as_long_as_a_line_may_be_is_removed(
    own_server: EmbeddedServer, connect_bus: ConnectBus, controller: RunningController, letter: bytes
) -> None:
    """To take it away by its key takes a line that is longer: the server ended the connection, and so the controller."""
    bucket = buckets.bucket_key(buckets.endpoints_bucket(NS), "")
    longest = 4_090 - len(bucket)  # that a server takes from one who wants no answer
    lengths = (longest, longest - 30, longest - 60, longest - 90, longest - 200)
    await _write_raw(own_server, [(letter * length, b"{}") for length in lengths])
    table = Registry(await connect_bus(own_server), NS).table

    async def are_gone() -> bool:
        return (await table.room())[0] < longest

    await wait_until_async(are_gone)
    assert controller.bus.connected


async def test_what_is_no_record_is_removed_and_told_once(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster, controller: RunningController
) -> None:
    registry = Registry(await connect_bus(own_server, Role.JOB, NS), NS)
    table = Registry(await connect_bus(own_server), NS).table
    first, second = [await cluster.launch(job_request("held", cpu=1_000)) for _ in range(2)]
    with Cluster(own_server.credentials(Role.JOB, NS)) as job:
        actors = ActorServer(job)
        actors.register("ledger", Calculator())
        await asyncio.to_thread(actors.serve_background)
        taken = await registry.register(endpoint(job_id=str(first), attempt=9, endpoint_id="taken"))
        gone = await registry.register(endpoint(job_id=str(first), attempt=9, endpoint_id="gone"))
        await registry.unregister(gone)
        # Under their own keys, so they are records: of an endpoint that is another's, and of what no pool can read.
        twice = endpoint(job_id=str(second), attempt=9, endpoint_id="taken")
        odd = endpoint(job_id=str(first), attempt=9, endpoint_id="odd", metadata={RESTARTS: "[", TIMEOUTS: "{"})
        for each in (twice, odd):
            await registry.register(each)
        keys = [
            b"x",
            b"ledger",
            b"ledger.-.0.0.e",
            b"ledger.-.0.0.\xff",
            b"ledger.-.0.0.a\x0bb",
            b"\xe2\x80\xae.a.b.c.d",
        ]
        rewritten = endpoint(job_id=str(second), attempt=9, endpoint_id="taken").to_json()
        own_key = endpoint_key(taken).encode()
        await _write_raw(own_server, [(own_key, rewritten), *((key, odd.to_json()) for key in keys)])

        async def are_gone() -> bool:
            return [each async for each in table.unreadable()] == []

        async def told() -> list[int]:
            events = await published_events(controller.bus)
            return [each.transition.number for each in events if "registry record under" in each.transition.reason]

        async def all_are_told() -> bool:
            return len(await told()) >= 1 + len(keys)

        await wait_until_async(are_gone)
        await wait_until_async(all_are_told)
        assert len(set(await told())) == len(await told()) == 1 + len(keys)
        assert {each.key for each in await table.rows() if each.value.job_id} == {
            endpoint_key(twice),
            endpoint_key(odd),
        }
        shown = await asyncio.to_thread(_use_the_pool, own_server)
        assert "ledger" in shown
        # More than are known at once, and far more than have events.
        await _write_raw(own_server, [(b"many.%d" % number, b"{}") for number in range(250)])
        await wait_until_async(are_gone)
        assert len(await told()) <= 20
        await asyncio.to_thread(actors.shutdown, 1.0)
    assert await cluster.launch(job_request("after"))


@pytest.mark.parametrize(
    "address",
    [
        "$KV.fluster_jobs_default.train-1",
        "$JS.API.STREAM.DELETE.FLUSTER_SUBMIT",
        "fluster.sys.workers.w1.drain",
        "fluster.other.actors.ledger.one.e1",
        "fluster.default.jobs.submit",
        "fluster.default.actors.>",
        "fluster.default.actors.a b",
        "fluster.default.actors",
    ],
)
def test_a_call_goes_nowhere_but_to_actors_of_the_records_namespace(address: str) -> None:
    with pytest.raises(InvalidMessageError, match="invalid address"):
        Member.of(endpoint(address=address))


@given(st.dictionaries(st.sampled_from([TIMEOUTS, RETRIES, RESTARTS, DISCONNECTED_AT]), ODD))
@example({RESTARTS: "9" * 5000})
@example({TIMEOUTS: '{"add": 1e999}'})
@example({DISCONNECTED_AT: '["boot", "x", {}]'})
def test_any_metadata_makes_a_member_or_none(metadata: dict[str, str]) -> None:
    try:
        member = Member.of(endpoint(metadata=metadata))
    except InvalidMessageError:
        return
    assert all(each >= 0 for each in (*(member.timeouts or {}).values(), *(member.retries or {}).values()))
