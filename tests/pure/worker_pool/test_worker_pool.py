from __future__ import annotations

import concurrent.futures
import pickle
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from fluster.actors import ActorFuture
from fluster.actors.protocol.failures import decode_failure
from fluster.errors import ConnectionLostError
from fluster.worker_pool.dispatch import AHEAD_S, CHUNK_S, MAX_AHEAD, MAX_ITEMS, Dispatch, Loss, Pace
from fluster.worker_pool.runner import TaskRunner
from fluster.worker_pool.tasks import Bundle, Task, TaskQueue
from fluster.worker_pool.tickets import BundleTicket
from fluster.worker_pool.work import Batch, Block, Outcome, Slice, blocks_of
from fluster_bus.core import codec
from fluster_bus.payloads import payloads


class World:
    """A pool without a bus: workers are names, time is a number."""

    def __init__(self, *, task_retries: int = 3, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.dispatch = Dispatch(task_retries=task_retries)
        self.workers: list[str] = []
        self.out: dict[str, list[Any]] = {}
        self.now = 0.0
        self.done: list[Any] = []
        self.given_up: list[Any] = []
        self.pace = Pace(0.98)
        self.cancelled = 0
        self.queue = TaskQueue(self.pace, self._count_cancelled)

    def _count_cancelled(self) -> None:
        self.cancelled += 1

    def task(self, *, size: int = 0) -> Task:
        one = Task((b"", bytes(size)), ActorFuture("f"), self.pace)
        if self.dispatch.last is not self.queue:
            self.queue = TaskQueue(self.pace, self._count_cancelled)
            self.dispatch.add(self.queue)
        self.queue.add(one)
        return one

    def join(self, *workers: str) -> None:
        self.workers += workers
        self.dispatch.on_workers(self.workers)

    def assign(self) -> dict[str, list[Any]]:
        given: dict[str, list[Any]] = {}
        for worker, unit in self.dispatch.assign(self.now):
            assert worker in self.workers
            given.setdefault(worker, []).append(unit)
            self.out.setdefault(worker, []).append(unit)
        self.dispatch.sanity_check()
        return given

    def answer(self, worker: str, seconds: float = 0.0) -> None:
        self.now += seconds
        unit = self.out[worker].pop(0)
        ran = unit.size
        if isinstance(unit, Bundle):
            self.answer_some(unit, ran)
        else:
            self.done.append(unit)
        self.dispatch.on_answered(unit, self.now, ran)

    def answer_some(self, bundle: Bundle, count: int) -> None:
        self.done += [bundle.tasks.popleft() for _ in range(count)]

    def die(self, worker: str, *, answers: bool = True) -> None:
        self.workers.remove(worker)
        for unit in self.out.pop(worker, []):
            if isinstance(unit, Bundle) and answers:
                self.answer_some(unit, self.random.randrange(unit.size))
            if not self.dispatch.on_lost(unit, Loss.DEATH):
                self.given_up += unit.parts() if isinstance(unit, Bundle) else [unit]
        self.dispatch.on_workers(self.workers)


@pytest.fixture
def world() -> World:
    return World()


# ---- far workers ----------------------------------------------------------------------------------------


def answered(*units: tuple[float, float, float | None]) -> float:
    """What an item is expected to take after units of one, each (given at, answered at, seconds that its worker tells)."""
    dispatch, pace = Dispatch(task_retries=0), Pace(0.0)
    dispatch.on_workers(["w"])
    for given_at, answered_at, ran_s in units:
        queue = TaskQueue(pace, lambda: None)
        queue.add(Task((b"", b""), ActorFuture("f"), pace))
        dispatch.add(queue)
        ((_worker, unit),) = dispatch.assign(given_at)
        dispatch.on_answered(unit, answered_at, 1, ran_s)
    return pace.expected_s(1)


def test_the_time_in_which_a_slice_travels_is_no_work() -> None:
    assert answered((10.0, 10.2, 0.05)) == pytest.approx(0.05 + 0.005), "some milliseconds are what the call costs"
    assert answered((10.0, 10.2, 0.05), (20.0, 20.3, 0.05)) == pytest.approx(0.15 + 0.005), "it took longer this time"
    assert answered((10.0, 12.05, 0.05)) == pytest.approx(1.055), "of seconds most count: it is held up, not far"


def test_of_a_worker_that_does_not_tell_all_time_counts() -> None:
    assert answered((10.0, 10.2, None)) == pytest.approx(0.2)
    assert answered((10.0, 10.2, 0.05), (20.0, 20.2, None)) == pytest.approx(0.05 + 0.005)


# ---- pace -----------------------------------------------------------------------------------------------


def test_chunks_grow_until_they_take_long_enough() -> None:
    pace = Pace(0.7)
    sizes = []
    for _ in range(20):
        sizes.append(pace.chunk())
        pace.observe(sizes[-1], sizes[-1] * CHUNK_S / 100)
    assert sizes[:6] == [1, 2, 4, 8, 16, 32]
    assert sizes[-1] in (99, 100)


def test_chunks_are_bounded_however_short_the_items_are() -> None:
    pace = Pace(0.7)
    for _ in range(20):
        pace.observe(pace.chunk(), 0.0)
    assert pace.chunk() == MAX_ITEMS


def test_chunks_shrink_when_items_get_slow() -> None:
    pace = Pace(0.7)
    pace.observe(1_000, 0.001)
    for _ in range(15):
        pace.observe(1, 1.0)
    assert pace.chunk() == 1


# ---- who gets what --------------------------------------------------------------------------------------


def test_each_gets_one_task_until_it_is_known_how_long_they_take(world: World) -> None:
    tasks = [world.task() for _ in range(5)]
    world.join("a", "b")
    assert world.assign() == {"a": [tasks[0]], "b": [tasks[1]]}
    assert world.assign() == {}


def test_long_tasks_go_to_who_is_idle(world: World) -> None:
    for _ in range(9):
        world.task()
    world.join("a", "b")
    world.assign()
    world.answer("a", seconds=1.0)
    assert [len(units) for units in world.assign().values()] == [1]
    assert len(world.out["a"]) == len(world.out["b"]) == 1


def test_of_short_tasks_enough_are_on_their_way(world: World) -> None:
    for _ in range(400):
        world.task()
    world.join("a")
    world.assign()
    world.answer("a", seconds=AHEAD_S / 20)
    for _ in range(6):
        world.assign()
        assert len(world.out["a"]) == 2, "one to run while the answer to the other travels, also while they grow"
        world.answer("a", seconds=AHEAD_S / 20 * world.out["a"][0].size)
    world.assign()
    assert sum(unit.size for unit in world.out["a"]) in (19, 20)
    assert world.assign() == {}


def test_no_worker_gets_more_than_it_can_keep(world: World) -> None:
    world.join("a")
    world.pace.observe(1, 0.0)
    for _ in range(2 * MAX_AHEAD):
        world.task()
        world.assign()
    assert len(world.out["a"]) == MAX_AHEAD


def test_short_tasks_travel_together(world: World) -> None:
    tasks = [world.task() for _ in range(100)]
    world.join("a", "b")
    world.pace.observe(1_000, 0.0)
    given = world.assign()
    assert [unit.size for unit in given["a"]][:3] == [25, 14, 8]  # each worker has something to do towards the end
    assert sum(unit.size for units in given.values() for unit in units) == 100
    firsts = [unit.tasks[0] if isinstance(unit, Bundle) else unit for units in given.values() for unit in units]
    assert tasks[0] in firsts


@pytest.mark.parametrize(("count", "largest"), [(31, 1), (32, 8)])
def test_few_tasks_do_not_share_a_worker_that_could_wait_for_each_other(world: World, count: int, largest: int) -> None:
    for _ in range(count):
        world.task()
    world.join("a", "b")
    world.pace.observe(1_000, 0.0)
    assert max(unit.size for units in world.assign().values() for unit in units) == largest


def test_a_bundle_is_no_larger_than_a_message(world: World) -> None:
    for size in (100_000, 20_000, 20_000, 500_000, 10):
        world.task(size=size)
    world.join("a")
    world.pace.observe(1_000, 0.0)
    queue, sizes = world.queue, []
    while queue.items:
        unit = queue.take(10)
        assert unit is not None
        sizes.append(unit.size)
    assert sizes == [2, 1, 1, 1]


def test_workers_are_supplied_when_each_has_something_to_go_on_with(world: World) -> None:
    assert not world.dispatch.is_supplied
    world.join("a", "b")
    world.pace.observe(1, 0.0)
    supplied = []
    for _ in range(5):
        world.task()
        world.assign()
        supplied.append(world.dispatch.is_supplied)
    assert supplied == [False, False, False, True, True]
    world.join("c")
    assert not world.dispatch.is_supplied
    world.die("c")
    assert world.dispatch.is_supplied
    world.answer("b")
    assert not world.dispatch.is_supplied


def test_what_waits_in_a_queue_is_cancelled_or_failed_once(world: World) -> None:
    first, second, third = (world.task() for _ in range(3))
    first.future.cancel()
    assert world.queue.fail(ValueError("late")) == 2
    assert world.cancelled == 1
    assert isinstance(second.future.exception(0), ValueError)
    fourth = world.task()
    world.queue.cancel()
    assert fourth.future.cancelled()
    assert (world.queue.items, world.cancelled) == (0, 2)
    assert third.future.done()


def test_a_cancelled_task_is_passed_over(world: World) -> None:
    cancelled, wanted = world.task(), world.task()
    assert cancelled.future.cancel()
    world.join("a")
    assert world.assign() == {"a": [wanted]}
    assert concurrent.futures.wait([cancelled.future], 0).done


# ---- what is lost ---------------------------------------------------------------------------------------


class Owner:
    """Hears what becomes of a bundle."""

    def __init__(self) -> None:
        self.answered: list[tuple[Task, bytes]] = []
        self.errors: list[BaseException] = []

    def on_result(self, task: Task, item: bytes) -> None:
        self.answered.append((task, item))

    def on_answered(self, worker: str, unit: Bundle, ok: bool, payload: bytes) -> None:
        raise AssertionError(f"{unit} was lost")

    def on_error(self, worker: str, unit: Bundle, error: BaseException) -> None:
        self.errors.append(error)


def test_what_comes_late_for_a_bundle_that_was_lost_concerns_nobody(world: World) -> None:
    owner = Owner()
    tasks = [world.task() for _ in range(10)]
    bundle = Bundle(tasks, world.pace)
    lost = BundleTicket(owner, "a", bundle, owner.on_result)
    assert lost.take(0, [b"0", b"1"])
    assert not lost.take(3, [b"3"])  # one was lost on its way
    again = BundleTicket(owner, "b", bundle, owner.on_result)
    assert not lost.take(4, [b"4"])
    assert not lost.take(0, [b"0"])
    assert again.take(0, [b"2"])
    assert owner.answered == [(tasks[0], b"0"), (tasks[1], b"1"), (tasks[2], b"2")]
    assert [type(error) for error in owner.errors] == [ConnectionLostError]


def test_a_ticket_that_is_over_keeps_nothing_of_its_call(world: World) -> None:
    """Not until garbage is collected: a call has what it carried."""
    owner = Owner()
    ticket = BundleTicket(owner, "a", Bundle([world.task()], world.pace), owner.on_result)

    def tell_read() -> object:
        return ticket  # as a call has it

    kept = weakref.ref(tell_read)
    ticket.on_sent(tell_read)
    del tell_read
    assert kept() is not None
    ticket.set_exception(ConnectionLostError("lost"))
    assert kept() is None


@pytest.mark.parametrize("sizes", [[1] * 4, [8] + [1] * 8])
def test_what_was_with_a_dead_worker_is_tried_alone(world: World, sizes: list[int]) -> None:
    tasks = [world.task() for _ in range(sum(sizes))]
    world.join("a")
    world.pace.observe(1_000, 0.0)
    assert [unit.size for unit in world.assign()["a"]] == sizes
    world.die("a", answers=False)
    later = world.task()
    world.join("b", "c")
    for first, second in zip(tasks[::2], tasks[1::2], strict=True):
        assert world.assign() == {"b": [first], "c": [second]}
        world.answer("b")
        world.answer("c")
    assert world.assign() == {"b": [later]}


def test_what_kills_all_its_workers_is_given_up_and_nothing_else(world: World) -> None:
    world.pace.observe(1_000, 0.0)
    poison, *others = [world.task() for _ in range(30)]
    for number in range(50):
        worker = f"w{number}"
        world.join(worker)
        world.assign()
        while world.out.get(worker) and poison not in world.out[worker][0].parts():
            world.answer(worker)
            world.assign()
        if not world.out.get(worker):
            break
        world.die(worker, answers=False)
    assert world.given_up == [poison]
    assert poison.deaths == 4
    assert set(world.done) == set(others)


def test_suspects_wait_for_a_worker_of_their_own_and_hold_up_all_others_until_then(world: World) -> None:
    world.pace.observe(100, 100 * AHEAD_S / 20)
    world.join("a", "b")
    suspect = world.task()
    world.assign()
    (with_it,) = world.out
    for _ in range(60):
        world.task()
    world.assign()
    other = "b" if with_it == "a" else "a"
    world.die(with_it)
    while world.out[other]:
        assert world.assign() == {}, "else the suspect would wait as long as there is other work"
        world.answer(other, seconds=AHEAD_S / 20)
    assert [unit is suspect for unit in world.assign()[other][:1]] == [True]
    assert world.assign() == {}, "it is alone there"


def test_it_is_known_what_waits_what_is_out_and_who_is_supplied(world: World) -> None:
    assert (world.dispatch.waiting, world.dispatch.outstanding("a"), world.dispatch.is_supplied) == (0, 0, False)
    world.pace.observe(100, 100 * AHEAD_S / 20)
    world.join("a")
    for _ in range(60):
        world.task()
    assert world.dispatch.waiting == 60
    given = world.assign()["a"]
    assert world.dispatch.outstanding("a") == len(given) > 1
    assert world.dispatch.out + world.dispatch.waiting == 60
    assert world.dispatch.is_supplied
    world.dispatch.on_unfinished(given[0])
    assert world.dispatch.waiting == 60 - world.dispatch.out + given[0].size


def test_what_a_worker_answers_that_takes_no_more_work_supplies_nobody(world: World) -> None:
    world.pace.observe(100, 100 * AHEAD_S / 20)
    world.join("a", "b")
    for _ in range(60):
        world.task()
    world.assign()
    assert world.dispatch.is_supplied
    world.workers.remove("a")
    world.dispatch.on_workers(world.workers)
    while world.out["a"]:
        world.answer("a")
        world.dispatch.sanity_check()
    assert world.dispatch.is_supplied, "the other has as much as before"


def test_a_lost_connection_blames_nobody(world: World) -> None:
    world.pace.observe(1_000, 0.0)
    tasks = [world.task() for _ in range(16)]
    world.join("a")
    world.assign()
    lost = world.out.pop("a")
    assert lost[0].size == 8
    for unit in lost:
        assert world.dispatch.on_lost(unit, Loss.CONNECTION)
    assert world.assign() == {"a": lost}
    assert [task for unit in lost for task in unit.parts()] == tasks
    assert {unit.deaths for unit in lost} == {0}


def test_what_was_never_run_is_not_charged(world: World) -> None:
    task = world.task()
    world.join("a")
    for _ in range(20):
        assert world.assign() == {"a": [task]}
        world.out.clear()
        assert world.dispatch.on_lost(task, Loss.NOT_RUN)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_each_task_is_done_or_given_up_once(seed: int) -> None:
    world = World(task_retries=2, seed=seed)
    chance = world.random
    tasks, batches, outcomes = [], [], 0
    for number in range(200):
        match chance.choice(["task", "batch", "join", "die", "answer", "answer", "answer", "assign", "assign"]):
            case "task":
                tasks.append(world.task())
            case "batch":
                batch = Batch(b"", lambda outcome: None, chunksize=chance.choice([None, 3]), is_complete=True)
                outcomes += batch.add(blocks_of([(each,) for each in range(chance.randrange(1, 40))], 0, None))
                batches.append(batch)
                world.dispatch.add(batch)
            case "join":
                world.join(f"w{number}")
            case "die" if world.workers:
                world.die(chance.choice(world.workers))
            case "answer" if any(world.out.values()):
                world.answer(chance.choice([each for each in world.out if world.out[each]]), chance.random() / 10)
            case _:
                world.assign()
        world.dispatch.sanity_check()
    world.join("last")
    while world.assign() or any(world.out.values()):
        for worker in [each for each in world.out if world.out[each]]:
            world.answer(worker)
    over = world.done + world.given_up
    assert len(set(map(id, over))) == len(over)
    assert {id(each) for each in over if isinstance(each, Task)} == {id(each) for each in tasks}
    places = [
        (id(each.batch), index) for each in over if isinstance(each, Slice) for index in range(each.first, each.stop)
    ]
    assert len(places) == len(set(places)) == outcomes
    assert (world.dispatch.out, world.dispatch.waiting) == (0, 0)
    assert all(each.losses == 3 for each in world.given_up)


# ---- batches --------------------------------------------------------------------------------------------


def batch_of(
    count: int, *, chunksize: int | None = None, on_outcome: Callable[[Outcome], object] = lambda _outcome: None
) -> Batch:
    batch = Batch(b"", on_outcome, chunksize=chunksize, is_complete=True)
    batch.add(blocks_of([(number,) for number in range(count)], 0, chunksize))
    return batch


def slices(batch: Batch, workers: int) -> list[tuple[int, int]]:
    found = []
    while size := batch.next_size(workers):
        unit = batch.take(size)
        assert unit is not None
        found.append((unit.first, unit.stop))
    return found


def test_a_given_chunksize_is_honoured() -> None:
    assert slices(batch_of(10, chunksize=4), workers=3) == [(0, 4), (4, 8), (8, 10)]


def test_chunks_cover_all_items_and_get_small_towards_the_end() -> None:
    batch = batch_of(5_000)
    batch.pace.observe(MAX_ITEMS, MAX_ITEMS * 1e-5)
    found = slices(batch, workers=2)
    assert [first for first, _stop in found[1:]] == [stop for _first, stop in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0, 5_000)
    assert found[0][1] == MAX_ITEMS
    assert [stop - first for first, stop in found[-3:-1]] == [100, 100], "1 ms of work: less is not worth a call"


def test_what_is_left_is_shared_in_two_slices_for_each_worker() -> None:
    batch = batch_of(8)
    batch.pace.observe(1_000, 1_000 * AHEAD_S / 100)
    assert [batch.next_size(workers) for workers in (1, 2)] == [4, 2]


def test_large_items_travel_in_smaller_blocks() -> None:
    blocks = list(blocks_of([(bytes(50_000),) for _ in range(20)], 0, None))
    assert sum(block.size for block in blocks) == 20
    assert [block.start for block in blocks] == [
        sum(each.size for each in blocks[:index]) for index in range(len(blocks))
    ]
    assert max(len(block.payload) for block in blocks) <= 128 << 10
    assert [len(codec.decode(block.payload)) for block in blocks] == [block.size for block in blocks]


def test_a_chunk_of_a_given_size_is_split_where_no_message_could_carry_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluster.worker_pool.work._MAX_CHUNK", 1 << 20)
    items = [(bytes(300_000),) for _ in range(10)] + [(bytes(2_000_000),)]
    assert [block.size for block in blocks_of(items, 0, 11)] == [2, 3, 3, 1, 1, 1]
    assert [block.size for block in blocks_of(items[:3], 0, 3)] == [3]


def run_slice(function: Callable[..., Any], items: list[Any]) -> tuple[list[Any], dict[int, bytes], int]:
    """What a worker answers."""
    runner = TaskRunner(lambda _timeout: None)
    pickled = payloads.encode_whole([(item,) for item in items])
    parts, failures, ran, _ran_s = runner.run_slice(codec.encode(function), pickled, 0, len(items), None)
    return Outcome(0, ran, values=parts, failures=failures).values(), failures, ran


def test_a_chunk_ends_before_its_answer_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluster.worker_pool.runner._PART_S", 0.0)
    monkeypatch.setattr("fluster.worker_pool.runner._ENOUGH_BYTES", 1_000)
    assert run_slice(bytes, [1, 400, 700, 5]) == ([bytes(1), bytes(400), bytes(700)], {}, 3)
    assert run_slice(bytes, [1_001, 1]) == ([bytes(1_001)], {}, 1)
    assert run_slice(bytes, [3, 4]) == ([bytes(3), bytes(4)], {}, 2)
    assert run_slice(int, [0] * 5_000)[2] == 5_000


@pytest.mark.parametrize("part_s", [0.0, 10.0])
def test_what_cannot_be_pickled_fails_in_its_place(monkeypatch: pytest.MonkeyPatch, part_s: float) -> None:
    monkeypatch.setattr("fluster.worker_pool.runner._PART_S", part_s)

    def odd_lock(number: int) -> Any:
        if number == 3:
            raise ValueError(number)
        return threading.Lock() if number % 2 else number

    values, failures, ran = run_slice(odd_lock, [0, 1, 2, 3, 4, 5])
    assert (values, ran) == ([0, None, 2, None, 4, None], 6)
    assert {index: type(decode_failure(failure)) for index, failure in failures.items()} == {
        1: TypeError,
        3: ValueError,
        5: TypeError,
    }


def test_what_is_dropped_is_told() -> None:
    told: list[Outcome] = []
    batch = batch_of(10, chunksize=4, on_outcome=told.append)
    batch.take(4)
    batch.cancel()
    assert [(each.start, each.stop, each.cancelled) for each in told] == [(4, 8, True), (8, 10, True)]
    assert batch.next_size(1) == batch.items == 0


@pytest.mark.parametrize(
    ("outcome", "failed", "is_whole", "is_ok"),
    [
        (Outcome(3, 8), 0, True, (True, True)),
        (Outcome(3, 8, failures={4: b""}), 1, False, (False, True)),
        (Outcome(3, 8, error=ValueError()), 5, False, (False, False)),
        (Outcome(3, 8, cancelled=True), 5, False, (True, True)),
    ],
)
def test_an_outcome_tells_how_many_items_gave_no_value(
    outcome: Outcome, failed: int, is_whole: bool, is_ok: tuple[bool, bool]
) -> None:
    assert (outcome.failed, outcome.is_whole) == (failed, is_whole)
    assert (outcome.is_ok(4), outcome.is_ok(5)) == is_ok


def values_of(*values: Any) -> bytes:
    """A part of an answer: the values of some items."""
    return codec.encode(list(values))


BROKEN = values_of(1)[:-1]  # cut short


def test_a_value_that_cannot_be_read_is_that_of_its_item_alone() -> None:
    outcome = Outcome(3, 7, values=[values_of("a"), BROKEN, values_of("b", "c")])
    assert outcome.is_whole, "as far as it was read"
    for _ in range(2):
        assert outcome.values() == ["a", None, "b", "c"]
    assert not outcome.is_whole
    assert [outcome.value(index) for index in (3, 5, 6)] == ["a", "b", "c"]
    with pytest.raises(pickle.UnpicklingError, match="truncated") as raised:
        outcome.value(4)
    assert raised.value.__notes__ == ["the function returned, but what it returned cannot be unpickled here"]
    whole = Outcome(3, 5, values=[values_of("a", "b")])
    assert (whole.values(), whole.is_whole) == (["a", "b"], True)


def test_where_one_of_many_values_cannot_be_read_none_is_given_to_another_item() -> None:
    """An earlier version puts the values of several items into one part."""
    with pytest.raises(pickle.UnpicklingError, match="truncated") as raised:
        Outcome(3, 6, values=[values_of("a"), BROKEN]).values()
    assert raised.value.__notes__ == ["the function returned, but what it returned cannot be unpickled here"]


def test_what_an_item_raised_is_told_in_its_place() -> None:
    error = ValueError("3")
    ended = Outcome(3, 5, error=error)
    assert [ended.error(index) for index in (3, 4)] == [error, error]
    _, failures, _ = run_slice(int, ["0", "x"])
    some = Outcome(0, 2, failures=failures)
    assert some.error(0) is None
    assert isinstance(some.error(1), ValueError)


def test_items_that_just_fit_stay_together() -> None:
    """128 KiB travel as one, a byte more as two."""
    most = 128 << 10
    beside = len(payloads.encode_whole([bytes(1_000), bytes(most)])) - most
    for size, sizes in ((most - beside, [2]), (most - beside + 1, [1, 1])):
        assert [block.size for block in blocks_of([bytes(1_000), bytes(size)], 5, None)] == sizes


def test_a_slice_names_its_items_by_their_places_in_the_batch() -> None:
    told: list[Outcome] = []
    batch = Batch(b"", told.append, chunksize=4, is_complete=True)
    batch.add(blocks_of(range(8), 10, 4))
    first, second = batch.take(4), batch.take(3)
    assert first is not None
    assert second is not None
    assert (str(first), str(second)) == ("items 10 to 13", "items 14 to 16")
    assert [str(part) for part in first.parts()] == [f"item {index} of the batch" for index in range(10, 14)]
    rest = first.rest(1)
    assert (str(rest), rest.size) == ("items 11 to 13", 3)
    error = ValueError("lost")
    assert rest.fail(error) == 0, "they count with the batch"
    assert [(each.start, each.stop, each.error(11)) for each in told] == [(11, 14, error)]
    told.clear()
    assert batch.fail(error) == 0
    assert [(each.start, each.stop, each.failed) for each in told] == [(17, 18, 1)]


class Cancelled:
    """Futures of which the one with that index was cancelled; it remembers what it was asked to begin."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.asked: list[tuple[int, int]] = []

    def begin(self, start: int, size: int) -> int:
        self.asked.append((start, size))
        return self._index - start if start <= self._index < start + size else size


def test_a_cancelled_item_is_passed_over_and_told_in_its_place() -> None:
    told: list[Outcome] = []
    futures = Cancelled(12)
    batch = Batch(b"", told.append, chunksize=4, futures=futures, is_complete=True)
    batch.add(blocks_of(range(8), 10, 4))
    taken = []
    while size := batch.next_size(1):
        one = batch.take(size)
        taken.append(None if one is None else (one.first, one.stop))
    assert taken == [(10, 12), None, (13, 14), (14, 18)]
    assert futures.asked == [(10, 4), (12, 2), (13, 1), (14, 4)]
    assert [(each.start, each.stop, each.cancelled) for each in told] == [(12, 13, True)]
    assert batch.items == 0


@pytest.mark.parametrize(
    ("items", "chunksize", "is_complete", "ending"),
    [(36, None, True, True), (40, None, True, False), (36, None, False, False), (36, 3, True, False)],
)
def test_a_map_ends_when_each_worker_has_less_than_a_good_slice_left(
    items: int, chunksize: int | None, is_complete: bool, ending: bool
) -> None:
    batch = Batch(b"", lambda outcome: None, chunksize=chunksize, is_complete=is_complete)
    batch.pace.observe(10, CHUNK_S)
    batch.add([Block(0, items, b"")])
    assert batch.is_ending(workers=2) is ending


def test_what_is_added_to_a_batch_that_was_ended_is_told_as_cancelled() -> None:
    told: list[Outcome] = []
    batch = Batch(b"", told.append, chunksize=None, is_complete=False)
    batch.cancel()
    batch.add(blocks_of(range(3), 0, None))
    assert batch.next_size(1) == 0
    assert [(each.start, each.stop, each.cancelled) for each in told] == [(0, 3, True)]
