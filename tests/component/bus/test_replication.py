"""How many servers of a group keep the streams, and how they share what they can store."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, server_subjects
from fluster_bus.core.errors import BusError, StorageTimeoutError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import shares, stream_of
from fluster_bus.messages import Capacity, WorkerId, WorkerInfo
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.provisioning import ensure_namespaces, ensure_system
from fluster_bus.storage.replication import Replication, SingleServerError, TooFewServersError
from fluster_bus.storage.streams import leaders_table, workers_table
from fluster_bus.storage.tables import Deleted, Row
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
            await bus.request(server_subjects.stream_info("none"), timeout_s=0.3)
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
            await bus.jetstream.delete_stream(buckets.SUBMIT_STREAM)
            group.kill(2)
            # That server counts: what is made now has three as well, once another one leads.
            assert await retried(lambda _left_s: ensure_system(bus), on=(StorageTimeoutError,), timeout_s=60) == 3
            await retried(lambda _left_s: ensure_namespaces(bus, ["a"]), on=(StorageTimeoutError,), timeout_s=60)
            assert await _copies(bus) == {3}


async def test_copies_are_not_given_up_as_a_server_comes_back(tmp_path: Path) -> None:
    """For a moment the others know that it is there, and not yet that it keeps streams."""
    with group_of_servers(tmp_path) as group:
        async with _connected(group) as first:
            await _formed(first)
            follower = await _follower(first)
        async with _connected(group, (follower + 1) % 3) as bus:
            for namespace in ("a", "b"):
                group.servers[follower].terminate()
                group.servers[follower].wait()
                group.start(follower)
                await ensure_namespaces(bus, [namespace])
                assert await _copies(bus) == {3}


async def test_what_is_made_is_there_for_this_connection_and_for_one_that_finds_it(tmp_path: Path) -> None:
    """A server learns that a stream is made before it learns where it is reached, now and then."""
    stream = buckets.bucket_stream(buckets.CONTROLLERS_BUCKET)
    with group_of_servers(tmp_path) as group:
        async with _connected(group) as maker, _connected(group, 1) as finder:
            await _formed(maker)
            for _ in range(60):
                await maker.jetstream.delete_stream(stream)
                for bus in (maker, finder):
                    await ensure_system(bus, Replication(1))
                    await bus.request(server_subjects.direct_get(stream), b'{"last_by_subj": "none"}')
                    await leaders_table(bus).get("none")


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


async def test_a_watch_has_all_that_was_acknowledged_whichever_copy_is_read(tmp_path: Path) -> None:
    with group_of_servers(tmp_path) as group:
        async with _connected(group) as first:
            await _formed(first)
            follower = await _follower(first)
        async with _connected(group, (follower + 1) % 3) as bus:
            table = workers_table(bus)
            # Servers look each 2 s whether a copy is whole, and have it answer then.
            began = time.monotonic()
            await wait_until_async(lambda: time.monotonic() > began + 2.5)
            group.servers[follower].send_signal(signal.SIGSTOP)
            for number in range(300):
                await table.put(f"w{number}", _worker(f"w{number}"))
            group.servers[follower].send_signal(signal.SIGCONT)  # for a while it answers with what it had
            for _ in range(20):
                async with aclosing(table.watch(sure=True)) as changes:
                    keys = [change.key async for change in _until_caught_up(changes)]
                assert "w299" in keys


def _worker(name: str) -> WorkerInfo:
    return WorkerInfo(
        worker_id=WorkerId(name),
        host="x" * 50_000,
        pid=1,
        total=Capacity(cpu=1, memory=1),
        version="1",
        python="3",
        started_at=0,
    )


async def _follower(bus: Bus) -> int:
    """The number of a server with a copy that leads neither the streams of workers nor the group."""
    info = await bus.jetstream.stream_info(buckets.bucket_stream(buckets.WORKERS_BUCKET))
    assert info.cluster is not None
    return next(number for number in range(3) if f"s{number}" != info.cluster.leader)


async def _until_caught_up(
    changes: AsyncIterator[Row[WorkerInfo] | Deleted | CaughtUp],
) -> AsyncIterator[Row[WorkerInfo]]:
    async for change in changes:
        if isinstance(change, CaughtUp):
            return
        if isinstance(change, Row):
            yield change
