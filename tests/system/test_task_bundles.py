"""Single tasks of a worker pool that travel together: each is answered, fails and is lost by itself."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster import ActorDiedError, ActorTimeoutError, LocalCluster, PoisonedTaskError, WorkerPool, create_environment
from fluster.actors import ActorFuture
from fluster.worker_pool.dispatch import MAX_ITEMS
from fluster_bus.payloads import arenas

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        yield cluster


@pytest.fixture
def pool(cluster: LocalCluster) -> Iterator[WorkerPool]:
    with WorkerPool(cluster, 1) as pool:
        yield pool


def submit_together(pool: WorkerPool, function: Callable[[Any], Any], items: list[Any]) -> list[ActorFuture[Any]]:
    """Submit one task for each item, before the first of them is given to a worker; the pool expects short ones."""

    async def submit() -> list[ActorFuture[Any]]:
        pool.asynchronous.workers.pace.observe(MAX_ITEMS, 0.0)
        return [pool.submit(function, item) for item in items]

    return pool.portal.run(submit)


def square(number: int) -> int:
    return number * number


def test_a_task_is_answered_while_a_later_one_of_its_bundle_runs(pool: WorkerPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def pass_gate(number: int) -> int:
        if number == 10:
            gate.read_text()  # until the test writes
        return number

    futures = submit_together(pool, pass_gate, list(range(40)))
    assert [future.result(PATIENCE_S) for future in futures[:10]] == list(range(10))
    assert not any(future.done() for future in futures[10:])
    gate.write_text("open")
    assert [future.result(PATIENCE_S) for future in futures[10:]] == list(range(10, 40))
    pool.shutdown()
    assert pool.status().done == 40


def test_what_a_task_of_a_bundle_raises_is_its_own(pool: WorkerPool) -> None:
    def odd_only(number: int) -> int:
        if number % 2 == 0:
            raise ValueError(number)
        return number

    futures = submit_together(pool, odd_only, list(range(100)))
    assert [future.exception(PATIENCE_S) is None for future in futures] == [bool(number % 2) for number in range(100)]
    error = futures[4].exception(PATIENCE_S)
    assert isinstance(error, ValueError)
    assert error.args == (4,)
    assert "odd_only" in str(error.__notes__)
    assert "run_bundle" not in str(error.__notes__)
    assert [future.result(PATIENCE_S) for future in futures[1::2]] == list(range(1, 100, 2))
    status = pool.status()
    assert (status.done, status.failed, status.out, status.queued) == (50, 50, 0, 0)


def test_a_result_that_cannot_be_pickled_fails_alone(pool: WorkerPool) -> None:
    def lock_for(number: int) -> Any:
        return threading.Lock() if number in (3, 4, 11) else number

    futures = submit_together(pool, lock_for, list(range(30)))
    failed = [number for number, future in enumerate(futures) if future.exception(PATIENCE_S) is not None]
    assert failed == [3, 4, 11]
    with pytest.raises(TypeError, match="cannot be pickled"):
        futures[3].result(PATIENCE_S)


def test_a_task_is_cancelled_until_its_bundle_is_sent(pool: WorkerPool) -> None:
    async def submit() -> list[ActorFuture[int]]:
        pool.asynchronous.workers.pace.observe(MAX_ITEMS, 0.0)
        futures = [pool.submit(square, number) for number in range(20)]
        assert futures[7].cancel()
        return futures

    futures = pool.portal.run(submit)
    assert [future.result(PATIENCE_S) for future in futures if not future.cancelled()] == [
        number * number for number in range(20) if number != 7
    ]


@pytest.mark.parametrize("shares_memory", [True, False])
def test_large_results_of_a_bundle(cluster: LocalCluster, *, shares_memory: bool) -> None:
    environment = None if shares_memory else create_environment({"FLUSTER_ARENA_BYTES": "0"})
    with WorkerPool(cluster, 1, environment=environment) as pool:
        sizes = [10, 100_000, 3 << 20, 3 << 20, 5, 1 << 20, 100_000, 1, *range(20)]
        futures = submit_together(pool, bytes, sizes)
        assert [len(future.result(PATIENCE_S)) for future in futures] == sizes


def test_answers_of_a_bundle_are_taken_as_far_as_there_is_room(cluster: LocalCluster) -> None:
    environment = create_environment({"FLUSTER_ARENA_BYTES": "0"})
    with WorkerPool(cluster, 1, environment=environment) as pool:
        futures = submit_together(pool, bytes, [500_000] * 60)  # several windows of them
        assert {len(future.result(PATIENCE_S)) for future in futures} == {500_000}


# ---- lost workers ---------------------------------------------------------------------------------------


def test_what_is_left_of_a_bundle_is_done_by_another(cluster: LocalCluster, tmp_path: Path) -> None:
    def die_once(number: int) -> int:
        ran = tmp_path / str(number)
        ran.write_text(str(int(ran.read_text()) + 1) if ran.exists() else "1")
        if number == 10 and ran.read_text() == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with WorkerPool(cluster, 2) as pool:
        futures = submit_together(pool, die_once, list(range(60)))
        assert [future.result(PATIENCE_S) for future in futures] == list(range(60))
    assert int((tmp_path / "10").read_text()) == 2
    assert all(int((tmp_path / str(number)).read_text()) <= 2 for number in range(60))


def test_of_a_bundle_only_what_kills_workers_is_set_aside(cluster: LocalCluster) -> None:
    def poisonous(number: int) -> int:
        if number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with WorkerPool(cluster, 2, task_retries=1) as pool:
        futures = submit_together(pool, poisonous, list(range(60)))
        with pytest.raises(PoisonedTaskError, match="the task was given to 2 workers"):
            futures[7].result(PATIENCE_S)
        assert [future.result(PATIENCE_S) for future in futures[:7] + futures[8:]] == [*range(7), *range(8, 60)]


def end_process(pid: int) -> None:
    """Return when it has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([descriptor], [], [], PATIENCE_S)[0]
    finally:
        os.close(descriptor)


