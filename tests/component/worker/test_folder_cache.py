"""Folders that are made once, on a real disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from fluster_services.config import DiskLimits
from fluster_services.worker.environments.folder_cache import FolderCache

pytestmark = pytest.mark.anyio

PATIENCE_S = 60
SIZE = 64 << 10


async def _fill(path: Path) -> None:
    (path / "content").write_bytes(os.urandom(SIZE))


class Making:
    """A `make` that waits for an event, and counts."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.paths: list[Path] = []
        self.error: Exception | None = None
        self.cancelled = asyncio.Event()

    async def __call__(self, path: Path) -> None:
        self.paths.append(path)
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        (path / "content").touch()
        if self.error is not None:
            raise self.error


Reopen = Callable[[int], Awaitable[FolderCache]]


@pytest.fixture
async def reopen(tmp_path: Path) -> AsyncIterator[Reopen]:
    """The cache as a worker finds it that has just started, with this many bytes for it."""
    opened: list[FolderCache] = []

    async def make(max_bytes: int = 10 * SIZE) -> FolderCache:
        for cache in opened:
            await cache.close()
        opened.append(FolderCache(tmp_path / "cache", max_bytes, DiskLimits()))
        opened[-1].open()
        return opened[-1]

    yield make
    for cache in opened:
        await cache.close()


@pytest.fixture
async def cache(reopen: Reopen) -> FolderCache:
    return await reopen(10 * SIZE)


def _there(cache: FolderCache) -> set[str]:
    return {path.name.rpartition("-")[0] for path in cache._root.iterdir() if not path.name.endswith(".gone")}  # noqa: SLF001 - the folder that the cache was given


async def test_all_who_come_meanwhile_share_one_making(cache: FolderCache) -> None:
    make = Making()
    uses = [asyncio.create_task(cache.use("a", f"user{number}", make)) for number in range(5)]
    await asyncio.wait_for(make.begun.wait(), PATIENCE_S)
    make.may_end.set()
    paths = await asyncio.gather(*uses, cache.use("a", "late", make))
    assert len(make.paths) == 1
    assert set(paths) == set(make.paths)
    assert await cache.use("a", "later", make) == paths[0]
    assert len(make.paths) == 1


async def test_a_failure_is_told_to_all_and_tried_anew(cache: FolderCache) -> None:
    make = Making()
    make.error = OSError("no room")
    make.may_end.set()
    outcomes = await asyncio.gather(*(cache.use("a", f"u{n}", make) for n in range(3)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["no room"] * 3
    assert len(make.paths) == 1
    assert _there(cache) == set()
    make.error = None
    assert (await cache.use("a", "u", make) / "content").exists()
    assert len(make.paths) == 2


async def test_who_leaves_does_not_take_it_from_the_others(cache: FolderCache) -> None:
    make = Making()
    first, second = (asyncio.create_task(cache.use("a", name, make)) for name in ("first", "second"))
    await asyncio.wait_for(make.begun.wait(), PATIENCE_S)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    make.may_end.set()
    assert await second == make.paths[0]
    assert not make.cancelled.is_set()


async def test_when_all_leave_it_is_given_up_and_made_anew_for_who_comes_then(cache: FolderCache) -> None:
    make, other = Making(), Making()
    uses = [asyncio.create_task(cache.use("a", name, make)) for name in ("first", "second")]
    await asyncio.wait_for(make.begun.wait(), PATIENCE_S)
    for use in uses:
        use.cancel()
    await asyncio.gather(*uses, return_exceptions=True)
    other.may_end.set()
    path = await cache.use("a", "third", other)
    await asyncio.wait_for(make.cancelled.wait(), PATIENCE_S)
    assert path != make.paths[0]
    assert path.exists()
    assert not make.paths[0].exists()


async def test_the_least_recently_used_goes_first_and_none_in_use(reopen: Reopen) -> None:
    cache = await reopen(3 * SIZE + SIZE // 2)
    for name in ("a", "b", "c"):
        await cache.use(name, f"user of {name}", _fill)
    for name in ("b", "a", "c"):
        cache.release(f"user of {name}")
    assert _there(cache) == {"a", "b", "c"}
    await cache.use("d", "user of d", _fill)
    assert _there(cache) == {"a", "c", "d"}, "b was used before the others"
    await cache.use("a", "again", _fill)
    await cache.use("e", "user of e", _fill)
    assert _there(cache) == {"a", "d", "e"}
    await cache.use("f", "user of f", _fill)
    assert _there(cache) == {"a", "d", "e", "f"}, "all are in use"
    cache.release("again")
    assert _there(cache) == {"d", "e", "f"}


async def test_what_is_larger_than_all_room_goes_when_it_is_released(reopen: Reopen) -> None:
    cache = await reopen(SIZE // 2)
    path = await cache.use("a", "user", _fill)
    assert path.exists()
    cache.release("user")
    assert _there(cache) == set()


async def test_a_restart_finds_what_was_made_and_in_which_order(reopen: Reopen, tmp_path: Path) -> None:
    cache = await reopen(10 * SIZE)
    paths = {name: await cache.use(name, "user", _fill) for name in ("a", "b", "c")}
    for age, name in enumerate(("b", "c", "a")):
        os.utime(paths[name] / "made", (1_000_000 - age, 1_000_000 - age))
    (tmp_path / "cache/unfinished-0000").mkdir()
    (tmp_path / "cache/old-0000.gone").mkdir()
    (tmp_path / "cache/torn-0000").mkdir()
    (tmp_path / "cache/torn-0000/made").write_text("")
    cache = await reopen(4 * SIZE)
    assert _there(cache) == {"a", "b", "c"}
    assert len(list((tmp_path / "cache").iterdir())) == 3
    cache.hold(paths["c"] / "content", "adopted")
    make = Making()
    assert await cache.use("b", "user", make) == paths["b"]
    assert make.paths == []
    cache.release("user")
    await cache.use("d", "user", _fill)
    await cache.use("e", "user", _fill)
    assert _there(cache) == {"c", "d", "e"}, "a went, then b; c is held"


async def test_closing_ends_what_is_being_made(reopen: Reopen, tmp_path: Path) -> None:
    cache, make = await reopen(SIZE), Making()
    use = asyncio.create_task(cache.use("a", "user", make))
    await asyncio.wait_for(make.begun.wait(), PATIENCE_S)
    await cache.close()
    with pytest.raises(asyncio.CancelledError):
        await use
    assert make.cancelled.is_set()
    assert list((tmp_path / "cache").iterdir()) == []
