"""Several namespaces in one queue: none has more than its quota, each has its turn, and nothing that may go is forgotten."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fluster_bus.messages import Capacity, JobId, Namespace
from fluster_bus.messages.namespaces import NamespaceQuota, NamespaceRecord
from fluster_services.capacity import fits
from fluster_services.controller.scheduling.order import Position, Starving, position_in_line
from fluster_services.controller.scheduling.scheduler import Scheduler
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.shares import Amount, Shares
from tests.pure.controller.test_scheduler import _calls

A, B, C = Namespace("a"), Namespace("b"), Namespace("c")
SIZES = (1, 2, 4)
TOTAL = 16


def _need(namespace: Namespace, cpu: float) -> Capacity:
    return Capacity(cpu=cpu, memory=1, namespaces=(namespace,))


def _position(namespace: Namespace, order: int, priority: int = 0) -> Position:
    return Position(position_in_line(order, priority), 0, JobKey(namespace, JobId(f"job{order}")))


class Tenants(RuleBasedStateMachine):
    """A cluster of one pool of 16 CPUs, whose offers are answered one after the other, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares()
        self.shares.on_total(Amount(TOTAL * 1_000, TOTAL, 0))
        self.woken = False
        self.shares.on_freed = self._wake
        self.scheduler = Scheduler(self.shares)
        self.orders = itertools.count(1)
        self.waiting: dict[Position, Capacity] = {}
        self.out: dict[Position, Capacity] = {}
        self.gangs: dict[Position, int] = {}  # {gang that waits: how many tasks of 1 CPU}
        self.running: list[tuple[Position, Capacity]] = []
        self.most: dict[
            Namespace, float
        ] = {}  # {namespace with a quota: CPUs that it may have, or had when it was lowered}
        self.now = 0.0

    def _wake(self) -> None:
        self.woken = True

    def _used(self, namespace: Namespace) -> float:
        held = [need.cpu for position, need in self.running if position.job.namespace == namespace]
        return sum(held) + sum(need.cpu for position, need in self.out.items() if position.job.namespace == namespace)

    @property
    def free(self) -> float:
        return TOTAL - sum(need.cpu for _, need in self.running)

    @rule(namespace=st.sampled_from((A, B, C)), cpu=st.sampled_from(SIZES), priority=st.sampled_from((0, 0, 0, 5, -5)))
    def add(self, namespace: Namespace, cpu: float, priority: int) -> None:
        position = _position(namespace, next(self.orders), priority)
        self.waiting[position] = _need(namespace, cpu)
        self.scheduler.add(position, self.waiting[position], now=self.now)

    @rule(namespace=st.sampled_from((A, B)), count=st.integers(2, 6))
    def add_gang(self, namespace: Namespace, count: int) -> None:
        position = _position(namespace, next(self.orders))
        self.gangs[position] = count
        self.scheduler.add_gang(position, _need(namespace, 1), count)

    @rule(cpus=st.sampled_from((None, 0, 2, 4, 6)), weight=st.sampled_from((1.0, 1.0, 3.0)))
    def set_quota(self, cpus: float | None, weight: float) -> None:
        quota = NamespaceQuota(cpus=cpus, max_priority=5)
        self.scheduler.order.on_quota(A)
        self.shares.on_namespace(NamespaceRecord(name=A, quota=quota, weight=weight))
        self.most = {} if cpus is None else {A: max(cpus, self._used(A))}

    @rule(limit=st.integers(1, 6))
    def take(self, limit: int) -> None:
        """The first that is taken has least of what is there to take, of those that may go."""
        before = {each: self.shares.weighed(each) for each in (A, B, C)}
        taken = self.scheduler.take(limit)
        for position, need in taken:
            assert self.waiting[position] == need
            self.out[position] = need
        first = taken[0][0] if taken else None
        if first is not None:
            for position, need in self.waiting.items():
                if position in self.out or self._is_closed(need) or self.scheduler.is_full(need):
                    continue
                if position.job.namespace != first.job.namespace and self._band(position) == self._band(first):
                    # It may be held up by one of its own namespace for which the quota is kept.
                    if self.scheduler.order.has_quota(position, need):
                        assert before[position.job.namespace] >= before[first.job.namespace], (
                            f"{position} was passed over"
                        )
                elif self._band(position) < self._band(first):
                    assert not self.scheduler.order.has_quota(position, need), f"{position} has a higher priority"
        self.woken = False

    def _band(self, position: Position) -> int:
        return self.scheduler.order.rank(position)[0]

    def _is_closed(self, need: Capacity) -> bool:
        line = self.scheduler._lines.get(need)  # noqa: SLF001 - whether a class of tasks waits for room, as the scheduler knows
        return line is None or line.closed

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.out)))
        need = self.out.pop(position)
        if need.cpu > self.free:
            self.scheduler.on_declined(position, need, room=False)
            return
        del self.waiting[position]
        self.scheduler.on_accepted(need, position, now=self.now)
        self.shares.take(position.job.namespace, need)  # as the index does when the record arrives
        self.running.append((position, need))
        self.scheduler.remove(position.job, position.task)

    @precondition(lambda self: self.gangs)
    @rule()
    def gather(self) -> None:
        """As a controller does: the first in turn that fits, and that its quota has room for."""
        for position, count in sorted(self.gangs.items(), key=lambda each: self.scheduler.order.rank(each[0])):
            need = _need(position.job.namespace, 1)
            if count > self.free or not self.scheduler.order.has_quota(position, need, count):
                continue
            self.scheduler.gangs.on_gathering(position.job)
            for task in range(count):
                self.shares.take(position.job.namespace, need)
                self.running.append((position, need))
                self.scheduler.gangs.on_no_offer(position.job, task)
            assert not self.scheduler.gangs.is_offered(position.job)
            self.scheduler.on_gathered(position.job, now=self.now)
            self.scheduler.remove_gang(position.job)
            del self.gangs[position]
            return

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        position, need = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.shares.give_back(position.job.namespace, need)
        if position.job.namespace in self.most:
            assert self.woken, "who waits for the quota is told"
        self.scheduler.on_room()
        self.now += 1

    @rule()
    def keep(self) -> None:
        """Room in quotas is kept for those that have been overtaken."""
        for starving in self.scheduler.starving(now=self.now, reserve_after_s=2):
            short = not self.scheduler.order.has_quota(starving.position, starving.need, starving.count)
            if short and self.shares.could_fit(starving.position.job.namespace, starving.need, starving.count):
                self.scheduler.order.keep_quota(starving)

    @rule()
    def reserve(self) -> None:
        for starving in self.scheduler.deserving(now=self.now, reserve_after_s=2):
            assert self.scheduler.order.has_quota(starving.position, starving.need, starving.count)
            if self.scheduler.reserved is None:
                self.scheduler.reserve(starving)
                break

    @invariant()
    def no_namespace_has_more_than_its_quota(self) -> None:
        for namespace, most in self.most.items():
            assert self._used(namespace) <= most
        for namespace in (A, B, C):
            assert self.shares.used(namespace).milli_cpus == 1_000 * self._used(namespace)

    @invariant()
    def sane(self) -> None:
        self.scheduler.sanity_check()

    def teardown(self) -> None:
        """Let everything end, and raise the quota: nothing is left waiting."""
        for _ in range(10_000):
            for position in list(self.out):
                self._answer_now(position)
            if not self.waiting and not self.gangs:
                break
            for position, need in self.scheduler.take(8):
                self.out[position] = need
            if self.gangs:
                self.gather()
            if not self.out and self.running:
                position, need = self.running.pop()
                self.shares.give_back(position.job.namespace, need)
                self.scheduler.on_room()
            elif not self.out and not self.running:
                self.scheduler.order.on_quota(A)
                self.shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=8)))
        assert not self.waiting, "what may go is offered"
        assert not self.gangs

    def _answer_now(self, position: Position) -> None:
        need = self.out.pop(position)
        if need.cpu > self.free:
            self.scheduler.on_declined(position, need, room=False)
            return
        del self.waiting[position]
        self.scheduler.on_accepted(need, position, now=self.now)
        self.shares.take(position.job.namespace, need)
        self.running.append((position, need))
        self.scheduler.remove(position.job, position.task)


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=100, stateful_step_count=60)


