"""How many servers of a group keep the streams, and how they share what they can store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fluster_bus import subjects
from fluster_bus.address import BusAddress
from fluster_bus.bus import Bus
from fluster_bus.errors import BusError
from fluster_bus.provisioning import ensure_namespaces, ensure_system
from fluster_bus.replication import Replication, SingleServerError, TooFewServersError
from fluster_bus.retries import retried
from fluster_bus.roles import Role
from fluster_bus.stream_bounds import shares, stream_of
from tests.server_group import ServerGroup, group_of_servers
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

GIB = 1 << 30


@asynccontextmanager
async def _connected(group: ServerGroup, number: int = 0) -> AsyncIterator[Bus]:
    bus = await _reached(group.address(number, Role.OPERATOR))
    try:
        yield bus
    finally:
        await bus.close()


async def _reached(address: BusAddress) -> Bus:
    return await retried(lambda _left_s: Bus.connect(address, name="test"), on=(BusError,), timeout_s=20)


async def _copies(bus: Bus) -> set[int | None]:
    return {info.config.num_replicas for info in await bus.jetstream.streams_info()}


async def _formed(bus: Bus) -> None:
    """Return once a group of three has found together, and has the system's streams."""

    async def is_led() -> bool:
        try:
            await bus.request(subjects.stream_info("none"), timeout_s=0.3)
        except BusError:
            return False
        return True

    await wait_until_async(is_led)
    await ensure_system(bus, Replication(3), patience_s=30)


async def test_a_group_of_three_has_three_copies_and_is_changed_on_demand(tmp_path: Path) -> None:
    with group_of_servers(tmp_path) as group:
        async with _connected(group) as bus:
            await _formed(bus)
            await ensure_namespaces(bus, ["a"])
            assert await _copies(bus) == {3}
            for number in (1, 3):
                assert await ensure_system(bus, Replication(number)) == number
                await ensure_namespaces(bus, ["a"], replication=Replication(number))
                assert await _copies(bus) == {number}


async def test_copies_are_not_given_up_while_a_server_is_away(tmp_path: Path) -> None:
    with group_of_servers(tmp_path) as group:
        async with _connected(group) as bus:
            await _formed(bus)
            await ensure_namespaces(bus, ["a"])
            group.kill(2)
            await bus.jetstream.delete_stream(subjects.SUBMIT_STREAM)
            # That server counts: what is made now has three as well.
            assert await ensure_system(bus) == 3
            await ensure_namespaces(bus, ["a"])
            assert await _copies(bus) == {3}


@pytest.mark.parametrize("servers", [1, 2])
async def test_three_copies_are_refused_where_the_servers_are_fewer(tmp_path: Path, servers: int) -> None:
    with group_of_servers(tmp_path, servers) as group:
        async with _connected(group) as bus:
            assert await retried(lambda _left_s: ensure_system(bus), on=(BusError,), timeout_s=20) == 1
            await ensure_namespaces(bus, ["a"])
            assert await _copies(bus) == {1}
            with pytest.raises(
                TooFewServersError, match="set FLUSTER_REPLICAS to 1, or give the cluster a group of 3"
            ) as error:
                await ensure_system(bus, Replication(3))
            assert isinstance(error.value, SingleServerError) == (servers == 1)
            with pytest.raises(TooFewServersError):
                await ensure_namespaces(bus, ["a"], replication=Replication(3))
            assert await _copies(bus) == {1}


async def test_an_account_s_limit_counts_all_copies(tmp_path: Path) -> None:
    with group_of_servers(tmp_path, store_bytes=3 * 3 * GIB) as group:
        async with _connected(group) as bus:
            await _formed(bus)
            assert await ensure_namespaces(bus, ["a"]) == shares(2 * GIB)
            assert await ensure_namespaces(bus, ["a", "b"]) == shares(GIB)


async def test_a_server_s_limit_counts_its_own_copies(tmp_path: Path) -> None:
    with group_of_servers(tmp_path, server_bytes=9 * GIB) as group:
        async with _connected(group) as bus:
            await _formed(bus)
            await ensure_namespaces(bus, ["a", "b"])
            for namespace in ("a", "b"):
                info = await bus.jetstream.stream_info(stream_of("logs", namespace))
                assert info.config.max_bytes == shares(3 * GIB)["logs"]
