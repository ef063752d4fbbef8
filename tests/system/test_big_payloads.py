"""Big arguments and results between real processes, and what is left of them when one is killed."""

from __future__ import annotations

import array
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from fluster import ActorPool, Entrypoint, JobRequest, LocalCluster, Ref, WorkerPool, actor, deploy
from fluster_bus.core.names import unique_name
from fluster_bus.payloads import arenas
from tests.waiting import wait_until

PATIENCE_S = 60.0


@pytest.fixture
def name() -> str:
    return unique_name("actor")


class Kept:
    """As arrays do it: its memory travels beside the pickle."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, _protocol: Any) -> tuple[type[Kept], tuple[Any]]:
        return Kept, (pickle.PickleBuffer(self.data),)


@actor
class Keeper:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def echo(self, value: Any) -> Any:
        return value

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return os.getpid()

    def look(self) -> list[bytes]:
        return [bytes(each.data[:5]) for each in self.kept]

    def forget(self) -> None:
        self.kept.clear()

    def lend(self, size: int) -> Kept:
        return Kept(b"mine!" * (size // 5))

    def lend_many(self, count: int, size: int) -> Iterator[Kept]:
        for _ in range(count):
            yield Kept(b"mine!" * (size // 5))

    def pid(self) -> int:
        return os.getpid()


def lent_bytes() -> int:
    """How much this process lends, after a look at what is over."""
    gc.collect()  # other tests of this process may have left something
    own = arenas.here().own()
    own.tidy(time.monotonic())
    return sum(span.size for span in own.lent())


@pytest.fixture
def keepers(cluster: LocalCluster, name: str) -> Iterator[ActorPool[Any]]:
    pool: ActorPool[Any] = deploy(cluster, Keeper, name=name, replicas=2)
    yield pool
    pool.shutdown()


def test_large_values_of_any_kind_come_back(keepers: ActorPool[Any]) -> None:
    numbers = array.array("d", range(100_000))
    for value in (b"x" * (1 << 20), bytearray(b"y" * (1 << 20)), "ä" * (1 << 20), numbers, [b"z" * 100_000] * 3):
        assert keepers.call().echo(value) == value
    big = Kept(memoryview(bytearray(64 << 20)))
    assert keepers.call().echo(big).data.nbytes == 64 << 20
    answers = keepers.broadcast().echo({"numbers": Kept(numbers)}).results(PATIENCE_S)
    assert [memoryview(answer["numbers"].data).cast("d")[99_999] for answer in answers] == [99_999.0] * 2
    assert answers[0]["numbers"].data.readonly
    del answers
    wait_until(lambda: lent_bytes() == 0, describe=lent_bytes)


def test_what_an_actor_keeps_is_lent_until_it_lets_go_or_dies(keepers: ActorPool[Any]) -> None:
    keepers.broadcast().keep(Kept(b"hello" * 100_000)).results(PATIENCE_S)
    assert keepers.broadcast().look().results(PATIENCE_S) == [[b"hello"]] * 2
    wait_until(lambda: 500_000 <= lent_bytes() < 501_000, describe=lent_bytes)
    one, two = keepers.broadcast().pid().results(PATIENCE_S)
    victim = psutil.Process(one)
    victim.kill()
    wait_until(lambda: keepers.size == 1)
    assert lent_bytes() >= 500_000, "the other one has it"
    assert keepers.call().pid() == two
    keepers.call().forget()
    wait_until(lambda: lent_bytes() == 0, describe=lent_bytes)


def test_a_result_outlives_the_actor_that_made_it(keepers: ActorPool[Any]) -> None:
    result = keepers.call().lend(1_000_000)
    pids = keepers.broadcast().pid().results(PATIENCE_S)
    unread = [keepers.submit().lend(1_000_000) for _ in range(4)]
    for future in unread:
        future.exception(PATIENCE_S)
    for pid in pids:
        psutil.Process(pid).kill()
    wait_until(lambda: keepers.size == 0)
    assert bytes(result.data[-5:]) == b"mine!"
    assert all(bytes(future.result().data[:5]) == b"mine!" for future in unread)


def test_large_items_of_a_stream_are_shared_too(keepers: ActorPool[Any]) -> None:
    kept = list(keepers.call().lend_many(20, 1_000_000))
    assert [(len(each.data), bytes(each.data[-5:])) for each in kept] == [(1_000_000, b"mine!")] * 20
    assert all(each.data.readonly for each in kept)
    assert sum(len(each.data) for each in keepers.call().lend_many(3, 5_000_000)) == 15_000_000


def test_results_are_taken_before_an_actor_ends(cluster: LocalCluster, name: str) -> None:
    pool: ActorPool[Any] = deploy(cluster, Keeper, name=name)
    futures = [pool.submit().lend(1_000_000) for _ in range(8)]
    pool.shutdown()
    assert [len(future.result(PATIENCE_S).data) for future in futures] == [1_000_000] * 8


def test_callers_that_are_killed_leave_nothing_behind(cluster: LocalCluster, keepers: ActorPool[Any]) -> None:
    script = textwrap.dedent(f"""
        import sys
        from fluster import ActorPool, Cluster
        from tests.system.test_big_payloads import Kept
        pool = ActorPool(Cluster(sys.argv[1]), {keepers.name!r})
        pool.wait_for_size(2)
        pool.broadcast().keep(Kept(b"their" * 1_000_000)).results()
        futures = [pool.submit().lend(1_000_000) for _ in range(4)]
        kept = [future.result() for future in futures]
        print("ready", flush=True)
        for _ in range(1_000):
            pool.submit().echo(Kept(b"their" * 100_000))
        sys.stdin.read()
    """)
    caller = subprocess.Popen(
        [sys.executable, "-c", script, cluster.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == b"ready\n"
    caller.kill()
    caller.communicate()
    assert keepers.broadcast().look().results(PATIENCE_S) == [[b"their"]] * 2, "it is theirs to keep"
    keepers.broadcast().forget().results(PATIENCE_S)
    assert keepers.call().echo(b"x" * 1_000_000) == b"x" * 1_000_000


# ---- put once -------------------------------------------------------------------------------------------


class Model:
    def __init__(self, weights: Kept, *, label: Kept) -> None:
        self.sizes = [len(weights.data), len(label.data)]

    def sizes_with(self, more: Kept) -> list[int]:
        return [*self.sizes, len(more.data)]


def sizes_of(first: Kept, *, second: Kept, refs: list[Ref[Kept]]) -> list[int]:
    return [len(first.data), len(second.data), *(len(ref.get().data) for ref in refs)]


def size_of(kept: Kept) -> int:
    return len(kept.data)


@pytest.mark.parametrize("size", [10, 20_000_000])
@pytest.mark.parametrize("shared", [True, False])
def test_what_was_put_arrives_at_actors_jobs_and_workers(
    cluster: LocalCluster, name: str, monkeypatch: pytest.MonkeyPatch, *, size: int, shared: bool
) -> None:
    if not shared:
        monkeypatch.setenv(arenas.SIZE_VARIABLE, "0")
        monkeypatch.setattr(arenas, "_here", arenas.ProcessMemory())
    ref = cluster.put(Kept(b"x" * size))
    entrypoint = Entrypoint(callable=sizes_of, args=(ref,), kwargs={"second": ref, "refs": [ref]})
    job = cluster.launch(JobRequest(name=name, entrypoint=entrypoint))
    pool: ActorPool[Any] = deploy(cluster, Model, ref, label=ref, name=name)
    assert pool.call().sizes_with(ref) == [size] * 3
    pool.shutdown()
    assert cluster.result(job, timeout=PATIENCE_S) == [size] * 3
    with WorkerPool(cluster, 2) as workers:
        futures = workers.map(size_of, [ref] * 4)
        assert [future.result(PATIENCE_S) for future in futures] == [size] * 4
