"""joblib's Parallel on a pool's workers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import pytest
from joblib import Parallel, delayed, parallel_config

from fluster import ActorDiedError, AsyncCluster, EnvironmentConfig, LocalCluster, ResourceConfig, WorkerPool
from fluster.integrations.joblib import FlusterBackend
from tests.system.joblib.calls import PATIENCE_S, WORKERS, arrived, fail, square, stay, where
from tests.waiting import wait_until

# ---- calls ----------------------------------------------------------------------------------------------


def test_results_come_in_order_from_the_pool_s_workers(backend: FlusterBackend, pool: WorkerPool) -> None:
    pool.wait_for_workers()
    assert Parallel()(delayed(square)(number) for number in range(2_000)) == [each * each for each in range(2_000)]
    pids = set(Parallel(batch_size=1)(delayed(where)(number) for number in range(200)))
    assert pids <= set(pool.map(where, range(200), chunksize=1).results(PATIENCE_S))
    assert os.getpid() not in pids


def test_functions_and_classes_of_a_script_go_along(backend: FlusterBackend) -> None:
    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    found = Parallel()(delayed(lambda x: Point(x + 1))(number) for number in range(5))
    assert [(type(point), point.x) for point in found] == [(Point, number + 1) for number in range(5)]


def test_short_calls_travel_together(backend: FlusterBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    submit = FlusterBackend.submit

    def noted(backend: FlusterBackend, calls: Any, callback: Any = None) -> Any:
        sizes.append(len(calls))
        return submit(backend, calls, callback)

    monkeypatch.setattr(FlusterBackend, "submit", noted)
    Parallel()(delayed(square)(number) for number in range(5_000))
    assert sum(sizes) == 5_000
    assert max(sizes) > 50


@pytest.mark.parametrize(
    ("asked", "runs"), [(None, WORKERS), (-1, WORKERS), (-2, WORKERS - 1), (-99, 1), (1, 1), (2, 2), (99, WORKERS)]
)
def test_so_many_at_a_time(backend: FlusterBackend, asked: int | None, runs: int) -> None:
    assert joblib.effective_n_jobs(asked) == runs


def test_none_at_a_time_is_refused(backend: FlusterBackend) -> None:
    with pytest.raises(ValueError, match="n_jobs == 0 in Parallel has no meaning: give"):
        Parallel(n_jobs=0)([delayed(square)(1)])


def test_one_at_a_time_runs_here_as_joblib_has_it(backend: FlusterBackend) -> None:
    assert Parallel(n_jobs=1)([delayed(where)()]) == [os.getpid()]


def test_no_more_run_at_a_time_than_were_asked_for(backend: FlusterBackend, pool: WorkerPool, tmp_path: Path) -> None:
    pool.wait_for_workers()
    calls = Parallel(n_jobs=2, batch_size=1, pre_dispatch="all", return_as="generator")(
        delayed(stay)(tmp_path, number) for number in range(6)
    )
    wait_until(lambda: len(arrived(tmp_path)) == 2, PATIENCE_S)
    status = pool.status()
    assert (status.queued, status.out) == (0, 2)
    (tmp_path / "open").touch()
    assert list(calls) == list(range(6))


def test_results_come_one_by_one(backend: FlusterBackend, tmp_path: Path) -> None:
    ordered = Parallel(n_jobs=2, return_as="generator")(delayed(square)(number) for number in range(50))
    assert [next(ordered), next(ordered)] == [0, 1]
    # Another call meanwhile, over the same backend.
    assert Parallel(n_jobs=2)(delayed(square)(number) for number in range(50)) == [each * each for each in range(50)]
    assert list(ordered) == [each * each for each in range(2, 50)]
    unordered = Parallel(n_jobs=2, return_as="generator_unordered")(delayed(square)(number) for number in range(50))
    assert sorted(unordered) == [each * each for each in range(50)]


def test_who_gives_up_a_generator_takes_its_calls_back(
    backend: FlusterBackend, pool: WorkerPool, tmp_path: Path
) -> None:
    calls = Parallel(n_jobs=2, batch_size=1, return_as="generator")(delayed(stay)(tmp_path, each) for each in range(90))
    wait_until(lambda: len(arrived(tmp_path)) == 2, PATIENCE_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of joblib, which tells that work was in vain
        calls.close()
    (tmp_path / "open").touch()
    assert Parallel()([delayed(square)(3), delayed(square)(4)]) == [9, 16]
    wait_until(lambda: pool.status().out == 0, PATIENCE_S)
    assert len(arrived(tmp_path)) <= 2 * WORKERS


def test_a_parallel_is_used_again(backend: FlusterBackend) -> None:
    with Parallel(n_jobs=2) as parallel:
        for start in (0, 100):
            numbers = range(start, start + 50)
            assert parallel(delayed(square)(each) for each in numbers) == [each * each for each in numbers]


# ---- errors ---------------------------------------------------------------------------------------------


def test_what_a_call_raises_arrives_with_its_traceback(backend: FlusterBackend) -> None:
    with pytest.raises(LookupError, match="no 7") as caught:
        Parallel()(delayed(fail)(number) for number in range(20))
    assert "in fail" in "".join(caught.value.__notes__)
    assert Parallel()(delayed(square)(each) for each in range(9)) == [each * each for each in range(9)]


@pytest.mark.parametrize("place", [0, 40], ids=["at first", "later on, when joblib asks for more in another thread"])
def test_what_cannot_be_pickled_is_told(backend: FlusterBackend, place: int) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        Parallel(batch_size=1)(delayed(square)(threading.Lock() if each == place else each) for each in range(60))


def test_a_result_that_cannot_be_pickled_is_told(backend: FlusterBackend) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        Parallel()(delayed(threading.Lock)() for _ in range(2))


def test_what_the_items_raise_is_raised(backend: FlusterBackend) -> None:
    def items() -> Iterator[Any]:
        for number in range(60):
            if number == 50:
                raise LookupError("no more")
            yield delayed(square)(number)

    with pytest.raises(LookupError, match="no more"):
        Parallel(batch_size=1)(items())


def test_items_may_ask_the_cluster(backend: FlusterBackend, cluster: LocalCluster) -> None:
    """joblib takes them in whatever thread has taken results: that must not be the one that serves the cluster."""

    def items() -> Iterator[Any]:
        for number in range(30):
            yield delayed(square)(cluster.put(number).get())

    assert Parallel(batch_size=1)(items()) == [each * each for each in range(30)]


def test_calls_may_take_too_long(backend: FlusterBackend, tmp_path: Path) -> None:
    with pytest.raises(multiprocessing.TimeoutError):  # as joblib has it
        Parallel(n_jobs=2, timeout=0.2)(delayed(stay)(tmp_path, number) for number in range(2))
    (tmp_path / "open").touch()
    assert Parallel()(delayed(square)(each) for each in range(9)) == [each * each for each in range(9)]


def test_a_pool_that_has_ended_is_told(cluster: LocalCluster) -> None:
    with WorkerPool(cluster, 2) as pool:
        parallel = Parallel(backend=FlusterBackend(pool=pool), batch_size=1)

        def items() -> Iterator[Any]:
            for number in range(60):
                if number == 30:
                    pool.shutdown(wait=False)
                yield delayed(square)(number)

        with pytest.raises((ActorDiedError, RuntimeError), match="was shut down"):
            parallel(items())


def test_a_worker_is_killed_and_all_is_done(backend: FlusterBackend, pool: WorkerPool, tmp_path: Path) -> None:
    calls = Parallel(batch_size=1, return_as="generator")(delayed(stay)(tmp_path, number) for number in range(30))
    wait_until(lambda: len(arrived(tmp_path)) == WORKERS, PATIENCE_S)
    os.kill(int(arrived(tmp_path)[0].rpartition("-")[2]), signal.SIGKILL)
    (tmp_path / "open").touch()
    assert list(calls) == list(range(30))
    assert len(arrived(tmp_path)) > 30  # one was begun twice


# ---- calls in calls -------------------------------------------------------------------------------------


def nested(number: int) -> tuple[list[int], str, list[str]]:
    parallel = Parallel(n_jobs=2)
    names = Parallel(n_jobs=2)(delayed(_backend_below)() for _ in range(2))
    return parallel(delayed(square)(each) for each in range(number)), type(parallel._backend).__name__, names  # noqa: SLF001 - joblib tells it in no other way


def _backend_below() -> str:
    return type(Parallel(n_jobs=2)._backend).__name__  # noqa: SLF001 - joblib tells it in no other way


def test_calls_in_calls_use_the_worker_s_threads(backend: FlusterBackend) -> None:
    """As with joblib's own processes: they wait for no other worker, which may never be free."""
    found = Parallel()(delayed(nested)(number) for number in range(2 * WORKERS))
    assert found == [
        ([each * each for each in range(number)], "ThreadingBackend", ["SequentialBackend"] * 2)
        for number in range(2 * WORKERS)
    ]