# ---- turns ----------------------------------------------------------------------------------------------


def _scheduler(total: float = 100, **weights: float) -> tuple[Scheduler, Shares]:
    shares = Shares()
    shares.on_total(Amount(total * 1_000, 0, 0))
    for name, weight in weights.items():
        shares.on_namespace(NamespaceRecord(name=Namespace(name), weight=weight))
    return Scheduler(shares), shares


def _fill(scheduler: Scheduler, namespace: Namespace, count: int, *, cpu: float = 1, start: int = 0) -> None:
    for order in range(start, start + count):
        scheduler.add(_position(namespace, order), _need(namespace, cpu))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [({}, {A: 30, B: 30}), ({"a": 1, "b": 2}, {A: 20, B: 40}), ({"a": 0.5, "b": 0.25}, {A: 40, B: 20})],
)
def test_who_waits_is_taken_in_proportion_to_weights_whoever_came_first(
    weights: dict[str, float], expected: dict[Namespace, int]
) -> None:
    scheduler, shares = _scheduler(**weights)
    _fill(scheduler, A, 100)
    _fill(scheduler, B, 100, start=100)
    taken: list[Namespace] = []
    while len(taken) < 60:
        for position, need in scheduler.take(min(8, 60 - len(taken))):
            taken.append(position.job.namespace)
            scheduler.on_accepted(need, position)
            shares.take(position.job.namespace, need)
            scheduler.remove(position.job, position.task)
    assert Counter(taken) == expected


