"""Objects that are put once: how they arrive, how often they are fetched, and how long they are good."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from fluster.cluster import Cluster, Ref
from fluster.cluster import refs as refs_module
from fluster_bus.core.errors import InvalidMessageError, PayloadLostError
from fluster_bus.core.roles import Role
from tests.component.actor_env import TIMEOUT_S, Env, sharing_nothing
from tests.component.arena_peer import Block
from tests.insides import refs_put_by
from tests.waiting import wait_until

SIZES = [10, 1_000_000, 20_000_000]  # in the Ref; in a message; by the object store, where no memory is shared


class Taker:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def kinds(self, *args: Any, **kwargs: Any) -> list[str]:
        return [type(each).__name__ for each in (*args, *kwargs.values())]

    def size(self, block: Block) -> int:
        return len(block.data)

    def size_inside(self, refs: list[Ref[Block]]) -> int:
        return len(refs[0].get().data)

    def keep(self, refs: list[Ref[Block]]) -> None:
        self.kept += refs

    def size_of_kept(self) -> int:
        ref = self.kept[-1]
        assert isinstance(ref, Ref)
        return len(ref.get().data)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    env = Env(tmp_path_factory.mktemp("store"))
    yield env
    env.close()


@pytest.fixture(params=["here", "elsewhere"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether what was put before can be reached by messages only."""
    if request.param == "here":
        yield False
        return
    with sharing_nothing():
        yield True


@pytest.fixture
def client(env: Env, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = env.cluster(Role.CLIENT)
    monkeypatch.setattr("fluster.cluster.local._current", cluster)
    return cluster


@pytest.mark.parametrize("size", SIZES)
def test_an_object_comes_back(client: Cluster, size: int) -> None:
    ref = client.put(Block(b"x" * size))
    assert [len(each.data) for each in (ref.get(), client.get(ref), ref.get(client))] == [size] * 3
    assert ref.get() is not ref.get()
    assert client.put([1, "a"]).get() == [1, "a"]
    with pytest.raises(TypeError, match="cannot be pickled"):
        client.put(iter(x for x in "abc"))


@pytest.mark.parametrize("size", SIZES)
def test_a_ref_arrives_as_its_object_and_inside_of_others_as_itself(
    env: Env, client: Cluster, size: int, *, elsewhere: bool
) -> None:
    name = f"takers-{size}-{elsewhere}"
    ref = client.put(Block(b"x" * size))
    env.serve(name, Taker(), Taker(), cluster=env.cluster(Role.JOB))
    pool = env.pool(name, size=2)
    assert pool.call().kinds(ref, [ref], 1, key=ref) == ["Block", "list", "int", "Block"]
    assert [pool.call().size(ref) for _ in range(3)] == [size] * 3
    assert pool.broadcast().size(ref).results(TIMEOUT_S) == [size] * 2
    assert pool.call().size_inside([ref]) == size


def test_what_is_fetched_is_fetched_once(env: Env, client: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = refs_module.Refs.ask

    async def counted(self: Any, wire: Any) -> bytes:
        asked.append(wire.ref_id)
        return await ask(self, wire)

    monkeypatch.setattr(refs_module.Refs, "ask", counted)
    refs = [client.put(Block(b"x" * 1_000_000)) for _ in range(2)]
    with sharing_nothing():
        env.serve("fetchers", Taker(), Taker())
        pool = env.pool("fetchers", size=2)
        futures = [pool.submit().size(ref) for ref in refs * 10]
        assert [future.result(TIMEOUT_S) for future in futures] == [1_000_000] * 20
        assert len(asked) == 2
        monkeypatch.setattr(refs_module, "_KEPT_BYTES", 1_500_000)
        third = client.put(Block(b"x" * 1_000_000))
        assert pool.call().size(third) == 1_000_000
        assert pool.call().size(third) == 1_000_000
        assert len(asked) == 3
        assert pool.call().size(refs[0]) == 1_000_000
        assert len(asked) == 4, "others took its room"


def test_a_ref_is_good_while_it_or_a_call_with_it_lives(env: Env, client: Cluster, *, elsewhere: bool) -> None:
    name = f"short-{elsewhere}"
    env.serve(name, Taker())
    pool = env.pool(name)
    put = refs_put_by(client)
    futures = [pool.submit().size(client.put(Block(b"x" * 1_000_000))) for _ in range(5)]
    gc.collect()
    assert [future.result(TIMEOUT_S) for future in futures] == [1_000_000] * 5
    del futures
    wait_until(lambda: not put, describe=lambda: put)


def test_what_is_pickled_otherwise_keeps_no_ref_alive(client: Cluster) -> None:
    ref = client.put(1)
    pickle.dumps(ref)
    del ref
    wait_until(lambda: not refs_put_by(client))


def test_what_is_freed_is_told(env: Env, client: Cluster) -> None:
    env.serve("keepers", Taker())
    pool = env.pool("keepers")
    ref = client.put(Block(b"x" * 1_000_000))
    pool.call().keep([ref])
    with sharing_nothing():
        env.serve("far", Taker())
        far = env.pool("far")
        far.call().keep([ref])
        ref.free()
        ref.free()
        with pytest.raises(PayloadLostError, match="was freed by who put it"):
            far.call().size_of_kept()
    assert pool.call().size_of_kept() == 1_000_000, "it has it already"
    with pytest.raises(PayloadLostError, match="was freed: put the object again"):
        ref.get()
    with pytest.raises(TypeError, match="was freed"):
        pool.call().size(ref)


def test_what_its_process_took_along_is_told(env: Env, client: Cluster) -> None:
    other = env.cluster(Role.CLIENT)
    with sharing_nothing():
        env.serve("late", Taker())
        pool = env.pool("late")
        pool.call().keep([other.put(Block(b"x" * 1_000_000))])
        other.close()
        with pytest.raises(PayloadLostError, match="the process that put it ended"):
            pool.call().size_of_kept()


def test_only_who_put_it_frees_it(env: Env, client: Cluster) -> None:
    kept = Taker()
    env.serve("others", kept)
    ref = client.put(1)
    env.pool("others").call().keep([ref])
    with pytest.raises(RuntimeError, match="free it there"):
        kept.kept[0].free()
    assert kept.kept[0].get() == 1


def test_a_ref_that_names_no_inbox_is_not_asked_for(client: Cluster) -> None:
    forged: Ref[Any] = refs_module._arrived("a", "fluster.default.jobs", b"")  # noqa: SLF001 - as an unpickled ref is made, here of forged parts
    with pytest.raises(InvalidMessageError, match="which is not an inbox"):
        client.get(forged)