# ---- what is not supported ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"mmap_mode": "r+"}, r"mmap_mode='r\+' is not supported .* return it"),
        ({"mmap_mode": "w+"}, r"mmap_mode='w\+' is not supported"),
        ({"num_workers": 3}, r"Parallel\(…, num_workers=\) is not supported .* parallel_config"),
        ({"require": "sharedmem"}, "does not support shared memory"),
    ],
    ids=str,
)
def test_what_a_call_cannot_have_is_told_at_once(pool: WorkerPool, asked: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        Parallel(n_jobs=2, backend=FlusterBackend(pool=pool), **asked)(delayed(square)(each) for each in range(3))


@pytest.mark.parametrize("name", ["cluster", "num_workers", "resources", "environment"])
def test_what_a_given_pool_cannot_have_is_told_at_once(pool: WorkerPool, cluster: LocalCluster, name: str) -> None:
    values = {"cluster": cluster, "num_workers": 2, "resources": ResourceConfig(), "environment": EnvironmentConfig()}
    with pytest.raises(TypeError, match=f"{name}: give it to WorkerPool"):
        parallel_config(backend="fluster", pool=pool, **{name: values[name]})


def test_what_a_backend_cannot_be_made_of_is_told_at_once(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="pool=3: give a WorkerPool"):
        parallel_config(backend="fluster", pool=3)
    with pytest.raises(TypeError, match=r"cluster=.*: give a Cluster"):
        parallel_config(backend="fluster", cluster=AsyncCluster)
    with pytest.raises(TypeError, match="unexpected keyword argument 'n_workers'"):
        parallel_config(backend="fluster", n_workers=3)
    with pytest.raises(ValueError, match="num_workers=0: give the number of workers"):
        parallel_config(backend="fluster", num_workers=0)
    with (
        parallel_config(backend="fluster", pool=pool, inner_max_num_threads=2),
        pytest.raises(ValueError, match="inner_max_num_threads=2 is not supported for a pool that is there"),
    ):
        Parallel()(delayed(square)(each) for each in range(3))
