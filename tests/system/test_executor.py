"""What programs rely on of Python's executors, asked of Python's own and of a worker pool's alike."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION, Executor, Future, as_completed, wait
from pathlib import Path
from typing import Any

import pytest

from fluster import ActorDiedError, LocalCluster, WorkerPool
from fluster_bus.core.errors import ClosedError
from tests.waiting import wait_until

PATIENCE_S = 60.0
WORKERS = 3


@pytest.fixture(scope="module")
def pool(cluster: LocalCluster) -> Iterator[WorkerPool]:
    with WorkerPool(cluster, WORKERS) as pool:
        pool.wait_for_workers(timeout=PATIENCE_S)
        yield pool


@pytest.fixture(params=["python", "fluster"])
def executor(request: pytest.FixtureRequest, pool: WorkerPool) -> Iterator[Executor]:
    own = pool.executor() if request.param == "fluster" else concurrent.futures.ThreadPoolExecutor(WORKERS)
    with own as made:
        yield made


class Gate:
    """What tasks wait at, wherever they run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> None:
        (self.folder / "open").touch()

    def arrived(self) -> int:
        return len(list(self.folder.glob("in-*")))

    def wait_arrived(self, count: int = 1) -> None:
        wait_until(lambda: self.arrived() >= count, PATIENCE_S)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path)
    yield gate
    gate.open()


def stay(gate: Gate, name: object = "task") -> Any:
    (gate.folder / f"in-{name}").touch()
    wait_until((gate.folder / "open").exists, PATIENCE_S)
    return name


def stay_and_fail(gate: Gate) -> Any:
    stay(gate, "failing")
    raise LookupError("after the gate")


def multiply(x: int, y: int) -> Any:
    return x * y


