"""First fit in the order of submission, whatever comes in between; and the cost of it."""

import itertools
import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fluster_bus.messages import Capacity, JobId, Namespace
from fluster_services.capacity import fits
from fluster_services.controller.scheduling.order import Position, Starving, position_in_line, reserved_workers
from fluster_services.controller.scheduling.scheduler import Scheduler
from fluster_services.controller.scheduling.scheduler_lines import MAX_WINDOW
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.worker_index import WorkerView

NEEDS = [
    Capacity(cpu=1, memory=1),
    Capacity(cpu=2, memory=1),
    Capacity(cpu=1, memory=2),
    Capacity(cpu=2, memory=2),
    Capacity(cpu=1, memory=1, device="gpu", variant="h100", devices=1),
    Capacity(cpu=1, memory=1, device="gpu", variant="any", devices=1),
    Capacity(cpu=4, memory=4, device="gpu", variant="h100", devices=2),
    Capacity(cpu=1, memory=1, device="gpu", variant="h100", devices=8),
    Capacity(cpu=1, memory=1, resources=(("license", 1.0),)),
    Capacity(cpu=1, memory=1, resources=(("license", 2.0), ("slot", 1.0))),
]


def _position(number: int) -> Position:
    return Position(number // 3, number % 3, JobKey(Namespace("default"), JobId(f"job{number // 3}")))


def _covers(need: Capacity, declined: Capacity) -> bool:
    """No room for `declined` means none for `need`."""
    if need.cpu < declined.cpu or need.memory < declined.memory or need.devices < declined.devices:
        return False
    if any(dict(need.resources).get(name, 0) < count for name, count in declined.resources):
        return False
    return declined.devices == 0 or (need.device, need.variant) == (declined.device, declined.variant)


class SchedulerHistories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.waiting: dict[Position, Capacity] = {}
        self.out: dict[Position, Capacity] = {}
        self.declined: list[Capacity] = []  # since a worker had room

    @rule(number=st.integers(0, 40), need=st.sampled_from(NEEDS))
    def add(self, number: int, need: Capacity) -> None:
        position = _position(number)
        if position not in self.waiting:
            self.waiting[position] = need
        self.scheduler.add(position, self.waiting[position])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """It was claimed, or is not wanted any more; an offer of it may still be out."""
        position = data.draw(st.sampled_from(sorted(self.waiting)))
        if position in self.out:
            return  # its answer comes first here; the other way round is `claimed_before_the_answer`
        del self.waiting[position]
        self.scheduler.remove(position.job, position.task)

    @rule(limit=st.integers(0, 5))
    def take(self, limit: int) -> None:
        taken = self.scheduler.take(limit)
        assert len(taken) <= limit
        assert [position for position, _ in taken] == sorted(position for position, _ in taken), (
            "first come, first served"
        )
        for position, need in taken:
            assert self.waiting[position] == need
            assert position not in self.out, "offered twice at once"
            for other, its_need in self.waiting.items():
                if other < position and other not in self.out:
                    closed = any(_covers(its_need, each) for each in self.declined)
                    assert closed or self.scheduler.is_full(its_need), f"{other} was passed over"
            self.out[position] = need
        if len(taken) < limit:
            for position, need in self.waiting.items():
                closed = any(_covers(need, each) for each in self.declined)
                assert position in self.out or closed or self.scheduler.is_full(need), f"{position} is lost"

    @precondition(lambda self: self.out)
    @rule(data=st.data(), room=st.booleans())
    def decline(self, data: st.DataObject, room: bool) -> None:
        position = data.draw(st.sampled_from(sorted(self.out)))
        need = self.out.pop(position)
        if not room:
            self.declined.append(need)
        self.scheduler.on_declined(position, need, room=room)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.out)))
        need = self.out.pop(position)
        del self.waiting[position]
        self.scheduler.on_accepted(need)
        self.scheduler.remove(position.job, position.task)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def claimed_before_the_answer(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.out)))
        need = self.out.pop(position)
        del self.waiting[position]
        self.scheduler.remove(position.job, position.task)
        self.declined.append(need)
        self.scheduler.on_declined(position, need, room=False)

    @rule()
    def room(self) -> None:
        self.declined.clear()
        self.scheduler.on_room()

    @invariant()
    def sane(self) -> None:
        self.scheduler.sanity_check()
        assert len(self.scheduler) == len(self.waiting)
        assert set(self.scheduler.needs()) == set(self.waiting.values())
        for need in NEEDS:
            waiting = {(position.job, position.task) for position, its_need in self.waiting.items() if its_need == need}
            assert set(self.scheduler.waiting_for(need)) == waiting


