"""Big arguments and results between real processes, and what is left of them when one is killed."""

from __future__ import annotations

import array
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

from fluster import ActorPool, LocalCluster, actor, deploy
from fluster_bus import arenas
from fluster_bus.names import unique_name
from tests.waiting import wait_until

PATIENCE_S = 30.0


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

    def pid(self) -> int:
        return os.getpid()


def lent_bytes() -> int:
    """How much this process lends, after a look at what is over."""
    own = arenas._here._own()
    own.tidy(time.monotonic())
    return sum(span.size for span in own._lent.values())


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
