"""Streams and cancelled calls between real processes: the death of either end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluster import ActorContext, ActorDiedError, ActorPool, LocalCluster, actor, deploy, method
from fluster_bus.core.names import unique_name
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60.0


@actor
class Source:
    def __init__(self) -> None:
        self.ends: list[str] = []

    def pid(self) -> int:
        return os.getpid()

    @method(stream_window=4)
    def numbers(self, who: str) -> Iterator[int]:
        try:
            number = 0
            while True:
                yield number
                number += 1
        finally:
            self.ends.append(who)

    def wait_cancelled(self, ctx: ActorContext, entered: str) -> None:
        Path(entered).touch()
        if ctx.wait_cancelled(PATIENCE_S):
            self.ends.append("cancelled")

    def ended(self) -> list[str]:
        return self.ends


@pytest.fixture
def sources(cluster: LocalCluster) -> Iterator[ActorPool[Source]]:
    pool = deploy(cluster, Source, name=unique_name("source"))
    yield pool
    pool.shutdown()


def test_a_killed_actor_ends_its_streams_at_once(sources: ActorPool[Source]) -> None:
    pid = sources.call().pid()
    numbers = sources.call().numbers("killed")
    assert next(numbers) == 0
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        list(numbers)


READER = """
    import sys
    from fluster import ActorPool, Cluster

    with Cluster() as cluster:
        pool = ActorPool(cluster, sys.argv[1])
        pool.wait_for_size(1)
        for number in pool.call().numbers("reader"):
            print(number, flush=True)
            if number == 10:
                sys.stdin.read()
"""


def test_the_generator_of_a_reader_that_was_killed_is_ended(
    cluster: LocalCluster, sources: ActorPool[Source], tmp_path: Path, family: Family
) -> None:
    script = tmp_path / "reader.py"
    script.write_text(textwrap.dedent(READER))
    reader = subprocess.Popen(
        [sys.executable, str(script), sources.name],
        env=family.environment(FLUSTER_CLUSTER_ADDRESS=cluster.address),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert reader.stdout is not None
        assert [int(reader.stdout.readline()) for _ in range(11)] == list(range(11))
        staying = sources.call().numbers("staying")
        assert next(staying) == 0
    finally:
        reader.kill()
        reader.communicate()
    wait_until(lambda: sources.call().ended() == ["reader"], PATIENCE_S)
    assert [next(staying) for _ in range(20)] == list(range(1, 21))


def test_a_cancelled_call_is_told_to_its_actor(sources: ActorPool[Source], tmp_path: Path) -> None:
    entered = tmp_path / "entered"
    future = sources.submit().wait_cancelled(str(entered))
    wait_until(entered.exists, PATIENCE_S)
    assert future.cancel()
    assert sources.call(timeout=PATIENCE_S).ended() == ["cancelled"]
