"""Endpoints that go with who registered them."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import pytest

from fluster.actors import ActorServer
from fluster.cluster import Cluster
from fluster.cluster.client import AsyncCluster
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.messages import (
    Done,
    Endpoint,
    EndpointId,
    EndpointList,
    EndpointQuery,
    JobId,
    Namespace,
    UnregisterRequest,
)
from fluster_bus.running.coroutines import TimeSlices
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.streams import endpoint_key
from fluster_services.config import LOCAL_TIMING
from fluster_services.controller.sweeps import registry_sweep
from tests.component.actor_env import Calculator
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, F, S, StartController, StartWorker, job_request
from tests.component.toy_worker import STAY_RUNNING
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


async def _registered(registry: Registry, address: str, *, there: bool) -> bool:
    return any(endpoint.address == address for endpoint in await registry.list()) == there


async def test_endpoints_of_an_attempt_go_with_it(
    cluster: AsyncCluster, start_worker: StartWorker, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    worker = await start_worker(plan=STAY_RUNNING)
    job_id = await cluster.launch(job_request(max_retries_failure=1))
    await wait_until_async(lambda: len(worker.held) == 1)
    registry = Registry(await connect_bus(own_server, Role.JOB, NS), NS)
    for address in ("one", "two"):
        await registry.register(registry.endpoint("calc", address, job_id=job_id, task=0, attempt=1))
    early = await registry.register(registry.endpoint("calc", "early", job_id=job_id, task=0, attempt=2))
    assert len(await cluster.lookup_endpoints("calc")) == 3
    await worker.end(buckets.attempt_key(NS, job_id, 0, 1), F)
    for address in ("one", "two"):
        await wait_until_async(lambda: _registered(registry, address, there=False))  # noqa: B023
    await wait_until_async(lambda: worker.now_held() == [buckets.attempt_key(NS, job_id, 0, 2)])
    assert await cluster.lookup_endpoints("calc") == [early]
    await worker.end(buckets.attempt_key(NS, job_id, 0, 2))
    await wait_until_async(lambda: _registered(registry, "early", there=False))


async def test_a_cluster_tells_programs_how_long_a_lease_is(
    own_server: EmbeddedServer, start_controller: StartController
) -> None:
    await start_controller(dataclasses.replace(LOCAL_TIMING, endpoint_lease_s=1))
    cluster = await asyncio.to_thread(Cluster, own_server.credentials(Role.OPERATOR).to_url(), NS)
    table, seen = cluster.asynchronous.registry.table, set()
    try:
        server = await asyncio.to_thread(ActorServer, cluster)
        await asyncio.to_thread(server.register, "calc", Calculator())
        await asyncio.to_thread(server.serve_background)
        left = await asyncio.to_thread(cluster.register_endpoint, "left", "nobody renews it")
        assert left.lease_s == 1

        async def is_renewed() -> bool:
            (row,) = await asyncio.to_thread(cluster.portal.run, table.rows, buckets.endpoints_named("calc"))
            seen.add(row.revision)
            return len(seen) >= 6  # some two leases

        await wait_until_async(is_renewed)
        await wait_until_async(lambda: asyncio.to_thread(lambda: not cluster.lookup_endpoints("left")))
    finally:
        await asyncio.to_thread(cluster.close)


async def test_a_lease_that_is_not_renewed_ends(
    own_server: EmbeddedServer,
    start_controller: StartController,
    connect_bus: ConnectBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_sweep, "_TICK_S", 0.02)
    await start_controller()
    registry = Registry(await connect_bus(own_server, Role.JOB, NS), NS)
    made = [registry.endpoint("calc", address) for address in ("renewed", "left")]
    renewed, left = (endpoint.model_copy(update={"lease_s": 0.3}) for endpoint in made)
    for endpoint in (renewed, left):
        await registry.register(endpoint)

    async def gone() -> bool:
        await registry.register(renewed)
        return await registry.lookup("calc") == [renewed]

    await wait_until_async(gone)
    await wait_until_async(lambda: _registered(registry, "renewed", there=False))


@pytest.mark.parametrize("is_looking", [False, True])
async def test_a_controller_that_was_stopped_does_not_judge_leases(
    own_server: EmbeddedServer,
    start_controller: StartController,
    connect_bus: ConnectBus,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_looking: bool,
) -> None:
    """It heard no renewals, since it heard nothing at all, whether it waited meanwhile or was just looking at them."""
    stop, stopped = threading.Event(), threading.Event()

    class Slices(TimeSlices):
        async def step(self) -> bool:
            if stop.is_set() and not stopped.is_set():
                time.sleep(2.5)  # noqa: ASYNC251 - as a stopped process does, for longer than the lease
                stopped.set()
            return await super().step()

    monkeypatch.setattr(registry_sweep, "TimeSlices", Slices)
    monkeypatch.setattr(registry_sweep, "_TICK_S", 0.02)
    monkeypatch.setattr(registry_sweep, "_LATE_S", 0.1)
    controller = await start_controller()
    registry = Registry(await connect_bus(own_server, Role.JOB, NS), NS)
    endpoint = registry.endpoint("calc", "here").model_copy(update={"lease_s": 2.0})
    await registry.register(endpoint)
    index = controller.controller.registry.index(NS)
    await wait_until_async(lambda: len(index) == 1)
    key = endpoint_key(endpoint)
    counted_from = index.written_at(key)
    if is_looking:
        stop.set()
        await wait_until_async(stopped.is_set)
    else:
        time.sleep(2.5)  # noqa: ASYNC251 - likewise
    await wait_until_async(lambda: index.written_at(key) > counted_from)
    assert not index.stale
    assert await registry.lookup("calc") == [endpoint]
    await wait_until_async(lambda: _registered(registry, "here", there=False))


async def test_the_registry_by_request(cluster: AsyncCluster) -> None:
    """For clients without the right to write it."""
    endpoint = Registry(cluster.bus, NS).endpoint("calc", "here")

    def verb(name: str) -> str:
        return subjects.endpoints_verb(NS, name)

    assert await cluster.bus.ask(verb("register"), endpoint, Endpoint) == endpoint
    for query in (EndpointQuery(name="calc"), EndpointQuery(prefix="ca"), EndpointQuery()):
        found = await cluster.bus.ask(verb("lookup"), query, EndpointList)
        assert found.endpoints == (endpoint,)
    elsewhere = endpoint.model_copy(update={"namespace": Namespace("other")})
    with pytest.raises(ServiceError, match="'other'"):
        await cluster.bus.ask(verb("register"), elsewhere, Endpoint)
    await cluster.bus.ask(verb("unregister"), UnregisterRequest(endpoint_id=endpoint.endpoint_id), Done)
    assert (await cluster.bus.ask(verb("list"), EndpointQuery(), EndpointList)).endpoints == ()


async def test_garbage_in_the_registry_stops_nobody(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    """Jobs may write to it."""
    job = await connect_bus(own_server, Role.JOB, NS)
    bucket = buckets.endpoints_bucket(NS)
    foreign = Endpoint.model_construct(
        endpoint_id=EndpointId("*"), name="calc", address="x", namespace=NS, job_id=JobId("a.>"), task=-1
    )
    for key, data in (("calc.-.0.0.e1", b"nonsense"), ("odd", b"{}"), ("calc.-.0.0.e2", foreign.to_json())):
        await job.request(buckets.bucket_key(bucket, key), data)
    registry = Registry(job, NS)
    good = await registry.register(registry.endpoint("calc", "here"))
    stale = await registry.register(registry.endpoint("calc", "there", job_id=JobId("nobody")))
    await wait_until_async(lambda: _registered(registry, "there", there=False))
    assert stale not in await cluster.lookup_endpoints("calc")
    assert good in await cluster.lookup_endpoints("calc")
    await start_worker()
    assert (await cluster.wait(await cluster.launch(job_request()), timeout=60)).status is S