TestSchedulerHistories = SchedulerHistories.TestCase
TestSchedulerHistories.settings = settings(max_examples=150, stateful_step_count=60)


def _numbers(taken: list[tuple[Position, Capacity]]) -> list[int]:
    return [3 * position.order + position.task for position, _ in taken]


def test_a_smaller_task_passes_one_that_finds_no_room() -> None:
    scheduler = Scheduler()
    small, large = NEEDS[0], NEEDS[3]
    scheduler.add(_position(0), large)
    scheduler.add(_position(1), large)
    scheduler.add(_position(2), small)
    assert _numbers(scheduler.take(1)) == [0]
    scheduler.on_declined(_position(0), large, room=False)
    assert _numbers(scheduler.take(9)) == [2]
    scheduler.add(_position(3), NEEDS[6])
    scheduler.add(_position(4), large)
    assert _numbers(scheduler.take(9)) == []
    scheduler.on_room()
    assert _numbers(scheduler.take(9)) == [0, 3], "room is scarce: one of each need at a time"


def test_a_task_whose_need_changed_waits_once() -> None:
    scheduler = Scheduler()
    scheduler.add(_position(0), NEEDS[0])
    scheduler.add(_position(0), NEEDS[1])
    scheduler.add(_position(0), NEEDS[0])
    assert scheduler.take(9) == [(_position(0), NEEDS[0])]
    scheduler.remove(_position(0).job, 0)
    assert len(scheduler) == 0
    assert scheduler.needs() == []


def test_a_task_that_is_out_still_counts_as_waiting() -> None:
    """Else a task that never fits is not missed by a search for such, just while it is being offered."""
    scheduler = Scheduler()
    scheduler.add(_position(0), NEEDS[0])
    assert len(scheduler.take(9)) == 1
    assert scheduler.needs() == [NEEDS[0]]
    assert scheduler.waiting_for(NEEDS[0]) == [(_position(0).job, 0)]


def test_of_no_room_on_one_device_nothing_follows_for_another() -> None:
    scheduler = Scheduler()
    scheduler.add(_position(0), NEEDS[4])
    scheduler.add(_position(1), NEEDS[5])
    scheduler.add(_position(2), NEEDS[6])
    (first, *_) = scheduler.take(1)
    scheduler.on_declined(*first, room=False)
    assert _numbers(scheduler.take(9)) == [1]


