"""joblib's Parallel, and scikit-learn, on a cluster's workers."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from joblib import Parallel, delayed, parallel_config

from fluster import (
    ActorDiedError,
    ActorTimeoutError,
    AsyncCluster,
    Cluster,
    EnvironmentConfig,
    JobStatus,
    LocalCluster,
    ResourceConfig,
    WorkerPool,
)
from fluster.cluster.refs import Ref
from fluster.integrations import joblib_batches, joblib_workers
from fluster.integrations.joblib import FlusterBackend, register
from fluster.integrations.joblib_batches import SharedArrays
from fluster.integrations.joblib_workers import OwnWorkers, _room_for
from fluster_bus.errors import ClosedError
from fluster_bus.messages.workers import Capacity
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 30.0
WORKERS = 3
LARGE = 200_000  # float64s: more than a megabyte, from where on joblib shares arrays
SMALL = 20_000  # fewer than that, and more than what an actor's arguments are copied for

register()


@pytest.fixture(scope="module")
def pool(cluster: LocalCluster) -> Iterator[WorkerPool]:
    with WorkerPool(cluster, WORKERS) as pool:
        yield pool


@pytest.fixture
def backend(pool: WorkerPool) -> Iterator[FlusterBackend]:
    with parallel_config(backend="fluster", pool=pool) as config:
        yield config["backend"]


def square(number: int) -> int:
    return number * number


def where(_number: int = 0) -> int:
    return os.getpid()


def stay(folder: Path, number: int = 0) -> int:
    """Say that it runs; return when the folder has been opened."""
    (folder / f"in-{number}-{os.getpid()}").touch()
    wait_until((folder / "open").exists, PATIENCE_S)
    return number


def arrived(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("in-*")]


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
    with pytest.raises(ValueError, match="n_jobs=0 has no meaning"):
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


def fail(number: int) -> int:
    if number == 7:
        raise LookupError(f"no {number}")
    return number


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


# ---- arrays ---------------------------------------------------------------------------------------------


def about(array: Any, place: int) -> tuple[float, bool]:
    return float(array[place]), bool(array.flags.writeable)


def write(array: Any) -> Any:
    array += 1
    return array


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Ref[Any]]]:
    """The Refs that are made."""
    made: list[weakref.ref[Ref[Any]]] = []
    put = Cluster.put

    def noted(cluster: Cluster, value: Any) -> Ref[Any]:
        ref = put(cluster, value)
        made.append(weakref.ref(ref))
        return ref

    monkeypatch.setattr(Cluster, "put", noted)
    return made


def test_a_large_array_is_sent_once_and_freed(backend: FlusterBackend, puts: list[weakref.ref[Ref[Any]]]) -> None:
    array = np.arange(float(LARGE))
    for count in (1, 2):  # once for each call
        found = Parallel(batch_size=1)(delayed(about)(array, each) for each in range(30))
        assert found == [(float(each), False) for each in range(30)]
        assert len(puts) == count
        gc.collect()
        assert not any(ref() for ref in puts)
    assert len(backend._arrays) == 0


def test_also_one_that_lies_in_other_objects(backend: FlusterBackend, puts: list[weakref.ref[Ref[Any]]]) -> None:
    array = np.asfortranarray(np.arange(float(LARGE)).reshape(2, -1))
    calls = [delayed(lambda found, place: found["x"][0][0, place])({"x": [array]}, place) for place in range(9)]
    assert Parallel(batch_size=1)(calls) == list(range(9))
    assert len(puts) == 1


def test_arrays_that_go_are_freed_while_calls_run(
    backend: FlusterBackend, puts: list[weakref.ref[Ref[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []

    def items() -> Iterator[Any]:
        for number in range(30):
            alive.append(sum(ref() is not None for ref in puts))
            yield delayed(about)(np.full(LARGE, float(number)), 5)

    assert [value for value, _ in Parallel(n_jobs=2, batch_size=1)(items())] == list(range(30))
    assert len(puts) == 30
    assert max(alive) < 15


def test_smaller_arrays_may_be_written_to_and_so_may_results(backend: FlusterBackend) -> None:
    array = np.zeros(SMALL)
    found = Parallel()(delayed(write)(array) for _ in range(4))
    found[0] += 1
    assert [each.sum() for each in found] == [2 * SMALL, SMALL, SMALL, SMALL]
    assert array.sum() == 0


@pytest.mark.parametrize("asked", [{"max_nbytes": None}, {"mmap_mode": None}, {"mmap_mode": "c"}], ids=str)
def test_large_arrays_may_be_written_to_when_that_is_asked_for(
    backend: FlusterBackend, puts: list[Any], asked: dict[str, Any]
) -> None:
    array = np.zeros(LARGE)
    found = Parallel(**asked)(delayed(write)(array) for _ in range(2))
    assert [each.sum() for each in found] == [LARGE, LARGE]
    assert not puts


def test_how_large_is_large_can_be_said(backend: FlusterBackend, puts: list[Any]) -> None:
    array = np.zeros(1_000)
    assert [value for value, _ in Parallel(max_nbytes="1K")(delayed(about)(array, 0) for _ in range(3))] == [0.0] * 3
    assert len(puts) == 1


def test_no_more_arrays_are_kept_than_there_is_room_for(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joblib_batches, "_KEPT_BYTES", 4 * 8 * LARGE)
    shared = SharedArrays()
    arrays = [np.zeros(LARGE) for _ in range(6)]
    refs = [shared.of(array, 1, lambda: cluster) for array in arrays]
    assert len(shared) == 4
    assert shared.of(arrays[5], 1, lambda: cluster) is refs[5]
    assert shared.of(arrays[0], 1, lambda: cluster) is not refs[0]
    assert shared.of([1], 1, lambda: cluster) is None
    assert shared.of(np.array([None] * LARGE), 1, lambda: cluster) is None
    del arrays[:]
    assert len(shared) == 0


# ---- scikit-learn, and calls in calls -------------------------------------------------------------------


def nested(number: int) -> tuple[list[int], str, list[str]]:
    parallel = Parallel(n_jobs=2)
    names = Parallel(n_jobs=2)(delayed(_backend_below)() for _ in range(2))
    return parallel(delayed(square)(each) for each in range(number)), type(parallel._backend).__name__, names


def _backend_below() -> str:
    return type(Parallel(n_jobs=2)._backend).__name__


def test_calls_in_calls_use_the_worker_s_threads(backend: FlusterBackend) -> None:
    """As with joblib's own processes: they wait for no other worker, which may never be free."""
    found = Parallel()(delayed(nested)(number) for number in range(2 * WORKERS))
    assert found == [
        ([each * each for each in range(number)], "ThreadingBackend", ["SequentialBackend"] * 2)
        for number in range(2 * WORKERS)
    ]


