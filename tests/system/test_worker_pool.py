"""Worker pools on a LocalCluster: what becomes of tasks whose workers die, hang or leave."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from fluster import (
    ActorDiedError,
    ActorTimeoutError,
    AsyncCluster,
    AsyncWorkerPool,
    Cluster,
    JobStatus,
    LocalCluster,
    NotRunError,
    PoisonedTaskError,
    RemoteError,
    WorkerPool,
    create_environment,
    deploy,
)
from fluster.actors import ActorHandle
from fluster.worker_pool import PoolStatus
from fluster_bus.core.errors import ClosedError, ObjectTooLargeError
from fluster_bus.core.names import unique_name
from fluster_bus.storage import objects
from tests.system.job_requests import call
from tests.waiting import wait_until

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


@pytest.fixture
def pool(cluster: LocalCluster) -> Iterator[WorkerPool]:
    with WorkerPool(cluster, 2) as pool:
        yield pool


def square(number: int) -> int:
    return number * number


def odd_only(number: int) -> int:
    if number % 2 == 0:
        raise ValueError(number)
    return number


def mark(folder: str, number: int) -> int:
    """Note the process, and that it ran."""
    (Path(folder) / f"{number}-{os.getpid()}-{time.monotonic_ns()}").touch()
    return number


def stay(folder: str, name: str = "opened") -> int:
    """Say that it runs, and where; return when the folder has that file."""
    (Path(folder) / f"in-{os.getpid()}").touch()
    wait_until((Path(folder) / name).exists, PATIENCE_S)
    return os.getpid()


def pids_in(folder: Path) -> list[int]:
    return [int(each.name.removeprefix("in-")) for each in folder.glob("in-*")]


# ---- workers that die -----------------------------------------------------------------------------------


def test_a_task_whose_worker_is_killed_is_done_by_another(pool: WorkerPool, tmp_path: Path) -> None:
    task = pool.submit(stay, str(tmp_path))
    [first] = wait_until(lambda: pids_in(tmp_path), PATIENCE_S)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: len(pids_in(tmp_path)) == 2, PATIENCE_S)
    (tmp_path / "opened").touch()
    assert task.result(PATIENCE_S) != first


def test_a_lost_task_ends_with_the_pool(cluster: LocalCluster, tmp_path: Path) -> None:
    """No worker is there that it could be given to."""
    pool = WorkerPool(cluster, 1)
    task = pool.submit(stay, str(tmp_path))
    [worker] = wait_until(lambda: pids_in(tmp_path), PATIENCE_S)
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: pool.status().queued == 1, PATIENCE_S)
    pool.shutdown(wait=False)
    with pytest.raises(ActorDiedError, match="was shut down before the task was done"):
        task.result(PATIENCE_S)


def test_all_items_are_done_though_workers_are_killed(cluster: LocalCluster) -> None:
    numbers = range(20_000)
    with WorkerPool(cluster, 3) as pool:
        pids = {future.result(PATIENCE_S) for future in [pool.submit(os.getpid) for _ in range(50)]}
        result = pool.map(square, numbers, chunksize=20)
        unordered = pool.imap_unordered(square, numbers)
        got = [next(unordered)]
        os.kill(pids.pop(), signal.SIGKILL)
        assert result.results(PATIENCE_S) == [number * number for number in numbers]
        got += unordered
        assert sorted(got) == [number * number for number in numbers]


def test_a_task_that_kills_its_workers_is_set_aside(cluster: LocalCluster) -> None:
    with WorkerPool(cluster, 2, task_retries=2) as pool:
        before = pool.map(square, range(300))
        poisoned = pool.submit(os._exit, 3)
        after = pool.map(square, range(300))
        with pytest.raises(
            PoisonedTaskError, match=r"was given to 3 workers one after the other.*`fluster logs \S+` shows"
        ):
            poisoned.result(PATIENCE_S)
        for result in (before, after):
            assert result.results(PATIENCE_S) == [number * number for number in range(300)]
        status = pool.status()
        assert (status.done, status.failed, status.queued, status.out) == (600, 1, 0, 0)


def test_one_item_of_a_chunk_may_be_poisoned(cluster: LocalCluster) -> None:
    def deadly(number: int) -> int:
        if number == 13:
            os._exit(3)
        return number

    with WorkerPool(cluster, 2, task_retries=1) as pool:
        results = pool.map(deadly, range(40), chunksize=10).results(PATIENCE_S, return_exceptions=True)
    assert isinstance(results[13], PoisonedTaskError)
    assert "item 13 of the batch" in str(results[13])
    assert results[:13] + results[14:] == [*range(13), *range(14, 40)]


def test_without_retries_a_lost_task_ends_at_once(cluster: LocalCluster) -> None:
    with WorkerPool(cluster, 1, task_retries=0) as pool:
        with pytest.raises(ActorDiedError) as caught:
            pool.submit(os._exit, 3).result(PATIENCE_S)
        assert not isinstance(caught.value, PoisonedTaskError)
        assert pool.submit(square, 3).result(PATIENCE_S) == 9  # by a worker begun anew


def leave_once(folder: str) -> int:
    """End the worker with exit code 0 the first time."""
    try:
        (Path(folder) / "left").mkdir()
    except FileExistsError:
        return os.getpid()
    os._exit(0)


def test_a_worker_that_leaves_with_exit_code_0_is_begun_anew(cluster: LocalCluster, tmp_path: Path) -> None:
    with WorkerPool(cluster, 1) as pool:
        first = pool.submit(os.getpid).result(PATIENCE_S)
        assert pool.submit(leave_once, str(tmp_path)).result(PATIENCE_S) != first  # lost, and done by the next
        with pytest.raises(PoisonedTaskError):
            pool.submit(os._exit, 0).result(PATIENCE_S)
        assert pool.submit(square, 3).result(PATIENCE_S) == 9
        with pytest.raises(RemoteError, match="SystemExit"):  # as any other exception of a task
            pool.submit(sys.exit, 0).result(PATIENCE_S)


def fail_to_begin(name: str) -> None:
    raise RuntimeError(f"no {name} here")


def test_workers_that_cannot_begin_are_told_soon(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluster.worker_pool.worker_jobs.work", fail_to_begin)
    with WorkerPool(cluster, 2) as pool:
        with pytest.raises(ActorDiedError, match=r"failed 3 times before any was there: RuntimeError: no .* here"):
            pool.submit(square, 1).result(PATIENCE_S)
        with pytest.raises(ActorDiedError, match="fluster logs"):
            pool.wait_for_workers()


# ---- time -----------------------------------------------------------------------------------------------


def test_a_task_that_takes_too_long_ends_with_its_worker(cluster: LocalCluster, tmp_path: Path) -> None:
    with WorkerPool(cluster, 1, task_timeout=3) as pool:
        late = pool.submit(stay, str(tmp_path))
        others = pool.map(square, range(50))
        with pytest.raises(ActorTimeoutError, match=r"has run for 3 s"):
            late.result(PATIENCE_S)
        assert others.results(PATIENCE_S) == [number * number for number in range(50)]
        [pid] = pids_in(tmp_path)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), PATIENCE_S)


def test_the_limit_is_of_each_item(cluster: LocalCluster) -> None:
    def slow_at_7(number: int) -> int:
        threading.Event().wait(60 if number == 7 else 0.01)
        return number

    with WorkerPool(cluster, 1, task_timeout=3) as pool:
        results = pool.map(slow_at_7, range(60), chunksize=60).results(PATIENCE_S, return_exceptions=True)
    assert isinstance(results[7], ActorTimeoutError)
    assert results[:7] + results[8:] == [*range(7), *range(8, 60)]


# ---- maps -----------------------------------------------------------------------------------------------


def test_a_class_of_the_script_is_as_it_was_when_the_task_was_given_also_when_it_is_changed_back(
    cluster: LocalCluster,
) -> None:
    class Settings:
        number = 1

    read = _counting_reader(Settings)
    with WorkerPool(cluster, 1) as pool:
        assert pool.submit(read).result() == (1, 1)
        Settings.number = 2
        assert pool.submit(lambda: Settings.number).result() == 2
        assert pool.submit(read).result() == (2, 1)
        Settings.number = 1
        assert pool.submit(read).result() == (1, 2), "with what the function itself has kept there"


def _counting_reader(settings: Any) -> Any:
    calls = 0

    def read() -> tuple[int, int]:
        nonlocal calls
        calls += 1
        return settings.number, calls

    return read


def test_what_an_item_raises_is_its_own(pool: WorkerPool) -> None:
    result = pool.map(odd_only, range(100), chunksize=7)
    assert [future.exception(PATIENCE_S) is None for future in result] == [bool(number % 2) for number in range(100)]
    with pytest.raises(ValueError, match="0"):
        result.results(PATIENCE_S)
    results = result.results(PATIENCE_S, return_exceptions=True)
    assert results[1::2] == list(range(1, 100, 2))
    assert [error.args[0] for error in results[::2] if isinstance(error, ValueError)] == list(range(0, 100, 2))


def test_a_result_that_cannot_be_pickled_is_its_own(pool: WorkerPool) -> None:
    results = pool.map(_lock_for, [1, 2, 3], chunksize=3).results(PATIENCE_S, return_exceptions=True)
    assert (results[0], results[2]) == (1, 3)
    assert isinstance(results[1], TypeError)


class Unreadable:
    """Can be pickled, and not be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("nothing to read",)