def test_what_counts_is_what_a_namespace_has_most_of() -> None:
    scheduler, shares = _scheduler()
    shares.on_total(Amount(100_000, 100, 10))
    for order in range(40):
        scheduler.add(_position(A, order), Capacity(cpu=1, device="gpu", devices=1, namespaces=(A,)))
        scheduler.add(_position(B, 100 + order), _need(B, 1))
    taken = Counter(position.job.namespace for position, _ in scheduler.take(33))
    assert taken == {A: 3, B: 30}, "three of 10 GPUs are as much as thirty of 100 CPUs"


def test_within_a_namespace_the_order_is_as_ever() -> None:
    scheduler, _ = _scheduler()
    for order, priority in ((1, 0), (2, 7), (3, 0), (4, 7)):
        scheduler.add(_position(A, order, priority), _need(A, 1))
        scheduler.add(_position(B, order + 10, priority), _need(B, 1))
    jobs = [position.job for position, _ in scheduler.take(8)]
    for namespace, start in ((A, 0), (B, 10)):
        ids = [job.job_id for job in jobs if job.namespace == namespace]
        assert ids == [f"job{start + order}" for order in (2, 4, 1, 3)]


def test_a_higher_priority_counts_beside_others_as_far_as_its_namespace_may() -> None:
    scheduler, shares = _scheduler()
    _fill(scheduler, A, 4)
    for order in range(10, 14):
        scheduler.add(_position(B, order, 1_000), _need(B, 1))
    assert Counter(position.job.namespace for position, _ in scheduler.take(4)) == {A: 2, B: 2}
    shares.on_namespace(NamespaceRecord(name=B, quota=NamespaceQuota(max_priority=10)))
    assert Counter(position.job.namespace for position, _ in scheduler.take(2)) == {B: 2}, "it is allowed to go first"


def test_a_lower_priority_goes_behind_whatever_others_have() -> None:
    scheduler, _ = _scheduler()
    _fill(scheduler, A, 6)
    scheduler.add(_position(B, 100, -1), _need(B, 1))
    assert [position.job.namespace for position, _ in scheduler.take(9)] == [A] * 6 + [B]


