"""joblib's Parallel on workers that the backend begins and ends by itself."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import joblib
import pytest
from joblib import Parallel, delayed, parallel_config

from fluster import (
    ActorDiedError,
    ActorTimeoutError,
    Cluster,
    EnvironmentConfig,
    JobStatus,
    LocalCluster,
    ResourceConfig,
    WorkerPool,
)
from fluster.integrations import joblib_workers
from fluster.integrations.joblib import FlusterBackend
from fluster.integrations.joblib_workers import OwnWorkers, _room_for
from fluster_bus.core.errors import ClosedError
from fluster_bus.messages.workers import Capacity
from tests.system.joblib.calls import PATIENCE_S, arrived, fail, square, stay
from tests.system.processes import Family
from tests.waiting import wait_until


def jobs_that_live(cluster: Cluster) -> list[str]:
    return [job.name for job in cluster.list_jobs() if not job.status.finished() and job.name.startswith("joblib-")]


def test_own_workers_are_as_many_as_asked_for_and_end_with_the_block(cluster: LocalCluster) -> None:
    with parallel_config(backend="fluster", cluster=cluster):
        assert Parallel(n_jobs=2)(delayed(square)(each) for each in range(9)) == [each * each for each in range(9)]
        [name] = jobs_that_live(cluster)
        Parallel(n_jobs=2)(delayed(square)(each) for each in range(9))
        assert jobs_that_live(cluster) == [name]  # they stay
        Parallel(n_jobs=3)(delayed(square)(each) for each in range(9))
        assert jobs_that_live(cluster) == [name] * 2  # and become more
    wait_until(lambda: not jobs_that_live(cluster), PATIENCE_S, lambda: cluster.list_jobs(limit=6))


@pytest.mark.parametrize("ends", ["well", "with an error", "early", "in vain"])
def test_nothing_keeps_a_backend_and_thereby_its_workers(pool: WorkerPool, tmp_path: Path, ends: str) -> None:
    """Not even until garbage is collected."""

    def call() -> weakref.ref[Any]:
        with parallel_config(backend="fluster", pool=pool, n_jobs=2) as config:
            if ends == "early":
                found = Parallel(return_as="generator", pre_dispatch="all")(delayed(square)(each) for each in range(90))
                next(found)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found.close()
            elif ends == "in vain":
                with pytest.raises(multiprocessing.TimeoutError):
                    Parallel(timeout=0.1, pre_dispatch="all")(delayed(stay)(tmp_path, each) for each in range(9))
            else:
                with contextlib.suppress(LookupError):
                    Parallel()(delayed(fail if ends == "with an error" else square)(each) for each in range(90))
            return weakref.ref(config["backend"])

    gc.collect()
    gc.disable()
    try:
        backend = call()
        (tmp_path / "open").touch()
        wait_until(lambda: backend() is None, PATIENCE_S)
    finally:
        gc.enable()


def test_own_workers_take_as_many_threads_as_they_have_cpus(cluster: LocalCluster) -> None:
    def threads(_number: int) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    for asked, count in (({}, "2"), ({"inner_max_num_threads": 3}, "3")):
        with parallel_config(
            backend="fluster", cluster=cluster, num_workers=2, resources=ResourceConfig(cpu=2.5), **asked
        ):
            assert set(Parallel()(delayed(threads)(each) for each in range(4))) == {count}


def test_who_interrupts_has_own_workers_end(cluster: LocalCluster, tmp_path: Path) -> None:
    def interrupt() -> None:
        wait_until(lambda: len(arrived(tmp_path)) == 2, PATIENCE_S)
        signal.raise_signal(signal.SIGINT)

    with parallel_config(backend="fluster", cluster=cluster, num_workers=2):
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            Parallel(batch_size=1)(delayed(stay)(tmp_path, number) for number in range(20))
        thread.join()
        (tmp_path / "open").touch()
        wait_until(lambda: not jobs_that_live(cluster), PATIENCE_S, lambda: cluster.list_jobs(limit=6))
        assert Parallel()(delayed(square)(each) for each in range(9)) == [each * each for each in range(9)]
    assert len(arrived(tmp_path)) == 2


def test_workers_that_do_not_come_are_told(cluster: LocalCluster) -> None:
    with (
        parallel_config(
            backend="fluster", cluster=cluster, num_workers=2, resources=ResourceConfig(cpu=999), start_timeout=0.2
        ),
        pytest.raises(ActorTimeoutError, match=r"had no worker after 0\.2 s: .* start_timeout="),
    ):
        Parallel()(delayed(square)(each) for each in range(3))
    wait_until(lambda: not jobs_that_live(cluster), PATIENCE_S, lambda: cluster.list_jobs(limit=6))


def test_a_cluster_of_others_has_as_many_as_there_is_room_for(cluster: LocalCluster) -> None:
    with Cluster(cluster.address) as connected:
        assert (
            OwnWorkers(connected, None, ResourceConfig(cpu=3), EnvironmentConfig()).most() == 4
        )  # two workers of 8 CPUs
        with pytest.raises(RuntimeError, match="none of the 2 workers of the cluster has room for"):
            OwnWorkers(connected, None, ResourceConfig(cpu=9), EnvironmentConfig()).most()
    assert OwnWorkers(cluster, None, ResourceConfig(), EnvironmentConfig()).most() == joblib.cpu_count()


def test_room_is_counted_by_what_is_asked_for() -> None:
    workers = [Capacity(cpu=8, memory=8 << 30), Capacity(cpu=8, memory=64 << 30, device="gpu", variant="t", devices=2)]
    assert _room_for(ResourceConfig(cpu=1, memory=4 << 30), workers) == 2 + 8
    assert _room_for(ResourceConfig.with_gpu("t", 1), workers) == 2
    assert _room_for(ResourceConfig(cpu=0, memory=0), workers) == 2
    assert _room_for(ResourceConfig(), []) == 0


def test_own_workers_that_were_ended_are_made_again(cluster: LocalCluster) -> None:
    with parallel_config(backend="fluster", cluster=cluster, num_workers=2):
        Parallel()(delayed(square)(each) for each in range(9))
        [job] = [each for each in cluster.list_jobs() if each.name in jobs_that_live(cluster)]
        cluster.terminate(job.job_id)
        cluster.wait(job.job_id, timeout=PATIENCE_S)
        with contextlib.suppress(ActorDiedError):  # for who comes before the pool knows
            Parallel()(delayed(square)(each) for each in range(9))
        assert Parallel()(delayed(square)(each) for each in range(9)) == [each * each for each in range(9)]


_PROGRAM = """
import sys
from joblib import Parallel, delayed, parallel_config
from fluster.integrations.joblib import register