@pytest.mark.slow  # scikit-learn takes its time to import, in each worker
def test_grid_search(backend: FlusterBackend, puts: list[Any]) -> None:
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV

    x, y = make_classification(4_500, 30, random_state=0)
    model = RandomForestClassifier(4, max_depth=4, random_state=0, n_jobs=2)  # a call in a call
    settings = {"max_features": [2, 6], "min_samples_leaf": [1, 5]}
    search = GridSearchCV(model, settings, cv=3).fit(x, y)
    assert len(puts) == 1  # x, in one of 12 fits; and the forest of the end was grown here
    with parallel_config(backend="sequential"):
        alone = GridSearchCV(model, settings, cv=3).fit(x, y)
    assert search.best_params_ == alone.best_params_
    assert search.cv_results_["mean_test_score"].tolist() == alone.cv_results_["mean_test_score"].tolist()
    assert (search.predict(x) == alone.predict(x)).all()


# ---- what is not supported ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"mmap_mode": "r+"}, r"mmap_mode='r\+' is not supported .* return it"),
        ({"mmap_mode": "w+"}, r"mmap_mode='w\+' is not supported"),
        ({"workers": 3}, r"Parallel\(…, workers=\) is not supported .* parallel_config"),
        ({"require": "sharedmem"}, "does not support shared memory"),
    ],
    ids=str,
)
def test_what_a_call_cannot_have_is_told_at_once(pool: WorkerPool, asked: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        Parallel(n_jobs=2, backend=FlusterBackend(pool=pool), **asked)(delayed(square)(each) for each in range(3))


@pytest.mark.parametrize("name", ["cluster", "workers", "resources", "environment"])
def test_what_a_given_pool_cannot_have_is_told_at_once(pool: WorkerPool, cluster: LocalCluster, name: str) -> None:
    values = {"cluster": cluster, "workers": 2, "resources": ResourceConfig(), "environment": EnvironmentConfig()}
    with pytest.raises(TypeError, match=f"{name}: give it to WorkerPool"):
        parallel_config(backend="fluster", pool=pool, **{name: values[name]})


def test_what_a_backend_cannot_be_made_of_is_told_at_once(pool: WorkerPool) -> None:
    with pytest.raises(TypeError, match="pool=3: give a WorkerPool"):
        parallel_config(backend="fluster", pool=3)
    with pytest.raises(TypeError, match=r"cluster=.*: give a Cluster"):
        parallel_config(backend="fluster", cluster=AsyncCluster)
    with pytest.raises(TypeError, match="unexpected keyword argument 'n_workers'"):
        parallel_config(backend="fluster", n_workers=3)
    with pytest.raises(ValueError, match="workers=0: give the number of workers"):
        parallel_config(backend="fluster", workers=0)
    with (
        parallel_config(backend="fluster", pool=pool, inner_max_num_threads=2),
        pytest.raises(ValueError, match="inner_max_num_threads=2 is not supported for a pool that is there"),
    ):
        Parallel()(delayed(square)(each) for each in range(3))


# ---- workers of its own ---------------------------------------------------------------------------------


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
        with parallel_config(backend="fluster", cluster=cluster, workers=2, resources=ResourceConfig(cpu=2.5), **asked):
            assert set(Parallel()(delayed(threads)(each) for each in range(4))) == {count}


def test_who_interrupts_has_own_workers_end(cluster: LocalCluster, tmp_path: Path) -> None:
    def interrupt() -> None:
        wait_until(lambda: len(arrived(tmp_path)) == 2, PATIENCE_S)
        signal.raise_signal(signal.SIGINT)

    with parallel_config(backend="fluster", cluster=cluster, workers=2):
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
            backend="fluster", cluster=cluster, workers=2, resources=ResourceConfig(cpu=999), start_timeout=0.2
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
    with parallel_config(backend="fluster", cluster=cluster, workers=2):
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
    config = parallel_config(backend="fluster", workers=2)
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
    with parallel_config(backend="fluster", cluster=connected, workers=2):
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
    with parallel_config(backend="fluster", workers=2):
        Parallel()(delayed(square)(each) for each in range(9))
        asked[0].close()
    assert len(asked) == 1
    wait_until(lambda: not jobs_that_live(cluster), PATIENCE_S, lambda: cluster.list_jobs(limit=6))