def test_one_of_as_much_need_waits_while_one_that_goes_first_is_out() -> None:
    """Else the room that two find at once might go to who has more."""
    scheduler, shares = _scheduler()
    for _ in range(10):
        shares.take(A, _need(A, 1))
    _fill(scheduler, A, 9)
    _fill(scheduler, B, 9, start=100)
    for position, need in scheduler.take(99):
        scheduler.on_declined(position, need, room=True)  # room is scarce: one of each may be out
    scheduler.add(_position(A, 200), _need(A, 0.5))
    assert [position.job for position, _ in scheduler.take(99)] == [_position(B, 100).job, _position(A, 200).job]


# ---- quotas ---------------------------------------------------------------------------------------------


def _with_quota(cpus: float) -> tuple[Scheduler, Shares]:
    scheduler, shares = _scheduler()
    shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=cpus)))
    return scheduler, shares


def _run(scheduler: Scheduler, shares: Shares, *, now: float = 0) -> list[tuple[Position, Capacity]]:
    """Place whatever may go."""
    placed = []
    while taken := scheduler.take(8):
        for position, need in taken:
            scheduler.on_accepted(need, position, now=now)
            shares.take(position.job.namespace, need)
            scheduler.remove(position.job, position.task)
        placed += taken
    return placed


def test_a_quota_keeps_its_own_tasks_waiting_and_no_one_elses() -> None:
    scheduler, shares = _with_quota(4)
    _fill(scheduler, A, 10)
    _fill(scheduler, B, 10, start=100)
    placed = _run(scheduler, shares)
    assert Counter(position.job.namespace for position, _ in placed) == {A: 4, B: 10}
    assert scheduler.take(9) == []
    shares.give_back(A, _need(A, 1))
    assert [position.job.job_id for position, _ in scheduler.take(9)] == ["job4"], "what ended makes room"
    shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=6)))
    assert len(scheduler.take(9)) == 2, "and a higher quota does"


def test_what_is_on_offer_counts() -> None:
    scheduler, _ = _with_quota(3)
    _fill(scheduler, A, 10)
    taken = scheduler.take(9)
    assert len(taken) == 3
    assert scheduler.take(9) == []
    position, _ = taken[0]
    scheduler.remove(position.job, position.task)
    assert len(scheduler.take(9)) == 1, "it was cancelled, and another may go"


def test_a_large_task_is_not_overtaken_for_ever_by_small_ones_of_its_own_namespace() -> None:
    scheduler, shares = _with_quota(4)
    _fill(scheduler, A, 4)
    small, ends = _run(scheduler, shares), 0
    large = _position(A, 50)
    scheduler.add(large, _need(A, 3), now=0)
    for now in range(100):
        scheduler.add(_position(A, 100 + now), _need(A, 1), now=now)
        _, need = small.pop(0)
        shares.give_back(A, need)
        ends += 1
        placed = _run(scheduler, shares, now=now)
        small += placed
        if large in [each for each, _ in placed]:
            break
        assert bool(placed) is (now <= 10), "it goes on with the small ones until the large one has waited for 10 s"
        for starving in scheduler.starving(now=now, reserve_after_s=10):
            assert starving == Starving(large, _need(A, 3))
            scheduler.order.keep_quota(starving)
    assert ends == 14, "two ends more, and there is room for it"
    scheduler.sanity_check()
    assert scheduler.order.kept_quota(A) is None


def test_what_takes_nothing_that_is_short_goes_on_beside_what_is_kept() -> None:
    scheduler, shares = _scheduler()
    shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=8, gpus=2)))
    gpu = Capacity(cpu=1, device="gpu", devices=1, namespaces=(A,))
    two = gpu.model_copy(update={"devices": 2})
    shares.take(A, gpu)
    scheduler.add(_position(A, 1), two)
    scheduler.order.keep_quota(Starving(_position(A, 1), two))
    scheduler.add(_position(A, 2), gpu)
    scheduler.add(_position(A, 3), _need(A, 6))
    scheduler.add(_position(A, 4), _need(A, 7))
    assert [position.job.job_id for position, _ in scheduler.take(9)] == ["job3"], (
        "a CPU is left for the one that waits"
    )


