"""Whoever uses a connection can be cancelled at any moment: the word is never lost, and nothing waits on."""

from __future__ import annotations

import asyncio

import pytest

from fluster_bus import subjects
from fluster_bus.bus import Bus
from fluster_bus.messages import Namespace
from fluster_bus.roles import Role
from fluster_bus.server import EmbeddedServer

pytestmark = pytest.mark.anyio


async def test_in_the_very_moment_of_the_answer(bus: Bus, namespace: Namespace) -> None:
    asking = asyncio.create_task(bus.jetstream.stream_info(subjects.events_stream(namespace)))
    await asyncio.sleep(0)  # it is asked, and the answer cannot be there
    (answer,) = bus._nats._resp_map.values()
    answer.set_result(None)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()


async def test_at_any_turn_of_connecting(shared_server: EmbeddedServer) -> None:
    address = shared_server.credentials(Role.OPERATOR)
    turns, is_connected = 0, False
    while not is_connected:
        connecting = asyncio.create_task(Bus.connect(address, name="cancelled"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if is_connected := connecting.done():
            await connecting.result().close()
        else:
            connecting.cancel()
            await asyncio.wait({connecting})
            assert connecting.cancelled(), f"after {turns} turns of the loop"
        turns += 1
