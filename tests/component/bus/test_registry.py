"""The registry: who stands behind a name."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import InvalidNameError
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, Namespace, WorkerId
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.provisioning import ensure_namespace
from fluster_bus.storage.registry import LEASE_S, Registry
from fluster_bus.storage.streams import endpoint_key
from fluster_bus.storage.tables import Deleted, Row
from tests.component.conftest import ConnectBus

pytestmark = pytest.mark.anyio


@pytest.fixture
def registry(bus: Bus, namespace: Namespace) -> Registry:
    return Registry(bus, namespace)


async def test_registering_and_leaving(registry: Registry) -> None:
    first = await registry.register(registry.endpoint("calc", "here", metadata={"a": "1"}))
    second = await registry.register(registry.endpoint("calc", "there"))
    other = await registry.register(registry.endpoint("calc-2", "elsewhere"))
    assert await registry.lookup("calc") == [first, second]
    assert await registry.lookup("cal") == []
    assert await registry.list("calc") == [first, second, other]
    assert await registry.list("calc-") == [other]
    assert await registry.list("zzz") == []
    assert await registry.find(second.endpoint_id) == second
    assert await registry.find("unknown") is None
    await registry.unregister(first)
    assert await registry.lookup("calc") == [second]
    await registry.unregister(first)


async def test_renewing_keeps_one(registry: Registry) -> None:
    endpoint = registry.endpoint("calc", "here")
    await registry.register(endpoint)
    await registry.register(endpoint)
    assert await registry.lookup("calc") == [endpoint]


async def test_who_has_a_lease(registry: Registry, namespace: Namespace) -> None:
    outside = registry.endpoint("calc", "here")
    assert outside.lease_s == LEASE_S
    assert endpoint_key(outside) == f"calc.-.0.0.{outside.endpoint_id}"
    inside = registry.endpoint("calc", "here", job_id=JobId("train-1"), task=2, attempt=3, worker_id=WorkerId("w1"))
    assert inside.lease_s is None
    assert inside.namespace == namespace
    assert endpoint_key(inside) == f"calc.train-1.2.3.{inside.endpoint_id}"
    assert inside.endpoint_id != outside.endpoint_id


async def test_names_that_would_reach_further(registry: Registry) -> None:
    for name in ("a.b", "*", ">", ""):
        with pytest.raises(InvalidNameError):
            await registry.lookup(name)


async def test_a_watcher_sees_them_come_and_go(registry: Registry) -> None:
    async with aclosing(registry.table.watch()) as watch:
        await anext(watch)
        endpoint = await registry.register(registry.endpoint("calc", "here"))
        change = await anext(watch)
        assert isinstance(change, Row)
        assert change.value == endpoint
        await registry.unregister(endpoint)
        change = await anext(watch)
        assert isinstance(change, Deleted)
        assert change.key == endpoint_key(endpoint)


async def test_a_job_registers_with_its_own_credentials(
    shared_server: EmbeddedServer, connect_bus: ConnectBus, bus: Bus
) -> None:
    await ensure_namespace(bus, "default")
    job = await connect_bus(shared_server, Role.JOB, "default")
    registry = Registry(job, "default")
    endpoint = await registry.register(registry.endpoint("calc-of-a-job", "here", job_id=JobId("train-1")))
    assert await registry.lookup("calc-of-a-job") == [endpoint]
    await registry.unregister(endpoint)
    assert await registry.lookup("calc-of-a-job") == []