def test_a_lower_quota_stops_nothing_and_nothing_more_begins() -> None:
    scheduler, shares = _with_quota(8)
    _fill(scheduler, A, 20)
    assert len(_run(scheduler, shares)) == 8
    shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=4)))
    for _ in range(4):
        shares.give_back(A, _need(A, 1))
        assert scheduler.take(9) == []
    shares.give_back(A, _need(A, 1))
    assert len(scheduler.take(9)) == 1


def test_a_gang_has_all_of_its_quota_or_waits() -> None:
    scheduler, shares = _with_quota(4)
    gang = _position(A, 1)
    shares.take(A, _need(A, 1))
    scheduler.add_gang(gang, _need(A, 1), 4)
    assert not scheduler.order.has_quota(gang, _need(A, 1), 4)
    shares.give_back(A, _need(A, 1))
    assert scheduler.order.has_quota(gang, _need(A, 1), 4)
    _fill(scheduler, A, 1, start=10)
    scheduler.gangs.on_gathering(gang.job)
    assert scheduler.take(9) == [], "it has all of it while it is gathered"
    assert scheduler.gangs.is_offered(gang.job)
    scheduler.gangs.on_gathering(gang.job)
    for task in range(4):
        assert shares.used(A).milli_cpus == 4_000 - 1_000 * task
        scheduler.gangs.on_no_offer(gang.job, task)
        scheduler.gangs.on_no_offer(gang.job, task)
    assert len(scheduler.take(9)) == 1
    scheduler.gangs.on_gathering(gang.job)
    scheduler.remove_gang(gang.job)
    assert shares.used(A).milli_cpus == 1_000
    scheduler.sanity_check()


# ---- reservations ---------------------------------------------------------------------------------------


def _decline_all(scheduler: Scheduler) -> None:
    while taken := scheduler.take(9):
        for position, need in taken:
            scheduler.on_declined(position, need, room=False)


def _deserving(scheduler: Scheduler, now: float = 30) -> list[Position]:
    return [each.position for each in scheduler.deserving(now=now, reserve_after_s=10)]


def _place_one(scheduler: Scheduler, shares: Shares, namespace: Namespace, order: int, *, now: float = 0) -> None:
    """One CPU is found by a task of the namespace, behind all that is there."""
    position, need = _position(namespace, order), _need(namespace, 1)
    scheduler.add(position, need, now=now)
    (taken,) = scheduler.take(1)
    assert taken == (position, need)
    scheduler.on_accepted(need, position, now=now)
    shares.take(namespace, need)
    scheduler.remove(position.job, position.task)


def test_a_task_is_overtaken_by_those_whose_namespace_has_more_and_by_no_other() -> None:
    scheduler, shares = _scheduler()
    for _ in range(10):
        shares.take(A, _need(A, 1))
    ours, theirs = _position(A, 1), _position(B, 2)
    scheduler.add(ours, _need(A, 4))
    _decline_all(scheduler)
    _place_one(scheduler, shares, B, 50)
    assert _deserving(scheduler) == [], "that has less, so it went first"
    scheduler.add(theirs, _need(B, 4))
    _decline_all(scheduler)
    _place_one(scheduler, shares, A, 51)
    assert _deserving(scheduler)[0] == theirs