def _unreadable_for(number: int) -> Any:
    return Unreadable() if number == 2 else [number] if number % 2 else Fraction(number)


def test_a_result_that_cannot_be_unpickled_spoils_no_other(pool: WorkerPool) -> None:
    for results in (
        pool.map(_unreadable_for, range(6), chunksize=6).results(PATIENCE_S, return_exceptions=True),
        [
            future.exception(PATIENCE_S) or future.result()
            for future in pool.map(_unreadable_for, range(6), chunksize=6)
        ],
    ):
        error = results.pop(2)
        assert isinstance(error, ValueError)
        assert "cannot be unpickled here" in error.__notes__[0]
        assert results == [Fraction(0), [1], [3], Fraction(4), [5]]
    unordered = pool.imap_unordered(_unreadable_for, range(6), chunksize=6)
    assert [next(unordered) for _ in range(2)] == [Fraction(0), [1]]
    with pytest.raises(ValueError, match="nothing to read"):
        next(unordered)
    assert list(unordered) == [[3], Fraction(4), [5]]


def _lock_for(number: int) -> Any:
    return threading.Lock() if number == 2 else number


def bytes_of(size: int) -> bytes:
    """In a worker where no more than 9 MiB can be stored."""
    objects.MAX_OBJECT_BYTES = 9 << 20
    return bytes(size)


