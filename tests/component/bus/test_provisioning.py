"""How the streams of namespaces are made, and get their room in the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.js.api import DiscardPolicy, StreamConfig

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import StorageError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import MIN_BUDGET_BYTES, SHARES, SYSTEM_BYTES, NamespaceBounds, shares, stream_of
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.provisioning import delete_namespace, ensure_namespaces, ensure_system
from tests.component.nats_servers import configured

pytestmark = pytest.mark.anyio

MIB, GIB = 1 << 20, 1 << 30
DAY, WEEK = 86_400, 7 * 86_400


@asynccontextmanager
async def _served(folder: Path, store_bytes: int) -> AsyncIterator[Bus]:
    with EmbeddedServer(folder, store_limit_bytes=store_bytes) as server:
        bus = await Bus.connect(server.credentials(Role.OPERATOR), name="test")
        try:
            await ensure_system(bus)
            yield bus
        finally:
            await bus.close()


async def _config(bus: Bus, share: str, namespace: str) -> StreamConfig:
    return (await bus.jetstream.stream_info(stream_of(share, namespace))).config


async def _sizes(bus: Bus, namespace: str) -> dict[str, int | None]:
    return {share: (await _config(bus, share, namespace)).max_bytes for share in SHARES}


async def test_a_store_is_divided_and_divided_anew_when_namespaces_come(tmp_path: Path) -> None:
    async with _served(tmp_path, 9 * GIB) as bus:
        await ensure_namespaces(bus, ["a"])
        assert await _sizes(bus, "a") == shares(8 * GIB)
        # Which fit only if the first gives back what it does not use.
        await ensure_namespaces(bus, ["a", "b", "c", "d"])
        assert [await _sizes(bus, each) for each in "abcd"] == [shares(2 * GIB)] * 4
        await ensure_namespaces(bus, ["a", "b"])
        # The others are still there, so there is less than was planned: but more than before.
        assert [await _sizes(bus, each) for each in "ab"] == [shares(2 * GIB)] * 2


async def test_what_is_full_refuses_or_drops_its_oldest(tmp_path: Path) -> None:
    async with _served(tmp_path, 9 * GIB) as bus:
        await ensure_namespaces(bus, ["a"])
        refusing = {share for share in SHARES if (await _config(bus, share, "a")).discard == DiscardPolicy.NEW}
    assert refusing == {share for share, each in SHARES.items() if each.refuses}
    assert refusing == {"jobs", "registry", "actors", "calls", "secrets", "requests"}


async def test_sizes_and_times_of_single_streams_go_before_their_shares(tmp_path: Path) -> None:
    given = NamespaceBounds(
        logs_bytes=2 * GIB,
        results_bytes=GIB // 2,
        calls_bytes=GIB // 4,
        history_kept_s=DAY,
        results_kept_s=2 * DAY,
        calls_kept_s=3 * DAY,
    )
    async with _served(tmp_path, 13 * GIB) as bus:
        await ensure_namespaces(bus, ["a"])
        await ensure_namespaces(bus, ["a"], given)
        assert await _sizes(bus, "a") == shares(12 * GIB, given.given)
        await ensure_namespaces(bus, ["a"])
        assert await _sizes(bus, "a") == shares(12 * GIB)
        ages = [(await _config(bus, share, "a")).max_age for share in ("logs", "events", "results", "calls")]
        assert ages == [DAY, DAY, 2 * DAY, 3 * DAY]  # those stay as they are where none is given


async def test_a_stream_is_not_made_smaller_than_what_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with _served(tmp_path, 13 * GIB) as bus:
        await ensure_namespaces(bus, ["a"])
        for number in range(20):
            await bus.request(subjects.events("a", f"job-{number}"), bytes(1 << 20))
        with caplog.at_level(logging.WARNING):
            await ensure_namespaces(bus, ["a"], NamespaceBounds(budget_bytes=MIN_BUDGET_BYTES))
        info = await bus.jetstream.stream_info(buckets.events_stream("a"))
        assert (info.state.messages, info.config.max_bytes) == (20, info.state.bytes)
        assert "FLUSTER_EVENTS_a holds" in caplog.text
        # One that has a setting of its own is as that says.
        await ensure_namespaces(bus, ["a"], NamespaceBounds(events_bytes=64 << 20))
        assert (await _config(bus, "events", "a")).max_bytes == 64 << 20


async def test_streams_of_a_version_that_did_not_bound_them_get_their_bounds(tmp_path: Path) -> None:
    async with _served(tmp_path, 9 * GIB) as bus:
        await ensure_namespaces(bus, ["a"])
        for share in SHARES:
            config = await _config(bus, share, "a")
            discard = DiscardPolicy.OLD if share == "secrets" else config.discard
            await bus.jetstream.update_stream(config.evolve(max_bytes=-1, discard=discard))
        await ensure_namespaces(bus, ["a"])
        assert await _sizes(bus, "a") == shares(8 * GIB)
        assert (await _config(bus, "secrets", "a")).discard == DiscardPolicy.NEW


async def test_what_others_have_set_aside_makes_the_budgets_smaller(tmp_path: Path) -> None:
    async with _served(tmp_path, 9 * GIB) as bus:
        await bus.jetstream.add_stream(name="OTHERS", subjects=["others"], max_bytes=3 * GIB)
        await ensure_namespaces(bus, ["a"])
        assert await _sizes(bus, "a") == shares(4 * GIB)


async def test_namespaces_for_which_the_store_has_no_room_are_refused_at_once_with_the_remedy(tmp_path: Path) -> None:
    async with _served(tmp_path, SYSTEM_BYTES + MIN_BUDGET_BYTES) as bus:
        await ensure_namespaces(bus, ["fits"])
        for namespaces, bounds in (
            (["fits", "does-not"], None),
            (["fits"], NamespaceBounds(budget_bytes=2 * GIB)),
        ):
            with pytest.raises(
                StorageError, match=r"give jetstream\.max_file_store more, FLUSTER_NAMESPACE_BUDGET less"
            ):
                async with asyncio.timeout(5):
                    await ensure_namespaces(bus, namespaces, bounds)


async def test_where_the_server_does_not_tell_its_size_budgets_are_halved_until_they_fit(tmp_path: Path) -> None:
    (tmp_path / "bus").mkdir()
    configuration = f'jetstream {{ store_dir: "{tmp_path}/bus", max_file_store: {9 * GIB} }}'
    with configured(tmp_path, configuration) as port:
        bus = await Bus.connect(BusAddress(f"nats://127.0.0.1:{port}"), name="test")
        try:
            await ensure_system(bus)
            await ensure_namespaces(bus, ["a", "b"])
            assert [await _sizes(bus, each) for each in "ab"] == [shares(3 * GIB)] * 2
        finally:
            await bus.close()


async def test_a_store_that_was_made_smaller_still_starts_with_the_streams_that_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with _served(tmp_path, 9 * GIB) as bus:
        await ensure_namespaces(bus, ["a"])
    async with _served(tmp_path, 4 * GIB) as bus:
        with caplog.at_level(logging.WARNING):
            assert await ensure_namespaces(bus, ["a"]) == shares(8 * GIB)
        assert "the streams of a keep the bounds that they have" in caplog.text


async def test_two_who_make_the_same_streams_with_other_bounds_at_once_both_have_them(tmp_path: Path) -> None:
    async with _served(tmp_path, 9 * GIB) as bus:
        small, large = (NamespaceBounds(budget_bytes=size) for size in (2 * GIB, 4 * GIB))
        for number in range(3):
            namespace = f"n{number}"
            await asyncio.gather(
                *(ensure_namespaces(bus, [namespace], each, beside=4) for each in (small, large, small))
            )
            sizes = await _sizes(bus, namespace)
            assert all(sizes[share] in {shares(2 * GIB)[share], shares(4 * GIB)[share]} for share in SHARES)
            await delete_namespace(bus, namespace)