def test_no_worker_is_kept_free_for_who_has_more_while_another_waits() -> None:
    scheduler, shares = _scheduler()
    for _ in range(10):
        shares.take(A, _need(A, 1))
    ours = _position(A, 1)
    scheduler.add(ours, _need(A, 4))
    _decline_all(scheduler)
    _place_one(scheduler, shares, A, 50)
    assert _deserving(scheduler) == [ours]
    theirs = _position(B, 60)
    scheduler.add(theirs, _need(B, 3))
    _decline_all(scheduler)
    assert _deserving(scheduler) == [], "that goes first"
    _place_one(scheduler, shares, A, 61, now=30)
    assert _deserving(scheduler, 40) == [theirs, ours], "it has been overtaken for long itself, and comes first"
    scheduler.remove(theirs.job, 0)
    assert _deserving(scheduler) == [ours]


def test_a_gang_of_another_that_has_less_is_not_passed_over_either() -> None:
    scheduler, shares = _scheduler()
    for _ in range(10):
        shares.take(A, _need(A, 1))
    ours = _position(A, 1)
    scheduler.add(ours, _need(A, 4))
    _decline_all(scheduler)
    _place_one(scheduler, shares, A, 50)
    gang = _position(B, 60)
    scheduler.add_gang(gang, _need(B, 1), 4)
    assert _deserving(scheduler) == []
    _place_one(scheduler, shares, A, 61, now=20)
    assert _deserving(scheduler) == [gang, ours]


def test_nothing_is_kept_free_for_what_its_quota_has_no_room_for() -> None:
    scheduler, shares = _with_quota(4)
    ours = _position(A, 1)
    scheduler.add(ours, _need(A, 4))
    _decline_all(scheduler)
    _place_one(scheduler, shares, A, 2)
    assert _deserving(scheduler) == []
    assert [each.position for each in scheduler.starving(now=30, reserve_after_s=10)] == [ours]
    shares.give_back(A, _need(A, 1))
    (starving,) = scheduler.deserving(now=30, reserve_after_s=10)
    scheduler.reserve(starving)
    assert scheduler.order.kept_quota(A) == ours, "small ones of its namespace leave it its quota, too"
    scheduler.add(_position(A, 3), _need(A, 1))
    assert scheduler.take(9) == []
    assert not scheduler.is_short_of_quota(starving)
    shares.take(A, _need(A, 1))
    assert scheduler.is_short_of_quota(starving)


def test_a_worker_that_is_kept_free_is_so_for_others_of_its_priority_too() -> None:
    scheduler, shares = _scheduler()
    shares.on_namespace(NamespaceRecord(name=C, quota=NamespaceQuota(max_priority=5)))
    shares.take(A, _need(A, 4))
    scheduler.add(_position(A, 5), _need(A, 4))
    scheduler.reserve(Starving(_position(A, 5), _need(A, 4)))
    behind = {
        position: scheduler.is_behind_reserved(position)
        for position in (
            _position(A, 4),
            _position(A, 6),
            _position(B, 1),
            _position(B, 9),
            _position(B, 9, -1),
            _position(B, 9, 5),
            _position(C, 9, 5),
        )
    }
    assert list(behind.values()) == [False, True, True, True, True, True, False]
    assert scheduler.order.goes_before(_position(C, 9, 5), _position(A, 5))
    assert not scheduler.order.goes_before(_position(B, 1), _position(A, 5))


