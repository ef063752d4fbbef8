"""Three real servers that are known by certificates, to users and to each other, all of it made by `fluster credentials`."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core.delivery import Delivery
from fluster_bus.direct.line import Dialler, Line
from fluster_bus.server_sections import Member
from tests.encrypted_group import EncryptedGroup, encrypted_group
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


@pytest.fixture
def group(tmp_path: Path) -> Iterator[EncryptedGroup]:
    with encrypted_group(tmp_path) as group:
        yield group


@pytest.fixture
async def operator(group: EncryptedGroup) -> AsyncIterator[Bus]:
    bus = await Bus.connect(BusAddress.parse(str(group.credentials("operator", "me"))), name="operator")
    yield bus
    await bus.close()


def _is_dialled(address: BusAddress) -> bool:
    """Whether a thread gets a connection of its own."""
    return any(isinstance(made, Line) for made in Dialler(address, "test").attempts())


def _note(heard: set[int], number: int, _message: Delivery) -> None:
    heard.add(number)


async def _are_together(group: EncryptedGroup, file: Path, members: list[Member]) -> None:
    """Return once what is said at one of these servers is heard at the others."""
    buses = [await Bus.connect(group.address(file, each), name="test") for each in members]
    heard: set[int] = set()
    for number, bus in enumerate(buses[1:]):
        await bus.subscribe("fluster.default.watch.jobs.test", functools.partial(_note, heard, number))
        await bus.flush()

    async def is_heard() -> bool:
        await buses[0].publish("fluster.default.watch.jobs.test")
        await buses[0].flush()
        return len(heard) == len(buses) - 1

    await wait_until_async(is_heard)
    for bus in buses:
        await bus.close()


async def test_servers_take_in_those_of_the_same_authority_and_keep_copies_at_each_other(
    group: EncryptedGroup, operator: Bus, tmp_path: Path
) -> None:
    first, second, _ = group.members
    await _are_together(group, tmp_path / "me.creds", group.members)
    alice = BusAddress.parse(str(group.credentials("client", "alice", "--namespace", "default")))
    assert len(alice.servers) == 3
    bus = await Bus.connect(alice, name="alice")
    assert _is_dialled(alice)
    await bus.close()

    async def is_stored() -> bool:
        try:
            await operator.jetstream.add_stream(name="test", subjects=["test"], num_replicas=3)
        except Exception:  # its leader is being elected
            return False
        return True

    await wait_until_async(is_stored, 30)
    stranger = trustme.CA().issue_cert("127.0.0.1")
    stranger.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "stranger.pem"))
    assert group.shown_at_routes(first, group.machine(second) / "server.pem")
    for own in (tmp_path / "stranger.pem", None):
        with pytest.raises(OSError):
            group.shown_at_routes(first, own)


async def test_a_certificate_is_renewed_and_read_while_the_server_runs_and_no_connection_ends(
    group: EncryptedGroup, operator: Bus, tmp_path: Path
) -> None:
    first, second, third = group.members
    file = group.credentials("client", "alice", "--namespace", "default")
    address = group.address(file, first)
    alice = await Bus.connect(address, name="alice")
    again = asyncio.Event()
    alice.on_reconnect(again.set)
    await _are_together(group, tmp_path / "me.creds", group.members)
    before = group.shown_at_routes(first, group.machine(second) / "server.pem")
    group.run("certificates", "--renew", "--server", first.name)
    group.copy(first)
    group.reload(first)
    after = group.shown_at_routes(first, group.machine(second) / "server.pem")
    pem = (group.machine(first) / "server.pem").read_text()
    assert after == ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERT") :])
    assert after != before
    # Who was connected still is, and who comes now is shown the new one.
    await alice.flush()
    assert not again.is_set()
    newcomer = await Bus.connect(address, name="newcomer")
    await newcomer.close()
    await _are_together(group, tmp_path / "me.creds", group.members)
    # And servers that start later are taken in with it.
    group.kill(third)
    group.start(third)
    await _are_together(group, tmp_path / "me.creds", [third, first, second])
    await alice.close()
