"""What `nats micro ls, info, stats` ask, asked by a plain client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from fluster_bus.connection.bus import Bus
from fluster_bus.connection.services_api import Announcement, EndpointCounts, ServedEndpoint
from fluster_bus.core import server_subjects
from fluster_bus.core.names import unique_name
from fluster_bus.core.roles import Role
from fluster_bus.server import EmbeddedServer
from tests.component.conftest import ConnectBus

pytestmark = pytest.mark.anyio


@pytest.fixture
async def plain(shared_server: EmbeddedServer) -> AsyncIterator[Client]:
    """nats-py and nothing else."""
    address = shared_server.credentials(Role.OPERATOR)
    client = Client()
    await client.connect(servers=address.servers, user=address.user, password=address.password)
    yield client
    await client.close()


async def _ask(plain: Client, subject: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((await plain.request(subject, timeout=60)).data)
    return answer


COUNTS = {"add": EndpointCounts(requests=4, errors=1, last_error="bad", processing_ns=1000)}


def _announcement(name: str, instance: str = "one") -> Announcement:
    return Announcement(
        name,
        instance,
        "1.2.3",
        description="Adds numbers",
        endpoints=[ServedEndpoint("add", "calc.add", "pool", {"a": "b"}), ServedEndpoint("idle", "calc.idle")],
        counts=lambda: COUNTS,
        metadata={"job": "train-1"},
    )


async def test_ping_info_and_stats(bus: Bus, plain: Client) -> None:
    name = unique_name("calc")
    await _announcement(name).serve(bus)
    await bus.flush()
    ping = await _ask(plain, f"$SRV.PING.{name}")
    assert ping == {
        "name": name,
        "id": "one",
        "version": "1.2.3",
        "metadata": {"job": "train-1", "wire": "1", "wire_oldest": "1"},
        "type": "io.nats.micro.v1.ping_response",
    }
    info = await _ask(plain, f"$SRV.INFO.{name}")
    assert (info["type"], info["description"]) == ("io.nats.micro.v1.info_response", "Adds numbers")
    assert info["endpoints"][0] == {"name": "add", "subject": "calc.add", "queue_group": "pool", "metadata": {"a": "b"}}
    stats = await _ask(plain, f"$SRV.STATS.{name}.one")
    assert stats["type"] == "io.nats.micro.v1.stats_response"
    assert "T" in stats["started"]
    used, idle = stats["endpoints"]
    assert (used["num_requests"], used["num_errors"], used["last_error"]) == (4, 1, "bad")
    assert (used["processing_time"], used["average_processing_time"]) == (1000, 250)
    assert (idle["num_requests"], idle["average_processing_time"]) == (0, 0)


async def test_all_instances_answer(bus: Bus, plain: Client) -> None:
    name = unique_name("calc")
    for instance in ("one", "two"):
        await _announcement(name, instance).serve(bus)
    await bus.flush()
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = plain.new_inbox()
    await plain.subscribe(inbox, cb=heard.put)
    for subject in (f"$SRV.PING.{name}", server_subjects.service_verb("PING")):
        await plain.publish(subject, reply=inbox)
        found: set[str] = set()
        while found != {"one", "two"}:
            answer = json.loads((await asyncio.wait_for(heard.get(), 5)).data)
            if answer["name"] == name:
                found.add(answer["id"])
    assert (await _ask(plain, f"$SRV.INFO.{name}.two"))["id"] == "two"


async def test_who_left_is_not_listed(bus: Bus, plain: Client) -> None:
    name = unique_name("calc")
    for subscription in await _announcement(name).serve(bus):
        await subscription.drain()
    with pytest.raises(Exception, match="no responders"):
        await plain.request(f"$SRV.PING.{name}", timeout=60)


async def test_an_answer_goes_to_an_inbox_only(
    bus: Bus, plain: Client, shared_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    name, target = unique_name("calc"), unique_name("target")
    await _announcement(name).serve(bus)
    await bus.flush()
    heard: list[Msg] = []

    async def hear(msg: Msg) -> None:
        heard.append(msg)

    await plain.subscribe(target, cb=hear)
    await plain.publish(f"$SRV.PING.{name}", reply=target)
    await plain.publish(f"$SRV.PING.{name}")
    await _ask(plain, f"$SRV.PING.{name}")
    await plain.flush()
    assert heard == []
