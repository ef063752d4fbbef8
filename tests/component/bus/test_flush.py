"""What a flush promises, also when it is interrupted."""

from __future__ import annotations

import asyncio

import pytest

from fluster_bus.core.delivery import Delivery
from fluster_bus.core.roles import Role
from fluster_bus.server import EmbeddedServer
from tests.component.conftest import ConnectBus

pytestmark = pytest.mark.anyio


async def test_a_flush_that_is_cancelled_leaves_the_connection_whole(
    shared_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(shared_server)
    for _ in range(50):
        flushing = asyncio.create_task(bus.flush())
        await asyncio.sleep(0)  # it has been sent, and its answer is on its way
        flushing.cancel()
        await asyncio.gather(flushing, return_exceptions=True)
        await bus.flush()


async def test_after_a_flush_others_reach_the_subscription(
    shared_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    hearing, telling = await connect_bus(shared_server), await connect_bus(shared_server)
    for number in range(100):
        heard: asyncio.Queue[Delivery] = asyncio.Queue()
        await hearing.subscribe(f"flushed.{number}", heard.put_nowait)
        await hearing.flush()
        await telling.publish(f"flushed.{number}", b"word")
        async with asyncio.timeout(5):
            assert (await heard.get()).data == b"word"


@pytest.mark.parametrize("role", [Role.JOB, Role.CLIENT])
async def test_users_of_a_namespace_may_flush_too(
    shared_server: EmbeddedServer, connect_bus: ConnectBus, role: Role
) -> None:
    bus = await connect_bus(shared_server, role, "default")
    await bus.flush()