@pytest.fixture
def elsewhere(cluster: LocalCluster) -> Iterator[WorkerPool]:
    """Workers with which no memory is shared, as on another machine."""
    environment = create_environment({"FLUSTER_ARENA_BYTES": "0"})
    with WorkerPool(cluster, 2, environment=environment) as pool:
        yield pool


def test_of_a_chunk_only_what_cannot_be_carried_fails(elsewhere: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [1, 3 << 20, 3 << 20, 10 << 20, 2, 3 << 20]
    results = elsewhere.map(bytes_of, sizes, chunksize=6).results(PATIENCE_S, return_exceptions=True)
    failure = results.pop(3)
    assert isinstance(failure, ObjectTooLargeError)
    assert "what item 3 of the batch gave cannot be sent" in str(failure)
    assert [len(each) for each in results] == sizes[:3] + sizes[4:]
    monkeypatch.setenv("FLUSTER_ARENA_BYTES", "0")
    monkeypatch.setattr(objects, "MAX_OBJECT_BYTES", 9 << 20)
    monkeypatch.setattr("fluster.worker_pool.work._MAX_CHUNK", 9 << 20)
    items = [bytes(3 << 20), bytes(3 << 20), bytes(10 << 20), bytes(1)]
    sent = elsewhere.map(len, items, chunksize=4).results(PATIENCE_S, return_exceptions=True)
    assert isinstance(sent[2], ObjectTooLargeError)
    assert "item 2 of the batch cannot be sent to a worker" in str(sent[2])
    assert sent[:2] + sent[3:] == [3 << 20, 3 << 20, 1]


def test_several_iterables_go_side_by_side(pool: WorkerPool) -> None:
    assert pool.map(pow, [2, 3, 4], itertools.count(1)).results(PATIENCE_S) == [2, 9, 64]
    assert pool.map(square, []).results() == []
    with pytest.raises(ValueError, match="chunksize=0"):
        pool.map(square, [1], chunksize=0)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pool.map(square, [threading.Lock()])
    with pytest.raises(TypeError, match="timeout='x': give seconds"):
        pool.map(square, [1]).results("x")  # type: ignore[arg-type]
    for wrong in (pool.map, pool.imap_unordered):
        with pytest.raises(TypeError, match="5 has no items"):
            wrong(square, 5)  # type: ignore[arg-type]


def test_what_a_pool_is_to_be_is_checked_at_once(cluster: LocalCluster) -> None:
    for workers in (0, True, "x", 10_001):
        with pytest.raises(ValueError, match=f"num_workers={workers!r}: give the number of workers, from 1 to 10,000"):
            WorkerPool(cluster, workers)  # type: ignore[arg-type]
    for wrong in ({"resources": 5}, {"environment": 5}):
        with pytest.raises(TypeError, match="=5: give a"):
            WorkerPool(cluster, 1, **wrong)  # type: ignore[arg-type]


def test_results_are_a_sequence_of_futures(pool: WorkerPool) -> None:
    result = pool.map(square, range(10))
    assert (len(result), result[3].result(PATIENCE_S), result[-1].result(PATIENCE_S)) == (10, 9, 81)
    assert result[3] is result[3]
    assert sorted(each.result() for each in concurrent.futures.as_completed(result[2:5])) == [4, 9, 16]


def test_an_item_is_cancelled_before_it_begins(cluster: LocalCluster, tmp_path: Path) -> None:
    with WorkerPool(cluster, 1) as pool:
        staying = pool.submit(stay, str(tmp_path))
        wait_until(lambda: pids_in(tmp_path), PATIENCE_S)
        result = pool.map(functools.partial(mark, str(tmp_path)), range(100, 110), chunksize=5)
        assert result[2].cancel()
        assert result[7].cancel()
        (tmp_path / "opened").touch()
        assert staying.result(PATIENCE_S)
        results = result.results(PATIENCE_S, return_exceptions=True)
        assert [place for place, each in enumerate(results) if isinstance(each, concurrent.futures.CancelledError)] == [
            2,
            7,
        ]
        assert not list(tmp_path.glob("102-*"))
        assert len(list(tmp_path.glob("10?-*"))) == 8


def test_unordered_results_of_endless_items(pool: WorkerPool) -> None:
    taken = 0

    def numbers() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    results = pool.imap_unordered(square, numbers())
    some = list(itertools.islice(results, 5_000))
    assert len(set(some)) == 5_000
    assert taken < 50_000
    results.close()
    assert list(results) == []
    wait_until(lambda: pool.status().queued == 0, PATIENCE_S)


def test_unordered_results_go_on_after_an_error(pool: WorkerPool) -> None:
    results = pool.imap_unordered(odd_only, [1, 2, threading.Lock(), 3, 4], chunksize=5)
    found: list[Any] = []
    while True:
        try:
            found.append(next(results))
        except StopIteration:
            break
        except (ValueError, TypeError) as error:
            found.append(type(error))
    assert sorted(found, key=str) == sorted([1, 3, ValueError, ValueError, TypeError], key=str)


def test_a_bar_is_shown_until_all_is_done(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert pool.map(square, range(30), progress=True).results(PATIENCE_S)[5] == 25
    assert len(list(pool.imap_unordered(square, range(20), progress=True))) == 20
    assert len(list(pool.imap_unordered(square, iter(range(7)), progress=True))) == 7  # of how many is not known
    assert pool.status().done == 57  # told by the loop, which is through with the bars by then
    shown = capfd.readouterr().err
    assert "30/30" in shown
    assert "20/20" in shown
    assert "7/?" in shown


# ---- more and fewer workers -----------------------------------------------------------------------------


def test_a_pool_grows_and_shrinks(cluster: LocalCluster, tmp_path: Path) -> None:
    with WorkerPool(cluster, 1) as pool:
        pool.wait_for_workers()
        staying = pool.submit(stay, str(tmp_path))
        wait_until(lambda: pids_in(tmp_path), PATIENCE_S)
        pool.resize(3)
        pool.wait_for_workers()
        more = [pool.submit(stay, str(tmp_path)) for _ in range(2)]
        wait_until(lambda: len(pids_in(tmp_path)) == 3, PATIENCE_S)
        assert pool.status() == PoolStatus(workers=3, wanted=3, queued=0, out=3, done=0, failed=0)
        pool.resize(1)
        later = pool.map(square, range(20))  # by the one that stays, when it has time
        assert pool.status().workers == 1
        (tmp_path / "opened").touch()
        assert len({each.result(PATIENCE_S) for each in [staying, *more]}) == 3  # those that left finished first
        assert later.results(PATIENCE_S) == [number * number for number in range(20)]
        wait_until(lambda: pool.size == 1, PATIENCE_S)
        pool.resize(2)
        wait_until(lambda: pool.size == 2, PATIENCE_S)
        assert pool.num_workers == 2
        with pytest.raises(ValueError, match="workers=0: give the number of workers, from 1 to 10,000"):
            pool.resize(0)


# ---- handles as arguments -------------------------------------------------------------------------------


class Named:
    def __init__(self) -> None:
        self.pid = os.getpid()

    def where(self) -> int:
        return self.pid


def ask(handle: ActorHandle[Named]) -> int:
    return handle.call().where()


def test_handles_are_arguments_of_tasks_and_jobs(cluster: LocalCluster, pool: WorkerPool) -> None:
    named = deploy(cluster, Named, name=unique_name("named"), replicas=2)
    for handle in (*(named.to(member) for member in named.members()), named.on("a key")):
        assert pool.submit(ask, handle).result(PATIENCE_S) == handle.call().where()
        job = cluster.launch(call(functools.partial(ask, handle)))
        assert cluster.wait(job, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    named.shutdown()


# ---- awaited --------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_pool_is_awaited(cluster: LocalCluster, tmp_path: Path) -> None:
    async with await AsyncCluster.connect(cluster.address) as awaited:
        async with AsyncWorkerPool(awaited, 2) as pool:
            await pool.wait_for_workers()
            assert pool.size == pool.num_workers == 2
            assert await pool.submit(square, 7) == 49
            with pytest.raises(ValueError, match="4"):
                await pool.submit(odd_only, 4)
            result = pool.map(square, range(500))
            assert await result.results(PATIENCE_S) == [number * number for number in range(500)]
            assert await result[3] == 9
            failed = await pool.map(odd_only, range(4), chunksize=4).results(return_exceptions=True)
            assert [type(each) for each in failed] == [ValueError, int, ValueError, int]
            assert sorted([each async for each in pool.imap_unordered(square, range(300))]) == [
                number * number for number in range(300)
            ]
            staying = pool.map(functools.partial(stay, str(tmp_path)), ["opened"])
            with pytest.raises(ActorTimeoutError, match=r"not all of 1 items are done after 0\.01 s"):
                await staying.results(0.01)
            assert (await pool.status()).out == 1
            (tmp_path / "opened").touch()
            await staying.results(PATIENCE_S)
            await pool.resize(1)
            assert pool.num_workers == 1
        with pytest.raises(RuntimeError, match="was shut down"):
            await pool.submit(square, 1)
        await pool.shutdown()
        with pytest.raises(TypeError, match="for a Cluster take WorkerPool"):
            AsyncWorkerPool(cluster, 1)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_unordered_results_are_awaited_after_an_error_and_closed(cluster: LocalCluster) -> None:
    async with await AsyncCluster.connect(cluster.address) as awaited, AsyncWorkerPool(awaited, 1) as pool:
        results = pool.imap_unordered(odd_only, itertools.count(), chunksize=2)
        found: list[Any] = []
        while len(found) < 6:
            try:
                found.append(await anext(results))
            except ValueError:
                found.append(None)
        assert found == [None, 1, None, 3, None, 5]
        results.close()
        assert [each async for each in results] == []


def test_a_pool_outlives_its_cluster_without_a_hang() -> None:
    with LocalCluster() as other:
        pool = WorkerPool(other, 1)
        executor = pool.executor()
        waiting = [executor.submit(time.sleep, 2 * PATIENCE_S) for _ in range(3)]
    for future in waiting:
        with pytest.raises(ClosedError):
            future.result(PATIENCE_S)
    pool.asynchronous.workers.error = None  # as when the loop ended before the workers' end was seen
    for _ in range(3):
        with pytest.raises(ClosedError):
            executor.submit(square, 3).result(PATIENCE_S)
    executor.shutdown()


def test_a_pool_of_a_cluster_object_that_was_closed_has_nothing_to_end(cluster: LocalCluster) -> None:
    with Cluster(cluster.address) as other:
        pool = WorkerPool(other, 1)
        assert pool.submit(square, 3).result(PATIENCE_S) == 9
    pool.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        _ = pool.submit(square, 3)
    end_workers_that_went_on(cluster, pool.name)


@pytest.mark.anyio
@pytest.mark.parametrize("wait", [True, False])
async def test_nor_has_an_awaited_one(cluster: LocalCluster, wait: bool) -> None:
    async with await AsyncCluster.connect(cluster.address) as other:
        pool = AsyncWorkerPool(other, 1)
        assert await pool.submit(square, 3) == 9
    await pool.shutdown(wait=wait)
    end_workers_that_went_on(cluster, pool.name)


def end_workers_that_went_on(cluster: LocalCluster, name: str) -> None:
    [job] = [job for job in cluster.list_jobs() if job.name == name]
    assert job.status is JobStatus.RUNNING
    cluster.terminate(job.job_id)
    cluster.wait(job.job_id, timeout=PATIENCE_S)


def test_a_task_that_met_with_what_was_not_run_has_run_itself(pool: WorkerPool, tmp_path: Path) -> None:
    """As does one that calls an actor that is being shut down: it must not be given out again and again."""

    def meet() -> None:
        (tmp_path / str(time.monotonic_ns())).touch()
        raise NotRunError("the actor was shut down; the call was not run")

    with pytest.raises(NotRunError, match="the actor was shut down"):
        pool.submit(meet).result(PATIENCE_S)
    assert len(list(tmp_path.iterdir())) == 1
