"""Calls in their stream."""

from __future__ import annotations

import pytest

from fluster_bus.core import subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import Done, TrimCalls
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.stored_messages import calls_feed, store_call
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController

pytestmark = pytest.mark.anyio


async def test_the_controller_drops_those_of_an_actor_that_asks(
    own_server: EmbeddedServer, controller: RunningController, connect_bus: ConnectBus
) -> None:
    assert controller
    job = await connect_bus(own_server, Role.JOB, NS)
    for name in ("ledger", "other"):
        for number in range(4):
            assert await store_call(job, NS, name, b"", call_id=f"{name}-{number}", reply="")
    await job.ask(subjects.trim_calls(NS), TrimCalls(name="ledger", before=4), Done)
    left = {
        name: [entry.sequence async for entry in calls_feed(job, NS, name).stored()] for name in ("ledger", "other")
    }
    assert left == {"ledger": [4], "other": [5, 6, 7, 8]}


async def test_one_that_is_stored_twice_is_there_once(
    own_server: EmbeddedServer, controller: RunningController, connect_bus: ConnectBus
) -> None:
    assert controller
    client = await connect_bus(own_server, Role.CLIENT, NS)
    stored = [await store_call(client, NS, "ledger", b"", call_id="the-same", reply="") for _ in range(2)]
    assert stored == [True, False]