class _Pools:
    """Workers on which tasks of several namespaces come and go, by a clock."""

    def __init__(self, dice: random.Random, workers: int, cpus: float) -> None:
        self.dice = dice
        self.free = {f"w{each}": cpus for each in range(workers)}
        self.cpus = cpus
        self.scheduler, self.shares = _scheduler(workers * cpus)
        self.orders = itertools.count()
        self.running: list[tuple[float, str, Position, Capacity]] = []
        self.started: dict[Position, float] = {}
        self.cpu_s: defaultdict[Namespace, float] = defaultdict(float)
        self.waiting: Counter[Namespace] = Counter()
        self.kept_free = ""
        self.now = 0.0

    def add(self, namespace: Namespace, cpu: float) -> Position:
        position = _position(namespace, next(self.orders))
        self.waiting[namespace] += 1
        self.scheduler.add(position, _need(namespace, cpu), now=self.now)
        return position

    def dispatch(self) -> None:
        scheduler = self.scheduler
        while True:
            for starving in scheduler.deserving(now=self.now, reserve_after_s=10):
                if scheduler.reserved is None:
                    self.kept_free = max(self.free, key=lambda worker: self.free[worker])
                    scheduler.reserve(starving)
            taken = scheduler.take(4)
            if not taken:
                return
            for position, need in taken:
                behind = scheduler.is_behind_reserved(position)
                free = [
                    name
                    for name, left in self.free.items()
                    if left >= need.cpu and not (behind and name == self.kept_free)
                ]
                if not free:
                    scheduler.on_declined(position, need, room=False)
                    continue
                worker = self.dice.choice(free)
                self.free[worker] -= need.cpu
                self.started[position] = self.now
                self.waiting[position.job.namespace] -= 1
                self.running.append((self.now + self.dice.uniform(2, 6), worker, position, need))
                scheduler.on_accepted(need, position, now=self.now)
                self.shares.take(position.job.namespace, need)
                scheduler.remove(position.job, position.task)

    def step(self) -> None:
        """Until the next task ends."""
        self.running.sort()
        ends, worker, position, need = self.running.pop(0)
        for *_, each, its_need in self.running:
            self.cpu_s[each.job.namespace] += its_need.cpu * (ends - self.now)
        self.now = ends
        self.free[worker] += need.cpu
        self.shares.give_back(position.job.namespace, need)
        self.scheduler.on_room()


@pytest.mark.parametrize("seed", range(6))
def test_who_floods_the_queue_with_large_and_small_tasks_has_no_more_than_its_share(seed: int) -> None:
    """Team A was there first, has tens of times as much waiting, and large tasks that are overtaken by its small ones."""
    pools = _Pools(random.Random(seed), 4, 8)
    for _ in range(300):
        pools.add(A, pools.dice.choice((1, 1, 8)))
    pools.dispatch()
    while pools.now < 100:
        while pools.waiting[A] < 300:
            pools.add(A, pools.dice.choice((1, 1, 8)))
        while pools.waiting[B] < 10:
            pools.add(B, 1)
        pools.dispatch()
        pools.step()
        if pools.now < 10:
            pools.cpu_s.clear()  # what was there before team B came runs to its end
    shares = pools.cpu_s[B] / sum(pools.cpu_s.values())
    assert 0.45 < shares < 0.75, "what is kept free for the large tasks costs team A some of its own"
    pools.scheduler.sanity_check()


@pytest.mark.parametrize("seed", range(6))
def test_a_large_task_gets_its_turn_beside_a_namespace_of_small_ones(seed: int) -> None:
    pools = _Pools(random.Random(seed), 2, 4)
    large: Position | None = None
    while pools.now < 120 and (large is None or large not in pools.started):
        while pools.waiting[B] < 20:
            pools.add(B, 1)
        if pools.now > 10 and large is None:
            large = pools.add(A, 4)
        pools.dispatch()
        pools.step()
    assert large is not None
    assert pools.started[large] < 40, "10 s until it is overtaken for too long, then what runs on a worker ends"


# ---- cost -----------------------------------------------------------------------------------------------


def test_the_cost_of_a_task_does_not_grow_with_the_queue_of_any_namespace() -> None:
    costs = []
    for tasks in (100, 1_000):
        scheduler, shares = _scheduler(1_000)
        shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=10)))
        for number, namespace in enumerate((A, B, C)):
            _fill(scheduler, namespace, tasks, start=number * tasks)
        costs.append(_calls(partial(_place_some, scheduler, shares)))
    assert costs[1] < 1.2 * costs[0]


def _place_some(scheduler: Scheduler, shares: Shares) -> None:
    for _ in range(50):
        ((position, need),) = scheduler.take(1)
        assert fits(need, Capacity(cpu=64, memory=64, namespaces=need.namespaces))
        scheduler.on_accepted(need, position, now=0)
        shares.take(position.job.namespace, need)
        scheduler.remove(position.job, position.task)