def capture(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


class Thing:
    def __init__(self, _number: int = 0) -> None:
        pass

    def method(self) -> None:
        pass


# ---- submit ---------------------------------------------------------------------------------------------


def test_submit_gives_the_result(executor: Executor) -> None:
    assert executor.submit(pow, 2, 8).result(PATIENCE_S) == 256


def test_submit_passes_any_keyword_on(executor: Executor) -> None:
    assert executor.submit(multiply, 2, y=8).result(PATIENCE_S) == 16
    assert executor.submit(capture, 1, self=2, fn=3, function=4).result(PATIENCE_S) == (
        (1,),
        {"self": 2, "fn": 3, "function": 4},
    )


def test_the_function_is_no_keyword(executor: Executor) -> None:
    submit: Any = executor.submit
    with pytest.raises(TypeError):
        submit(fn=capture, arg=1)
    with pytest.raises(TypeError):
        submit()


def test_an_exception_is_raised_where_the_result_is_asked_for(executor: Executor) -> None:
    future = executor.submit(divmod, 1, 0)
    assert isinstance(future.exception(PATIENCE_S), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        future.result(PATIENCE_S)
    assert future.done()
    assert not future.cancel()


def test_a_result_is_waited_for_in_vain_and_again(executor: Executor, gate: Gate) -> None:
    future = executor.submit(stay, gate)
    for ask in (future.result, future.exception):
        with pytest.raises(TimeoutError):
            ask(0.02)
    assert not future.done()
    gate.open()
    assert future.result(PATIENCE_S) == "task"


def test_a_running_future_is_not_cancelled(executor: Executor, gate: Gate) -> None:
    future = executor.submit(stay, gate)
    gate.wait_arrived()
    assert future.running()
    assert not future.cancel()
    assert not future.cancelled()
    gate.open()
    assert future.result(PATIENCE_S) == "task"


def test_a_waiting_future_is_cancelled_and_never_runs(executor: Executor, gate: Gate) -> None:
    running = [executor.submit(stay, gate, number) for number in range(WORKERS)]
    gate.wait_arrived(WORKERS)
    waiting = executor.submit(stay, gate, "waiting")
    assert waiting.cancel()
    assert waiting.cancel()
    assert waiting.cancelled()
    assert waiting.done()
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(PATIENCE_S)
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.exception(PATIENCE_S)
    gate.open()
    wait(running, PATIENCE_S)
    assert executor.submit(multiply, 2, 3).result(PATIENCE_S) == 6
    assert gate.arrived() == WORKERS


def test_callbacks_are_called_once_whenever_they_are_added(executor: Executor, gate: Gate) -> None:
    called: list[tuple[str, Future[Any]]] = []
    arrived = threading.Event()
    future = executor.submit(stay, gate)
    future.add_done_callback(lambda done: called.append(("before", done)))
    future.add_done_callback(lambda _done: arrived.set())
    gate.open()
    assert arrived.wait(PATIENCE_S)
    future.add_done_callback(lambda done: called.append(("after", done)))
    assert called == [("before", future), ("after", future)]


def test_a_callback_that_fails_is_logged_and_harms_no_other(
    executor: Executor, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_done: Future[Any]) -> None:
        raise LookupError("of the callback")

    arrived = threading.Event()
    future = executor.submit(stay, gate)
    future.add_done_callback(fail)
    future.add_done_callback(lambda _done: arrived.set())
    gate.open()
    assert arrived.wait(PATIENCE_S)
    assert "exception calling callback" in caplog.text
    assert future.result(PATIENCE_S) == "task"


def test_a_callback_may_submit(executor: Executor) -> None:
    submitted: Future[Future[Any]] = Future()
    executor.submit(multiply, 2, 3).add_done_callback(
        lambda done: submitted.set_result(executor.submit(multiply, done.result(), 7))
    )
    assert submitted.result(PATIENCE_S).result(PATIENCE_S) == 42


def test_arguments_are_forgotten_once_it_is_done(executor: Executor) -> None:
    thing = Thing()
    gone = threading.Event()
    reference = weakref.ref(thing, lambda _reference: gone.set())
    executor.submit(thing.method)  # the future is dropped
    del thing
    assert gone.wait(PATIENCE_S)
    assert reference() is None


# ---- map ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunksize", [1, 3, 100])
def test_map_keeps_the_order(executor: Executor, chunksize: int) -> None:
    assert list(executor.map(pow, range(10), range(10), chunksize=chunksize)) == [each**each for each in range(10)]


def test_map_ends_with_the_shortest(executor: Executor) -> None:
    assert list(executor.map(multiply, [1, 2, 3], itertools.repeat(5))) == [5, 10, 15]
    assert list(executor.map(multiply, [1, 2, 3], [5])) == [5]
    assert list(executor.map(multiply, [], [5])) == []
    assert list(executor.map(multiply)) == []


def test_map_raises_in_its_place(executor: Executor) -> None:
    results = executor.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert [next(results), next(results)] == [(0, 1), (0, 1)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_map_runs_before_it_is_looked_at(executor: Executor, gate: Gate) -> None:
    results = executor.map(functools.partial(stay, gate), range(2))
    gate.wait_arrived(2)
    gate.open()
    assert list(results) == [0, 1]


def test_map_s_time_begins_when_it_is_called(executor: Executor, gate: Gate) -> None:
    results = executor.map(functools.partial(stay, gate), range(2), timeout=0.05)
    with pytest.raises(TimeoutError):
        next(results)


def test_map_has_results_that_are_in_time(executor: Executor) -> None:
    assert list(executor.map(multiply, [1, 2], [3, 4], timeout=PATIENCE_S)) == [3, 8]


def test_closing_a_map_takes_the_others_back(executor: Executor, gate: Gate) -> None:
    results = executor.map(functools.partial(stay, gate), range(20))
    gate.wait_arrived(WORKERS)
    gate.open()
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]  # it is a generator, with Python's own too
    executor.shutdown()
    assert gate.arrived() <= 20


@pytest.mark.parametrize("chunksize", [1, 4])
def test_map_forgets_what_it_has_handed_out(executor: Executor, chunksize: int) -> None:
    for thing in executor.map(Thing, range(10), chunksize=chunksize):
        reference = weakref.ref(thing)
        del thing
        assert reference() is None


# ---- wait and as_completed ------------------------------------------------------------------------------


def _settled(result: int | Exception) -> Future[Any]:
    future = Future[Any]()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def _cancelled(*, told: bool) -> Future[Any]:
    future = Future[Any]()
    future.cancel()
    if told:
        future.set_running_or_notify_cancel()
    return future


def test_wait_for_the_first(executor: Executor, gate: Gate) -> None:
    soon, later, unheard_of = executor.submit(multiply, 21, 2), executor.submit(stay, gate), _cancelled(told=False)
    found = wait([unheard_of, soon, later], PATIENCE_S, FIRST_COMPLETED)
    assert (found.done, found.not_done) == ({soon}, {unheard_of, later})


def test_wait_for_the_first_where_some_are_over(executor: Executor, gate: Gate) -> None:
    over = {_cancelled(told=True), _settled(42)}
    later = executor.submit(stay, gate)
    found = wait([*over, later], PATIENCE_S, FIRST_COMPLETED)
    assert (found.done, found.not_done) == (over, {later})


def test_wait_for_the_first_exception(executor: Executor, gate: Gate, tmp_path: Path) -> None:
    other = Gate(tmp_path / "other")
    other.folder.mkdir()
    soon, failing, later = (
        executor.submit(multiply, 2, 21),
        executor.submit(stay_and_fail, gate),
        executor.submit(stay, other),
    )
    soon.add_done_callback(lambda _done: gate.open())
    found = wait([soon, failing, later], PATIENCE_S, FIRST_EXCEPTION)
    other.open()
    assert (found.done, found.not_done) == ({soon, failing}, {later})


@pytest.mark.parametrize("over", [[], [OSError()], [42]], ids=["none", "failed", "done"])
def test_wait_for_the_first_exception_where_some_are_over(
    executor: Executor, gate: Gate, over: list[int | Exception]
) -> None:
    failing, later, settled = executor.submit(divmod, 21, 0), executor.submit(stay, gate), [*map(_settled, over)]
    wait([failing], PATIENCE_S)
    found = wait([*settled, failing, later], PATIENCE_S, FIRST_EXCEPTION)
    assert (found.done, found.not_done) == ({failing, *settled}, {later})


def test_wait_for_all_also_of_one_that_is_named_twice(executor: Executor) -> None:
    futures = [executor.submit(divmod, 2, 0), executor.submit(multiply, 2, 21), _settled(1), _cancelled(told=True)]
    found = wait([*futures, futures[1]], PATIENCE_S, ALL_COMPLETED)
    assert (found.done, found.not_done) == (set(futures), set())


def test_wait_in_vain(executor: Executor, gate: Gate) -> None:
    over, later = {_settled(1), _cancelled(told=True)}, executor.submit(stay, gate)
    found = wait([*over, later], 0.02, ALL_COMPLETED)
    assert (found.done, found.not_done) == (over, {later})


def test_many_that_end_while_somebody_waits(executor: Executor) -> None:
    futures = {executor.submit(multiply, number, 2) for number in range(200)}
    assert not wait(futures, PATIENCE_S).not_done


def test_as_completed_has_each_once(executor: Executor) -> None:
    futures = [executor.submit(multiply, 2, 21), executor.submit(multiply, 7, 6), _settled(1), _cancelled(told=True)]
    assert sorted(map(id, as_completed([*futures, *futures], PATIENCE_S))) == sorted(map(id, futures))


@pytest.mark.parametrize("timeout", [0, 0.02])
def test_as_completed_in_vain(executor: Executor, gate: Gate, timeout: float) -> None:
    over = {_settled(1), _cancelled(told=True)}
    completed = as_completed({*over, executor.submit(stay, gate)}, timeout)
    assert {next(completed), next(completed)} == over
    with pytest.raises(TimeoutError, match=r"1 \(of 3\) futures unfinished"):
        next(completed)


def test_as_completed_has_the_first_first(executor: Executor, gate: Gate) -> None:
    later, soon = executor.submit(stay, gate), executor.submit(multiply, 1, 1)
    completed = as_completed([later, soon], PATIENCE_S)
    assert next(completed) is soon
    gate.open()
    assert next(completed) is later


# ---- shutdown -------------------------------------------------------------------------------------------


def test_nothing_is_taken_after_the_end(executor: Executor) -> None:
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(pow, 2, 5)
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        list(executor.map(abs, [1]))


def test_the_end_waits_for_all(executor: Executor) -> None:
    results = executor.map(multiply, range(50), range(50))
    executor.shutdown()
    assert list(results) == [number * number for number in range(50)]


def test_the_end_does_not_wait_when_told_so(executor: Executor, gate: Gate) -> None:
    futures = [executor.submit(stay, gate, number) for number in range(2 * WORKERS)]
    executor.shutdown(wait=False)
    assert not any(future.done() for future in futures)
    gate.open()
    assert [future.result(PATIENCE_S) for future in futures] == list(range(2 * WORKERS))


def test_what_has_not_begun_is_cancelled_at_the_end_and_what_has_is_finished(executor: Executor) -> None:
    futures = [executor.submit(time.sleep, 0.02) for _ in range(50)]
    executor.shutdown(cancel_futures=True)
    cancelled = [future for future in futures if future.cancelled()]
    others = [future for future in futures if not future.cancelled()]
    assert len(cancelled) > 20
    assert others
    assert all(future.done() and future.exception() is None for future in others)


def test_the_end_comes_also_when_all_was_cancelled(executor: Executor) -> None:
    for _ in range(10):
        executor.submit(int).cancel()
    executor.shutdown()


def test_the_end_of_a_block_waits_also_after_an_exception(executor: Executor) -> None:
    futures: list[Future[Any]] = []

    def submit_and_fail() -> None:
        with executor:
            futures.append(executor.submit(time.sleep, 0.05))
            raise LookupError("in the block")

    with pytest.raises(LookupError):
        submit_and_fail()
    assert futures[0].done()


# ---- on an event loop -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_loop_runs_functions_in_it(executor: Executor) -> None:
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(executor, multiply, 12, 12) == 144
    results = await asyncio.gather(*(loop.run_in_executor(executor, multiply, each, each) for each in range(50)))
    assert results == [each * each for each in range(50)]
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(executor, divmod, 1, 0)


@pytest.mark.anyio
async def test_who_waits_on_a_loop_may_give_up(executor: Executor, gate: Gate) -> None:
    running = asyncio.get_running_loop().run_in_executor(executor, stay, gate)
    await asyncio.to_thread(gate.wait_arrived)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await running
    gate.open()
    assert await asyncio.get_running_loop().run_in_executor(executor, multiply, 2, 2) == 4


# ---- what only a pool's executor does -------------------------------------------------------------------


def test_the_pool_outlives_its_executors(pool: WorkerPool) -> None:
    with pool.executor() as first, pool.executor() as second:
        later = second.submit(multiply, 3, 3)
        first.shutdown(cancel_futures=True)
        assert later.result(PATIENCE_S) == 9  # the other's are left alone
        assert second.submit(multiply, 2, 3).result(PATIENCE_S) == 6
    assert pool.submit(multiply, 3, 3).result(PATIENCE_S) == 9


def test_what_cannot_be_pickled_is_told_at_once(pool: WorkerPool, gate: Gate) -> None:
    with pool.executor() as executor:
        with pytest.raises(TypeError, match="cannot be pickled"):
            executor.submit(multiply, threading.Lock(), 2)  # type: ignore[arg-type, unused-awaitable]
        blocking = [executor.submit(stay, gate, number) for number in range(WORKERS)]
        gate.wait_arrived(WORKERS)
        with pytest.raises(TypeError, match="cannot be pickled"):
            executor.map(functools.partial(capture, gate), [1, threading.Lock()])
        gate.open()
        assert len(blocking) == WORKERS


def test_bad_arguments_are_told_at_once(pool: WorkerPool) -> None:
    with pool.executor() as executor:
        with pytest.raises(ValueError, match="chunksize=0: give the number of items"):
            executor.map(abs, [1], chunksize=0)
        with pytest.raises(TypeError, match="buffersize"):
            executor.map(abs, [1], buffersize=2)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="cannot be called"):
            executor.submit(3)  # type: ignore[arg-type, unused-awaitable]


def test_a_callback_may_end_the_executor(pool: WorkerPool, gate: Gate) -> None:
    """It is called on the loop that carries the calls, which must not wait for itself."""
    executor = pool.executor()
    ended = threading.Event()

    def end(_done: Future[Any]) -> None:
        executor.shutdown(wait=False, cancel_futures=True)
        ended.set()

    first = executor.submit(stay, gate)
    first.add_done_callback(end)
    gate.open()
    assert ended.wait(PATIENCE_S)


def test_an_executor_of_a_pool_that_ended(cluster: LocalCluster, gate: Gate) -> None:
    pool = WorkerPool(cluster, 1)
    executor = pool.executor()
    begun, waiting = executor.submit(stay, gate), executor.submit(multiply, 1, 1)
    gate.wait_arrived()
    pool.shutdown(wait=False)
    with pytest.raises(ActorDiedError):
        begun.result(PATIENCE_S)
    assert waiting.cancelled()
    executor.shutdown(cancel_futures=True)
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(multiply, 1, 1)  # type: ignore[unused-awaitable]
    with pytest.raises(RuntimeError, match="was shut down"):
        pool.executor()


def test_an_executor_outlives_its_cluster_without_a_hang() -> None:
    with LocalCluster() as cluster:
        pool = WorkerPool(cluster, 1)
        executor = pool.executor()
        assert executor.submit(multiply, 2, 2).result(PATIENCE_S) == 4
    with pytest.raises(ClosedError):
        executor.submit(multiply, 1, 1)  # type: ignore[unused-awaitable]
    executor.shutdown(cancel_futures=True)
