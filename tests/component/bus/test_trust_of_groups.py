"""Several nats-servers that trust one authority: what is set at one holds at all of them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import CredentialsError
from fluster_bus.core.names import unique_name
from fluster_bus.core.roles import Role
from fluster_bus.trust.authority import Authority, publish_accounts, trust_configuration
from tests.component.nats_servers import configured
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


class Group:
    """Servers that are started one after the other, each with the same words about whom it trusts."""

    def __init__(self, authority: Authority, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._trust = trust_configuration(authority, Path("ACCOUNTS"))
        self._routes: list[str] = []

    def start(self) -> str:
        """One more; its URL."""
        folder = self._folder / f"server-{len(self._routes)}"
        folder.mkdir()
        routes = ", ".join(f'"{route}"' for route in self._routes)
        cluster = f'cluster {{ name: "group", listen: "127.0.0.1:-1", routes: [{routes}] }}\n'
        trust = self._trust.replace("ACCOUNTS", str(folder / "accounts"))
        port = self._stack.enter_context(configured(folder, f'server_name: "{folder.name}"\n{cluster}{trust}'))
        (ports,) = folder.glob("*.ports")
        self._routes += json.loads(ports.read_text())["cluster"]
        return f"nats://127.0.0.1:{port}"


async def _know_each_other(authority: Authority, first: str, second: str) -> None:
    """Return once what is said at one is heard at the other."""
    made = authority.issue(Role.OPERATOR, unique_name("operator"))
    speaker, hearer = [
        await Bus.connect(BusAddress(url, token=made.token, seed=made.seed), name=url) for url in (first, second)
    ]
    heard = asyncio.Event()
    await hearer.subscribe("test", lambda _: heard.set())
    await hearer.flush()

    async def is_heard() -> bool:
        await speaker.publish("test")
        await speaker.flush()
        return heard.is_set()

    await wait_until_async(is_heard)
    for bus in (speaker, hearer):
        await bus.close()


async def test_who_is_revoked_at_one_server_is_cut_off_at_the_others(tmp_path: Path) -> None:
    authority = Authority.of_cluster(tmp_path / "authority")
    with ExitStack() as stack:
        group = Group(authority, tmp_path, stack)
        servers = [group.start() for _ in range(3)]
        for one, other in combinations(servers, 2):
            await _know_each_other(authority, one, other)
        made = authority.issue(Role.CLIENT, "alice", ["default"])
        addresses = [BusAddress(url, token=made.token, seed=made.seed) for url in servers]
        alice = [await Bus.connect(address, name="alice") for address in addresses]
        cut_off = [asyncio.Event() for _ in alice]
        for bus, event in zip(alice, cut_off, strict=True):
            bus.on_end(event.set)
        authority.revoke("alice")
        await publish_accounts(authority, servers[0])
        async with asyncio.timeout(5):  # the bound that operators are promised
            for event in cut_off:
                await event.wait()
        for bus in alice:
            await bus.close()
        for address in addresses:
            with pytest.raises(CredentialsError):
                await Bus.connect(address, name="alice")


async def test_a_server_that_was_away_learns_it_from_the_others(tmp_path: Path) -> None:
    authority = Authority.of_cluster(tmp_path / "authority")
    with ExitStack() as stack:
        group = Group(authority, tmp_path, stack)
        told, first = time.time(), group.start()
        made = authority.issue(Role.CLIENT, "alice", ["default"])
        await wait_until_async(lambda: int(time.time()) > told)  # of two words servers believe the later, by seconds
        authority.revoke("alice")
        await publish_accounts(authority, first)
        second = group.start()
        await _know_each_other(authority, first, second)

        async def is_refused() -> bool:
            try:
                bus = await Bus.connect(BusAddress(second, token=made.token, seed=made.seed), name="alice")
            except CredentialsError:
                return True
            await bus.close()
            return False

        await wait_until_async(is_refused)