def _calls(work: Callable[[], Any]) -> int:
    """How many functions were called, of Python's and of C's."""
    count = 0

    def on_event(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def _run_through(scheduler: Scheduler, tasks: int) -> None:
    """Offer as a controller does: every other offer finds no room, which then comes back."""
    placed = 0
    while placed < tasks:
        for number, (position, need) in enumerate(scheduler.take(8)):
            if number % 2:
                scheduler.on_declined(position, need, room=False)
            else:
                scheduler.remove(position.job, position.task)
                placed += 1
        scheduler.on_room()


def test_the_cost_of_a_task_does_not_grow_with_the_gangs_that_wait() -> None:
    costs = []
    for gangs in (20, 2_000):
        scheduler = Scheduler()
        for order in range(gangs):
            scheduler.add_gang(_gang_position(order), NEEDS[0], 4)
        _add_all(scheduler, 3 * gangs + 1_000, 1)
        scheduler.on_accepted(NEEDS[0], _position(3 * gangs), now=0)
        costs.append(_calls(partial(_accept_many, scheduler)))
    assert costs[1] < 1.2 * costs[0]


def test_who_starves_first_is_found_without_a_look_at_each_gang() -> None:
    costs = []
    for gangs in (20, 2_000):
        scheduler = Scheduler()
        for order in range(gangs):
            scheduler.add_gang(_gang_position(order), NEEDS[0], 4)
        scheduler.on_accepted(NEEDS[0], _position(3 * gangs), now=0)
        first = scheduler.starving(now=10, reserve_after_s=10)
        costs.append(_calls(partial(next, first)))
    assert costs[1] == costs[0]


def _accept_many(scheduler: Scheduler) -> None:
    for number in range(1_000):
        scheduler.on_accepted(NEEDS[0], _position(number))


@pytest.mark.parametrize("kinds", [1, len(NEEDS)])
def test_the_cost_of_a_task_does_not_grow_with_the_queue(kinds: int) -> None:
    costs = []
    for tasks in (200, 2_000):
        scheduler = Scheduler()
        adding = _calls(partial(_add_all, scheduler, tasks, kinds))
        running = _calls(partial(_run_through, scheduler, 100))
        costs.append((adding / tasks, running / 100))
    (adding_few, running_few), (adding_many, running_many) = costs
    assert adding_many < 1.2 * adding_few
    assert running_many < 1.2 * running_few


def _add_all(scheduler: Scheduler, tasks: int, kinds: int) -> None:
    for number in range(tasks):
        scheduler.add(_position(number), NEEDS[number % kinds])


def test_where_room_is_scarce_one_task_is_out_at_a_time_until_offers_are_taken_again() -> None:
    scheduler = Scheduler()
    need = NEEDS[0]
    for number in range(100):
        scheduler.add(_position(number), need)
    assert len(scheduler.take(99)) == MAX_WINDOW
    for number in reversed(range(MAX_WINDOW)):
        scheduler.on_declined(_position(number), need, room=False)
    scheduler.on_room()
    taken = []
    while len(scheduler) > 0:
        out = scheduler.take(99)
        taken.append(_numbers(out))
        for position, _ in out:
            scheduler.on_accepted(need)
            scheduler.remove(position.job, position.task)
    assert [number for numbers in taken for number in numbers] == list(range(100))
    assert [len(numbers) for numbers in taken[:9]] == [1] * 8 + [2]


# ---- priorities -----------------------------------------------------------------------------------------


def test_higher_priorities_go_first_and_within_one_the_first_that_was_submitted() -> None:
    scheduler = Scheduler()
    dice = random.Random(1)
    jobs = [(priority, order) for order in range(1, 200) for priority in (dice.randint(-1_000, 1_000),)]
    for priority, order in sorted(jobs, key=lambda _: dice.random()):
        key = JobKey(Namespace("default"), JobId(f"job{order}"))
        scheduler.add(Position(position_in_line(order, priority), 0, key), NEEDS[order % len(NEEDS)])
    taken = [position.job.job_id for position, _ in scheduler.take(len(jobs))]
    assert taken == [f"job{order}" for _, order in sorted(jobs, key=lambda each: (-each[0], each[1]))]


# ---- reserve and backfill -------------------------------------------------------------------------------

SMALL, LARGE = Capacity(cpu=1, memory=1), Capacity(cpu=4, memory=1)


class _Workers:
    """A cluster on a clock: tasks that end, offers that reach a worker with room, as a queue group does."""

    def __init__(self, dice: random.Random, workers: dict[str, float], *, reserve_after_s: float = 10) -> None:
        self.dice = dice
        self.free = dict(workers)  # {worker: CPUs}
        self.total = dict(workers)
        self.reserve_after_s = reserve_after_s
        self.scheduler = Scheduler()
        self.now = 0.0
        self.running: list[tuple[float, str, Position, Capacity]] = []  # (ends at, worker, …)
        self.started: dict[Position, float] = {}
        self.kept_free: tuple[str, ...] = ()
        self.needs: dict[Position, Capacity] = {}
        self.gangs: dict[Position, int] = {}  # {gang that waits: how many tasks}

    def add(self, position: Position, need: Capacity) -> None:
        self.needs[position] = need
        self.scheduler.add(position, need, now=self.now)

    def add_gang(self, position: Position, need: Capacity, count: int) -> None:
        self.needs[position] = need
        self.gangs[position] = count
        self.scheduler.add_gang(position, need, count)

    def reserve(self) -> None:
        scheduler = self.scheduler
        for starving in scheduler.starving(now=self.now, reserve_after_s=self.reserve_after_s):
            if scheduler.reserved is not None and starving.position >= scheduler.reserved:
                return
            views = [
                WorkerView(name, Capacity(cpu=total, memory=99), Capacity(cpu=self.free[name], memory=99))
                for name, total in self.total.items()
            ]
            chosen = reserved_workers(starving.need, starving.count, views)
            if chosen:
                self.kept_free = chosen
                scheduler.reserve(starving)
                return

    def room(self, position: Position, need: Capacity) -> list[str]:
        spared = self.kept_free if self.scheduler.is_behind_reserved(position) else ()
        return [name for name, free in self.free.items() if free >= need.cpu and name not in spared]

    def run(self, position: Position, worker: str, runs_s: float) -> None:
        need = self.needs[position]
        self.free[worker] -= need.cpu
        self.started.setdefault(position, self.now)
        self.running.append((self.now + runs_s * self.dice.uniform(0.5, 1.5), worker, position, need))

    def gather(self, runs_s: float) -> None:
        """What fits as a whole is claimed; now and then it is let go again, since one worker declined or was late."""
        for position, count in sorted(self.gangs.items()):
            need = self.needs[position]
            slots = [name for name in self.room(position, need) for _ in range(int(self.free[name] // need.cpu))]
            if len(slots) < count or self.dice.random() < 0.2:
                continue
            self.scheduler.on_gathered(position.job, now=self.now)
            if self.dice.random() < 0.2:
                self.scheduler.add_gang(position, need, count)
                continue
            self.scheduler.remove_gang(position.job)
            del self.gangs[position]
            for worker in slots[:count]:
                self.run(position, worker, runs_s)
            self.scheduler.sanity_check()

    def dispatch(self, runs_s: float) -> None:
        scheduler = self.scheduler
        while True:
            self.reserve()
            if self.dice.random() < 0.5:
                self.gather(runs_s)
            taken = scheduler.take(self.dice.randint(1, 8))
            if not taken:
                break
            for position, need in self.dice.sample(taken, len(taken)):
                room = self.room(position, need)
                if not room:
                    scheduler.on_declined(position, need, room=False)
                    continue
                self.run(position, self.dice.choice(room), runs_s)
                if self.dice.random() < 0.5:
                    scheduler.on_accepted(need, position, now=self.now)
                    scheduler.remove(position.job, position.task)
                else:
                    scheduler.remove(position.job, position.task)
                    scheduler.on_accepted(need, position, now=self.now)
            scheduler.sanity_check()
        self.gather(runs_s)

    def step(self) -> None:
        """Until the next task ends; what was declined is offered again when none runs."""
        if not self.running:
            self.scheduler.on_room()
            return
        self.running.sort(key=lambda each: each[0], reverse=True)
        ends, worker, _position, need = self.running.pop()
        self.now = max(self.now, ends)
        self.free[worker] += need.cpu
        assert self.free[worker] <= self.total[worker]
        self.scheduler.on_room()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ages", [True, False], ids=["aging", "without"])
def test_a_large_task_gets_its_turn_under_an_endless_stream_of_small_ones(seed: int, ages: bool) -> None:
    dice = random.Random(seed)
    workers = {f"w{each}": 4.0 for each in range(dice.randint(1, 4))}
    cluster = _Workers(dice, workers, reserve_after_s=10 if ages else 1e9)
    numbers = itertools.count()
    large: list[Position] = []
    waiting_small = 0
    for _ in range(3_000):
        while waiting_small < 12:
            cluster.add(_position(next(numbers)), SMALL)
            waiting_small += 1
        if cluster.now > 20 and len(large) < 3:
            large.append(_position(next(numbers)))
            cluster.add(large[-1], LARGE)
        before = len(cluster.started)
        cluster.dispatch(runs_s=5)
        started = list(cluster.started)[before:]
        waiting_small -= sum(cluster.needs[position] == SMALL for position in started)
        if cluster.now > 20 + 3 * 60:
            break
        cluster.step()
    if not ages:
        if len(workers) == 1:
            assert not set(large) & set(cluster.started), "else this test shows nothing"
        return
    assert set(large) <= set(cluster.started)
    assert sorted(large, key=lambda position: cluster.started[position]) == large, "one after the other"
    # 10 s until it is overtaken for too long, then what runs on one worker has to end; each in its turn.
    assert cluster.started[large[0]] < 20 + 10 + 10 + 5
    assert cluster.started[large[-1]] < 20 + 10 + 3 * 20


@pytest.mark.parametrize("seed", range(10))
def test_no_task_is_lost_whatever_is_reserved(seed: int) -> None:
    dice = random.Random(seed)
    cluster = _Workers(dice, {"w1": 4, "w2": 8, "w3": 2}, reserve_after_s=dice.choice((0, 3, 20)))
    needs = [Capacity(cpu=cpu, memory=1) for cpu in (0.5, 1, 2, 3, 4, 8)]
    positions = [_position(number) for number in range(300)]
    for position in positions:
        cluster.add(position, dice.choice(needs))
    while len(cluster.started) < len(positions):
        cluster.dispatch(runs_s=dice.choice((1, 5)))
        assert cluster.running, f"{len(cluster.scheduler)} tasks wait, and nothing runs"
        cluster.step()
    assert cluster.scheduler.reserved is None


def test_nothing_is_reserved_for_what_nobody_overtakes() -> None:
    scheduler = Scheduler()
    for number in range(10):
        scheduler.add(_position(number), SMALL, now=0)
    for position, need in scheduler.take(1):
        scheduler.on_declined(position, need, room=False)
    assert [*scheduler.starving(now=1_000, reserve_after_s=10)] == []


def test_what_is_behind_a_reservation_closes_no_line_before_it() -> None:
    scheduler = Scheduler()
    first, large, small = _position(0), _position(1), _position(2)
    scheduler.add(first, Capacity(cpu=2, memory=1), now=0)
    scheduler.add(large, LARGE, now=0)
    scheduler.add(small, SMALL, now=0)
    scheduler.reserve(Starving(large, LARGE))
    assert [scheduler.is_behind_reserved(position) for position in (first, large, small)] == [False, False, True]
    taken = scheduler.take(3)
    assert [position for position, _ in taken] == [first, large, small]
    scheduler.on_declined(first, taken[0][1], room=True)
    scheduler.on_declined(large, LARGE, room=True)
    scheduler.on_declined(small, SMALL, room=False)
    assert [position for position, _ in scheduler.take(3)] == [first, large], "they may have room where it had none"
    scheduler.remove(large.job, large.task)
    assert scheduler.reserved is None
    assert [position for position, _ in scheduler.take(3)] == [small]


def test_the_worker_that_lacks_least_is_kept_free() -> None:
    def view(name: str, total: float, free: float, memory: int = 9) -> WorkerView:
        return WorkerView(name, Capacity(cpu=total, memory=9), Capacity(cpu=free, memory=memory))

    assert reserved_workers(LARGE, 1, [view("w1", 4, 1), view("w2", 4, 2), view("w3", 3, 3), view("w4", 8, 0)]) == (
        "w2",
    )
    whole = Capacity(cpu=4, memory=9)
    assert reserved_workers(whole, 1, [view("w1", 4, 1), view("w2", 4, 2, memory=0)]) == ("w1",), "whatever is scarcest"
    assert reserved_workers(LARGE, 1, [view("w3", 3, 3)]) == ()


def test_a_gang_has_as_many_workers_kept_free_as_hold_it() -> None:
    def view(name: str, total: float, free: float) -> WorkerView:
        return WorkerView(name, Capacity(cpu=total, memory=99), Capacity(cpu=free, memory=99))

    workers = [view("w1", 4, 0), view("w2", 4, 3), view("w3", 4, 1), view("w4", 0.5, 0.5)]
    assert reserved_workers(SMALL, 3, workers) == ("w2",)
    assert reserved_workers(SMALL, 4, workers) == ("w2", "w3")
    assert reserved_workers(SMALL, 12, workers) == ("w1", "w2", "w3")
    assert reserved_workers(SMALL, 13, workers) == (), "all together could not"


def _gang_position(order: int) -> Position:
    return Position(order, 0, JobKey(Namespace("default"), JobId(f"gang{order}")))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ages", [True, False], ids=["aging", "without"])
def test_a_gang_gets_its_turn_under_an_endless_stream_of_small_tasks_and_gangs(seed: int, ages: bool) -> None:
    dice = random.Random(seed)
    count = dice.randint(1, 4)
    cluster = _Workers(dice, {f"w{each}": 4.0 for each in range(count)}, reserve_after_s=10 if ages else 1e9)
    orders = itertools.count()
    need, size = dice.choice([(SMALL, 4 * count), (Capacity(cpu=2, memory=1), 2 * count), (LARGE, count)])
    early: list[Position] = []
    small_since = 0
    for _ in range(3_000):
        while len(cluster.scheduler) < 12:
            order = next(orders)
            cluster.add(Position(order, 0, JobKey(Namespace("default"), JobId(f"job{order}"))), SMALL)
            small_since += 1
            if small_since % 20 == 0:
                cluster.add_gang(_gang_position(next(orders)), SMALL, 2)
        if cluster.now > 20 and len(early) < 2:
            early.append(_gang_position(next(orders)))
            cluster.add_gang(early[-1], need, size)
        cluster.dispatch(runs_s=5)
        if cluster.now > 200:
            break
        cluster.step()
    if not ages:
        assert not set(early) & set(cluster.started), "else this test shows nothing"
        return
    # 10 s until it is overtaken for too long, then what runs on all workers has to end; each in its turn.
    assert set(early) <= set(cluster.started)
    assert all(cluster.started[position] < limit for position, limit in zip(early, (60, 90), strict=True))


@pytest.mark.parametrize("seed", range(10))
def test_no_gang_and_no_task_is_lost_whatever_is_reserved(seed: int) -> None:
    dice = random.Random(seed)
    cluster = _Workers(dice, {"w1": 4, "w2": 8, "w3": 2}, reserve_after_s=dice.choice((0, 3, 20)))
    for order in dice.sample(range(200), 200):
        if order % 4:
            position = Position(order, 0, JobKey(Namespace("default"), JobId(f"job{order}")))
            cluster.add(position, Capacity(cpu=dice.choice((0.5, 1, 2, 3, 4, 8)), memory=1))
        else:
            cluster.add_gang(_gang_position(order), Capacity(cpu=dice.choice((1, 2)), memory=1), dice.randint(1, 6))
    while len(cluster.started) < 200:
        cluster.dispatch(runs_s=dice.choice((1, 5)))
        cluster.step()
    assert cluster.scheduler.reserved is None


def test_one_that_is_before_the_reservation_takes_it_over() -> None:
    scheduler = Scheduler()
    first, second = _gang_position(1), _gang_position(2)
    for position in (second, first):
        scheduler.add_gang(position, SMALL, 4)
    scheduler.add(_position(9), SMALL, now=0)
    scheduler.on_accepted(SMALL, _position(9), now=0)
    scheduler.remove_gang(first.job)
    (starving,) = scheduler.starving(now=10, reserve_after_s=10)
    scheduler.reserve(starving)
    assert scheduler.reserved == second
    scheduler.add_gang(first, SMALL, 4)
    scheduler.on_accepted(SMALL, _position(9), now=10)
    assert [each.position for each in scheduler.starving(now=20, reserve_after_s=10)] == [first, second]
    scheduler.reserve(Starving(first, SMALL, 4))
    assert [scheduler.is_behind_reserved(each) for each in (first, second)] == [False, True]


def test_a_gang_that_is_held_needs_no_reservation_and_starves_still_when_it_is_let_go() -> None:
    scheduler = Scheduler()
    gang = _gang_position(1)
    scheduler.add_gang(gang, SMALL, 4)
    scheduler.on_accepted(SMALL, _position(9), now=0)
    (starving,) = scheduler.starving(now=10, reserve_after_s=10)
    scheduler.reserve(starving)
    scheduler.remove(gang.job, 0)
    assert scheduler.reserved == gang, "its task is claimed, which others may not be"
    scheduler.on_gathered(gang.job, now=11)
    assert [*scheduler.starving(now=12, reserve_after_s=10)] == []
    assert not scheduler.is_behind_reserved(_position(9))
    scheduler.add_gang(gang, SMALL, 4)
    assert [*scheduler.starving(now=12, reserve_after_s=10)] == [starving]


def test_a_gang_overtakes_a_task_that_is_before_it() -> None:
    scheduler = Scheduler()
    large, gang = _position(0), _gang_position(1)
    scheduler.add(large, LARGE, now=0)
    scheduler.add_gang(gang, SMALL, 2)
    ((position, need),) = scheduler.take(1)
    scheduler.on_declined(position, need, room=False)
    scheduler.on_gathered(gang.job, now=5)
    assert [*scheduler.starving(now=15, reserve_after_s=10)] == [Starving(large, LARGE)]


def test_of_no_room_for_eight_gpus_nothing_follows_for_one() -> None:
    scheduler = Scheduler()
    one, eight, sixteen = (Capacity(cpu=1, memory=1, device="gpu", variant="h100", devices=n) for n in (1, 8, 16))
    scheduler.add(_position(0), eight)
    ((position, need),) = scheduler.take(1)
    scheduler.on_declined(position, need, room=False)
    scheduler.add(_position(1), one)
    scheduler.add(_position(2), sixteen)
    assert scheduler.take(3) == [(_position(1), one)]


def _overtaken(*positions: Position) -> Scheduler:
    """Large tasks that found no room, and that a small one behind them has overtaken at 10 s."""
    scheduler = Scheduler()
    for position in positions:
        scheduler.add(position, LARGE, now=0)
    for position, need in scheduler.take(1):
        scheduler.on_declined(position, need, room=False)
    scheduler.add(_position(90), SMALL, now=0)
    ((small, _),) = scheduler.take(1)
    scheduler.on_accepted(SMALL, small, now=10)
    scheduler.remove(small.job, small.task)
    return scheduler


def test_a_task_starves_once_it_was_overtaken_for_so_long_and_not_before() -> None:
    scheduler = _overtaken(_position(0))
    assert [*scheduler.starving(now=39.9, reserve_after_s=30)] == []
    assert [each.position for each in scheduler.starving(now=40, reserve_after_s=30)] == [_position(0)]


def test_a_task_that_comes_to_an_overtaken_line_has_waited_for_as_long_as_it_is_there() -> None:
    scheduler = _overtaken(_position(0))
    scheduler.add(_position(1), LARGE, now=35)
    scheduler.remove(_position(0).job, _position(0).task)
    assert [*scheduler.starving(now=64.9, reserve_after_s=30)] == []
    assert [each.position for each in scheduler.starving(now=65, reserve_after_s=30)] == [_position(1)]


@pytest.mark.parametrize(("helped", "released"), [(True, False), (True, True), (False, False)])
def test_one_that_was_helped_to_its_room_tells_nothing_about_the_next_of_its_kind(helped: bool, released: bool) -> None:
    first, second = _position(0), _position(1)
    scheduler = _overtaken(first, second)
    if helped:
        scheduler.reserve(Starving(first, LARGE))
    scheduler.on_room()
    ((position, need),) = scheduler.take(1)
    assert position == first
    if released:  # while the offer is on its way
        scheduler.release()
    scheduler.on_accepted(need, position, now=50)
    scheduler.remove(first.job, first.task)
    for position, need in scheduler.take(1):
        scheduler.on_declined(position, need, room=False)
    found = [each.position for each in scheduler.starving(now=60, reserve_after_s=30)]
    assert found == ([second] if helped else []), "one that found room by itself shows that there is some"


_needs = st.builds(
    Capacity,
    cpu=st.sampled_from((1, 2)),
    memory=st.sampled_from((1, 2)),
    disk=st.sampled_from((0, 1)),
    device=st.sampled_from(("gpu", "tpu")),
    variant=st.sampled_from(("a", "b")),
    devices=st.sampled_from((0, 1, 8)),
    labels=st.sampled_from(((), ("zone=a",), ("disk=ssd", "zone=a"))),
    resources=st.sampled_from(((), (("licence", 1),), (("licence", 2),))),
    elsewhere=st.sampled_from(((), ("w1",), ("w1", "w2"))),
    namespaces=st.sampled_from((("default",), ("other",))),
)


@given(_needs, _needs)
@settings(max_examples=200)
def test_of_no_room_follows_only_that_there_is_none_for_what_needs_as_much_of_all(
    declined: Capacity, need: Capacity
) -> None:
    """A worker that has just what `need` asks for may not have been asked, or have had too little for the other."""
    scheduler = Scheduler()
    scheduler.add(_position(1), declined)
    scheduler.add(_position(2), need)
    (out,) = scheduler.take(1)
    scheduler.on_declined(*out, room=False)
    is_offered = bool(scheduler.take(2))
    could_run = not fits(declined, need) or not set(declined.elsewhere) <= set(need.elsewhere)
    if could_run:
        assert is_offered, "it was held up by one that needs something else"
    elif declined.devices == 0 or (declined.device, declined.variant) == (need.device, need.variant):
        assert not is_offered


def test_it_is_known_which_tasks_are_out_and_of_which_need_no_more_may_be() -> None:
    scheduler, job = Scheduler(), _position(1).job
    assert not scheduler.is_full(SMALL)
    for number in (1, 2):
        scheduler.add(_position(number), SMALL)
    assert scheduler.is_idle(job, _position(1).task)
    (out,) = scheduler.take(1)
    assert not scheduler.is_idle(out[0].job, out[0].task)
    assert not scheduler.is_full(SMALL)
    scheduler.on_declined(*out, room=True)
    assert scheduler.is_idle(out[0].job, out[0].task)
    (again,) = scheduler.take(2)
    assert scheduler.is_full(SMALL), "where room is scarce one is out at a time"
    scheduler.remove(again[0].job, again[0].task)
    assert not scheduler.is_idle(again[0].job, again[0].task)
    assert not scheduler.is_full(SMALL)
