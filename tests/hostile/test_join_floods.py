"""Join tokens that are good for nothing are used again and again, over many connections: the others are answered all the same."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fluster_bus.access.address import BusAddress
from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusyError, ConnectError, CredentialsError, ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.messages import ListReply, ListRequest
from fluster_bus.messages.workers import JOIN_REFUSED, JoinRequest
from fluster_bus.server import EmbeddedServer
from fluster_bus.trust.authority import Authority
from fluster_bus.trust.join_register import JoinRegister
from fluster_bus.trust.join_tokens import JoinedFolder, join
from fluster_services.controller.controller import Controller
from tests.component.controller.test_joining import authority, controller, has_keys, register, server  # noqa: F401 - fixtures
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
TOKENS, REQUESTS = 8, 150


def issued(issuer: Authority, port: int, role: Role, name: str, *namespaces: str) -> BusAddress:
    made = issuer.issue(role, name, namespaces, lifetime_s=600)
    return BusAddress(f"nats://127.0.0.1:{port}", token=made.token, seed=made.seed)


async def test_a_flood_of_requests_to_join_keeps_no_other_waiting(
    controller: Controller,  # noqa: F811
    register: JoinRegister,  # noqa: F811
    server: EmbeddedServer,  # noqa: F811
    authority: Authority,  # noqa: F811
    tmp_path: Path,
) -> None:
    good = await register.create(["default"], uses=1, lifetime_s=600)
    key, other_key = (Key.generate(KeyKind.USER).public for _ in range(2))
    request = JoinRequest(worker_id="w1", key=key, job_keys={"default": other_key}).to_json()
    refused = 0

    async def ask(bus: Bus, token_id: str) -> None:
        nonlocal refused
        with pytest.raises((ServiceError, BusyError)) as refusal:
            await bus.request(subjects.join(token_id), request, timeout_s=PATIENCE_S)
        assert isinstance(refusal.value, BusyError) or refusal.value.code == JOIN_REFUSED
        refused += 1

    async with AsyncExitStack() as connections:

        async def connect(role: Role, name: str, *namespaces: str) -> Bus:
            bus = await Bus.connect(issued(authority, server.port, role, name, *namespaces), name=name)
            connections.push_async_callback(bus.close)
            return bus

        client = await connect(Role.CLIENT, "client", "default")
        names = [f"join-none{number}" for number in range(TOKENS)]
        flood = [(await connect(Role.JOIN, name), name) for name in names]
        async with asyncio.TaskGroup() as asking:
            for bus, name in flood:
                for _ in range(REQUESTS):
                    asking.create_task(ask(bus, name))
            await wait_until_async(lambda: refused > 0)
            await client.ask(subjects.jobs_verb("default", "list"), ListRequest(), ListReply, timeout_s=PATIENCE_S)
            await join(good, "w1", JoinedFolder(tmp_path / "w1"))
            answered_before = refused
        assert answered_before < refused == TOKENS * REQUESTS, "they were answered between those of the flood"
    (listed,) = await register.tokens()
    assert list(listed.used_by.values()) == ["w1"]


async def test_who_has_another_clusters_token_does_not_come_in(
    controller: Controller,  # noqa: F811
    server: EmbeddedServer,  # noqa: F811
    tmp_path: Path,
) -> None:
    elsewhere = Authority.of_cluster(tmp_path / "elsewhere")
    address = issued(elsewhere, server.port, Role.JOIN, "join-none")
    tries = await asyncio.gather(
        *(Bus.connect(address, name="attacker", timeout_s=PATIENCE_S) for _ in range(TOKENS)), return_exceptions=True
    )
    assert {type(each) for each in tries} <= {CredentialsError, ConnectError}
    assert controller.bus.connected
