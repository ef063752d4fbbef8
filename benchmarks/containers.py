"""What a job in a container costs, against `docker run --rm IMAGE true` of the same image at the same engine.

Both are run in turn, so that what else the machine does bears on both. Without an engine (see tests/docker_engine.py) there is nothing to be measured.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.noop import noop
from benchmarks.row import Row
from fluster import Cluster, Entrypoint, JobRequest, JobStatus, LocalCluster
from tests.docker_engine import Engine, EngineMissingError, OwnEngine, find_engine

ROUNDS = 15
AT_ONCE = 10
ROUNDS_AT_ONCE = 5


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _in_turn(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """The median of each in milliseconds; the first round warms up."""
    taken = [[_seconds(run) for run in runs] for _ in range(rounds + 1)][1:]
    return [statistics.median(each) * 1e3 for each in zip(*taken, strict=True)]


class _Runs:
    """The same work by docker alone, and as jobs."""

    def __init__(self, engine: Engine, cluster: Cluster) -> None:
        self._image = engine.image
        self._environment = {**os.environ, "DOCKER_HOST": engine.host}
        self._cluster = cluster

    def bare(self, *command: str) -> None:
        words = ["docker", "run", "--rm", "--network=host", self._image, *command]
        subprocess.run(words, env=self._environment, check=True)

    def bare_at_once(self) -> None:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(lambda _: self.bare("true"), range(AT_ONCE)))

    def job(self, entrypoint: Entrypoint, count: int = 1) -> None:
        jobs = self._cluster.launch_many([JobRequest(name="noop", entrypoint=entrypoint)] * count)
        assert all(info.status is JobStatus.SUCCEEDED for info in self._cluster.wait(jobs))


def run() -> Iterator[Row]:
    if shutil.which("docker") is None:
        sys.stderr.write("containers: not measured, as there is no docker here\n")
        return
    try:
        engine = find_engine()
    except EngineMissingError as error:
        sys.stderr.write(f"containers: not measured: {error}\n")
        return
    try:
        with LocalCluster(runtime="docker", docker_host=engine.host, image=engine.image) as cluster:
            yield from _rows(_Runs(engine, cluster))
    finally:
        if isinstance(engine, OwnEngine):
            engine.remove()


def _rows(runs: _Runs) -> Iterator[Row]:
    true, call = Entrypoint(command=("true",)), Entrypoint(callable=noop)
    bare, job = _in_turn(ROUNDS, lambda: runs.bare("true"), lambda: runs.job(true))
    yield _row("a no-op command in a container, p50", job, bare, "docker run")
    bare, job = _in_turn(ROUNDS, lambda: runs.bare("python3", "-c", "pass"), lambda: runs.job(call))
    yield Row("a no-op callable in a container, p50", f"{job:.0f} ms", f"docker run python3 {bare:.0f} ms", job / bare)
    bare, job = _in_turn(ROUNDS_AT_ONCE, runs.bare_at_once, lambda: runs.job(true, AT_ONCE))
    yield _row(f"{AT_ONCE} no-op commands in containers at once, p50", job, bare, f"{AT_ONCE} docker run")


def _row(what: str, job_ms: float, bare_ms: float, against: str) -> Row:
    return Row(what, f"{job_ms:.0f} ms", f"{against} {bare_ms:.0f} ms", job_ms / bare_ms, target="≤ 1.3")