def square(number):
    return number * number

if __name__ == "__main__":
    register()
    config = parallel_config(backend="fluster", num_workers=2)
    print(sum(Parallel()(delayed(square)(each) for each in range(100))))
    sys.exit(3)
"""


def test_own_workers_end_with_the_program(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env=Family().environment() | {"FLUSTER_CLUSTER_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "328350\n", "")
    assert not jobs_that_live(cluster)
    assert cluster.list_jobs(limit=1)[0].status is JobStatus.KILLED


def test_own_workers_end_before_their_cluster_is_closed(cluster: LocalCluster) -> None:
    connected = Cluster(cluster.address)
    with parallel_config(backend="fluster", cluster=connected, num_workers=2):
        Parallel()(delayed(square)(each) for each in range(9))
        connected.close()
        wait_until(lambda: not jobs_that_live(cluster), PATIENCE_S, lambda: cluster.list_jobs(limit=6))
        with pytest.raises(ClosedError):
            Parallel()(delayed(square)(each) for each in range(9))


def test_the_current_cluster_is_closed_and_no_other_is_started(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUSTER_CLUSTER_ADDRESS", cluster.address)
    asked: list[Cluster] = []

    def current() -> Cluster:
        asked.append(Cluster(cluster.address))
        return asked[-1]

    monkeypatch.setattr(joblib_workers, "current_cluster", current)
    with parallel_config(backend="fluster", num_workers=2):
        Parallel()(delayed(square)(each) for each in range(9))
        asked[0].close()
    assert len(asked) == 1
    wait_until(lambda: not jobs_that_live(cluster), PATIENCE_S, lambda: cluster.list_jobs(limit=6))


def test_two_at_once_share_the_workers_that_one_of_them_has_all_of(tmp_path: Path) -> None:
    """Else the second would wait for room until the first has ended, and the first for who reads it after the second."""
    with LocalCluster(cpu=2) as cluster, Cluster(cluster.address) as connected:
        backends = [FlusterBackend(cluster=connected) for _ in range(2)]
        first = Parallel(n_jobs=-1, backend=backends[0], return_as="generator")(
            delayed(square)(each) for each in range(9)
        )
        assert next(first) == 0
        second = Parallel(n_jobs=-1, backend=backends[1], return_as="generator")(
            delayed(square)(each) for each in range(9)
        )
        assert list(second) == [each * each for each in range(9)]
        assert list(first) == [each * each for each in range(1, 9)]
        assert len(jobs_that_live(connected)) == 1


def test_an_interrupt_in_a_task_is_one_at_home(pool: WorkerPool) -> None:
    def interrupt(_number: int) -> None:
        raise KeyboardInterrupt

    with parallel_config(backend="fluster", pool=pool), pytest.raises(KeyboardInterrupt):
        Parallel()(delayed(interrupt)(each) for each in range(3))


def test_within_a_task_it_runs_in_threads(pool: WorkerPool) -> None:
    def inner(levels: int) -> tuple[str, int | None]:
        parallel = Parallel(n_jobs=2, backend="fluster")
        if levels:
            found: tuple[str, int | None] = parallel(delayed(inner)(levels - 1) for _ in range(2))[0]
            return found
        parallel(delayed(square)(each) for each in range(2))
        return type(parallel._backend).__name__, parallel._backend.nesting_level  # noqa: SLF001 - joblib tells it in no other way

    with parallel_config(backend="fluster", pool=pool):
        assert Parallel()(delayed(inner)(0) for _ in range(2)) == [("ThreadingBackend", 1)] * 2
        assert Parallel()(delayed(inner)(1) for _ in range(2)) == [("SequentialBackend", 2)] * 2