def submit_one(pool: WorkerPool, function: Callable[[Any], Any], item: Any) -> Any:
    return pool.submit(function, item).result(PATIENCE_S)


def submit_bundle(pool: WorkerPool, function: Callable[[Any], Any], item: Any) -> Any:
    futures = submit_together(pool, function, [0, 1, item, *range(2, 20)])
    return [future.result(PATIENCE_S) for future in futures][2]


def map_items(pool: WorkerPool, function: Callable[[Any], Any], item: Any) -> Any:
    return pool.map(function, [0, 1, item, 2, 3], chunksize=5).results(timeout=PATIENCE_S)[2]


@pytest.mark.parametrize("retries", [3, 0])
@pytest.mark.parametrize("give", [submit_one, submit_bundle, map_items])
def test_a_large_result_that_went_with_its_worker_is_made_again(
    cluster: LocalCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    give: Callable[[WorkerPool, Callable[[Any], Any], Any], Any],
    retries: int,
) -> None:
    ran = tmp_path / "ran"
    held = arenas.held

    def large_at_100_000(size: int) -> bytes:
        if size == 100_000:
            with ran.open("a") as file:
                file.write(f"{os.getpid()}\n")
        return bytes(size)

    def held_too_late(reference: bytes) -> bytes:
        pids = ran.read_text().split()
        if len(pids) == 1:
            end_process(int(pids[0]))
        return held(reference)

    with WorkerPool(cluster, 1, task_retries=retries) as pool:
        pool.wait_for_workers()
        monkeypatch.setattr(arenas, "held", held_too_late)
        if retries:
            assert len(give(pool, large_at_100_000, 100_000)) == 100_000
        else:
            with pytest.raises(ActorDiedError, match="ended before its answer was read"):
                give(pool, large_at_100_000, 100_000)
    assert len(ran.read_text().split()) == (2 if retries else 1)


def test_the_limit_is_of_each_task(cluster: LocalCluster) -> None:
    def slow_at_7(number: int) -> int:
        threading.Event().wait(60 if number == 7 else 0.01)
        return number

    with WorkerPool(cluster, 1, task_timeout=3) as pool:
        futures = submit_together(pool, slow_at_7, list(range(40)))
        with pytest.raises(ActorTimeoutError, match=r"has run for 3 s"):
            futures[7].result(PATIENCE_S)
        assert [future.result(PATIENCE_S) for future in futures[:7] + futures[8:]] == [*range(7), *range(8, 40)]


def test_few_tasks_may_wait_for_each_other(cluster: LocalCluster, tmp_path: Path) -> None:
    def meet(number: int) -> int:
        gate = tmp_path / str(number // 2)
        if number % 2:
            gate.write_text("open")
        else:
            gate.read_text()  # until its neighbour writes
        return number

    for gate in range(4):
        os.mkfifo(tmp_path / str(gate))
    with WorkerPool(cluster, 2) as pool:
        pool.wait_for_workers()
        futures = submit_together(pool, meet, list(range(8)))
        assert [future.result(PATIENCE_S) for future in futures] == list(range(8))


def test_tasks_in_bundles_do_not_wait_for_a_slow_worker(cluster: LocalCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def pass_gate(number: int) -> int:
        if number == 0:
            gate.read_text()
        return number

    with WorkerPool(cluster, 2) as pool:
        pool.wait_for_workers()
        held = pool.submit(pass_gate, 0)
        for number in range(1, 200):  # as soon as it is known that the first takes long, no other stands behind it
            if pool.submit(pass_gate, number).result(PATIENCE_S) != number:
                pytest.fail(f"the task of {number} gave another's result")
        assert not held.done()
        gate.write_text("open")
        assert held.result(PATIENCE_S) == 0
