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
from fluster_services.controller.scheduling.order import Place, Starving, place_in_line
from fluster_services.controller.scheduling.scheduler import Scheduler
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.shares import Amount, Shares
from tests.pure.test_scheduler import _calls

A, B, C = Namespace("a"), Namespace("b"), Namespace("c")
SIZES = (1, 2, 4)
TOTAL = 16


def _need(namespace: Namespace, cpu: float) -> Capacity:
    return Capacity(cpu=cpu, memory=1, namespaces=(namespace,))


def _place(namespace: Namespace, order: int, priority: int = 0) -> Place:
    return Place(place_in_line(order, priority), 0, JobKey(namespace, JobId(f"job{order}")))


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
        self.waiting: dict[Place, Capacity] = {}
        self.out: dict[Place, Capacity] = {}
        self.gangs: dict[Place, int] = {}  # {gang that waits: how many tasks of 1 CPU}
        self.running: list[tuple[Place, Capacity]] = []
        self.most: dict[
            Namespace, float
        ] = {}  # {namespace with a quota: CPUs that it may have, or had when it was lowered}
        self.now = 0.0

    def _wake(self) -> None:
        self.woken = True

    def _used(self, namespace: Namespace) -> float:
        held = [need.cpu for place, need in self.running if place.job.namespace == namespace]
        return sum(held) + sum(need.cpu for place, need in self.out.items() if place.job.namespace == namespace)

    @property
    def free(self) -> float:
        return TOTAL - sum(need.cpu for _, need in self.running)

    @rule(namespace=st.sampled_from((A, B, C)), cpu=st.sampled_from(SIZES), priority=st.sampled_from((0, 0, 0, 5, -5)))
    def add(self, namespace: Namespace, cpu: float, priority: int) -> None:
        place = _place(namespace, next(self.orders), priority)
        self.waiting[place] = _need(namespace, cpu)
        self.scheduler.add(place, self.waiting[place], now=self.now)

    @rule(namespace=st.sampled_from((A, B)), count=st.integers(2, 6))
    def add_gang(self, namespace: Namespace, count: int) -> None:
        place = _place(namespace, next(self.orders))
        self.gangs[place] = count
        self.scheduler.add_gang(place, _need(namespace, 1), count)

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
        for place, need in taken:
            assert self.waiting[place] == need
            self.out[place] = need
        first = taken[0][0] if taken else None
        if first is not None:
            for place, need in self.waiting.items():
                if place in self.out or self._is_closed(need) or self.scheduler.is_full(need):
                    continue
                if place.job.namespace != first.job.namespace and self._band(place) == self._band(first):
                    # It may be held up by one of its own namespace for which the quota is kept.
                    if self.scheduler.order.has_quota(place, need):
                        assert before[place.job.namespace] >= before[first.job.namespace], f"{place} was passed over"
                elif self._band(place) < self._band(first):
                    assert not self.scheduler.order.has_quota(place, need), f"{place} has a higher priority"
        self.woken = False

    def _band(self, place: Place) -> int:
        return self.scheduler.order.turn(place)[0]

    def _is_closed(self, need: Capacity) -> bool:
        line = self.scheduler._lines.get(need)
        return line is None or line.closed

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.out)))
        need = self.out.pop(place)
        if need.cpu > self.free:
            self.scheduler.on_declined(place, need, room=False)
            return
        del self.waiting[place]
        self.scheduler.on_accepted(need, place, now=self.now)
        self.shares.take(place.job.namespace, need)  # as the index does when the record arrives
        self.running.append((place, need))
        self.scheduler.remove(place.job, place.task)

    @precondition(lambda self: self.gangs)
    @rule()
    def gather(self) -> None:
        """As a controller does: the first in turn that fits, and that its quota has room for."""
        for place, count in sorted(self.gangs.items(), key=lambda each: self.scheduler.order.turn(each[0])):
            need = _need(place.job.namespace, 1)
            if count > self.free or not self.scheduler.order.has_quota(place, need, count):
                continue
            self.scheduler.gangs.on_gathering(place.job)
            for task in range(count):
                self.shares.take(place.job.namespace, need)
                self.running.append((place, need))
                self.scheduler.gangs.on_no_offer(place.job, task)
            assert not self.scheduler.gangs.is_offered(place.job)
            self.scheduler.on_gathered(place.job, now=self.now)
            self.scheduler.remove_gang(place.job)
            del self.gangs[place]
            return

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        place, need = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.shares.give_back(place.job.namespace, need)
        if place.job.namespace in self.most:
            assert self.woken, "who waits for the quota is told"
        self.scheduler.on_room()
        self.now += 1

    @rule()
    def keep(self) -> None:
        """Room in quotas is kept for those that have been overtaken."""
        for starving in self.scheduler.starving(now=self.now, reserve_after_s=2):
            short = not self.scheduler.order.has_quota(starving.place, starving.need, starving.count)
            if short and self.shares.could_fit(starving.place.job.namespace, starving.need, starving.count):
                self.scheduler.order.keep_quota(starving)

    @rule()
    def reserve(self) -> None:
        for starving in self.scheduler.deserving(now=self.now, reserve_after_s=2):
            assert self.scheduler.order.has_quota(starving.place, starving.need, starving.count)
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
            for place in list(self.out):
                self._answer_now(place)
            if not self.waiting and not self.gangs:
                break
            for place, need in self.scheduler.take(8):
                self.out[place] = need
            if self.gangs:
                self.gather()
            if not self.out and self.running:
                place, need = self.running.pop()
                self.shares.give_back(place.job.namespace, need)
                self.scheduler.on_room()
            elif not self.out and not self.running:
                self.scheduler.order.on_quota(A)
                self.shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=8)))
        assert not self.waiting, "what may go is offered"
        assert not self.gangs

    def _answer_now(self, place: Place) -> None:
        need = self.out.pop(place)
        if need.cpu > self.free:
            self.scheduler.on_declined(place, need, room=False)
            return
        del self.waiting[place]
        self.scheduler.on_accepted(need, place, now=self.now)
        self.shares.take(place.job.namespace, need)
        self.running.append((place, need))
        self.scheduler.remove(place.job, place.task)


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
        scheduler.add(_place(namespace, order), _need(namespace, cpu))


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
        for place, need in scheduler.take(min(8, 60 - len(taken))):
            taken.append(place.job.namespace)
            scheduler.on_accepted(need, place)
            shares.take(place.job.namespace, need)
            scheduler.remove(place.job, place.task)
    assert Counter(taken) == expected


def test_what_counts_is_what_a_namespace_has_most_of() -> None:
    scheduler, shares = _scheduler()
    shares.on_total(Amount(100_000, 100, 10))
    for order in range(40):
        scheduler.add(_place(A, order), Capacity(cpu=1, device="gpu", devices=1, namespaces=(A,)))
        scheduler.add(_place(B, 100 + order), _need(B, 1))
    taken = Counter(place.job.namespace for place, _ in scheduler.take(33))
    assert taken == {A: 3, B: 30}, "three of 10 GPUs are as much as thirty of 100 CPUs"


def test_within_a_namespace_the_order_is_as_ever() -> None:
    scheduler, _ = _scheduler()
    for order, priority in ((1, 0), (2, 7), (3, 0), (4, 7)):
        scheduler.add(_place(A, order, priority), _need(A, 1))
        scheduler.add(_place(B, order + 10, priority), _need(B, 1))
    jobs = [place.job for place, _ in scheduler.take(8)]
    for namespace, start in ((A, 0), (B, 10)):
        ids = [job.job_id for job in jobs if job.namespace == namespace]
        assert ids == [f"job{start + order}" for order in (2, 4, 1, 3)]


def test_a_higher_priority_counts_beside_others_as_far_as_its_namespace_may() -> None:
    scheduler, shares = _scheduler()
    _fill(scheduler, A, 4)
    for order in range(10, 14):
        scheduler.add(_place(B, order, 1_000), _need(B, 1))
    assert Counter(place.job.namespace for place, _ in scheduler.take(4)) == {A: 2, B: 2}
    shares.on_namespace(NamespaceRecord(name=B, quota=NamespaceQuota(max_priority=10)))
    assert Counter(place.job.namespace for place, _ in scheduler.take(2)) == {B: 2}, "it is allowed to go first"


def test_a_lower_priority_goes_behind_whatever_others_have() -> None:
    scheduler, _ = _scheduler()
    _fill(scheduler, A, 6)
    scheduler.add(_place(B, 100, -1), _need(B, 1))
    assert [place.job.namespace for place, _ in scheduler.take(9)] == [A] * 6 + [B]


def test_one_of_as_much_need_waits_while_one_that_goes_first_is_out() -> None:
    """Else the room that two find at once might go to who has more."""
    scheduler, shares = _scheduler()
    for _ in range(10):
        shares.take(A, _need(A, 1))
    _fill(scheduler, A, 9)
    _fill(scheduler, B, 9, start=100)
    for place, need in scheduler.take(99):
        scheduler.on_declined(place, need, room=True)  # room is scarce: one of each may be out
    scheduler.add(_place(A, 200), _need(A, 0.5))
    assert [place.job for place, _ in scheduler.take(99)] == [_place(B, 100).job, _place(A, 200).job]


# ---- quotas ---------------------------------------------------------------------------------------------


def _with_quota(cpus: float) -> tuple[Scheduler, Shares]:
    scheduler, shares = _scheduler()
    shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=cpus)))
    return scheduler, shares


def _run(scheduler: Scheduler, shares: Shares, *, now: float = 0) -> list[tuple[Place, Capacity]]:
    """Place whatever may go."""
    placed = []
    while taken := scheduler.take(8):
        for place, need in taken:
            scheduler.on_accepted(need, place, now=now)
            shares.take(place.job.namespace, need)
            scheduler.remove(place.job, place.task)
        placed += taken
    return placed


def test_a_quota_keeps_its_own_tasks_waiting_and_no_one_elses() -> None:
    scheduler, shares = _with_quota(4)
    _fill(scheduler, A, 10)
    _fill(scheduler, B, 10, start=100)
    placed = _run(scheduler, shares)
    assert Counter(place.job.namespace for place, _ in placed) == {A: 4, B: 10}
    assert scheduler.take(9) == []
    shares.give_back(A, _need(A, 1))
    assert [place.job.job_id for place, _ in scheduler.take(9)] == ["job4"], "what ended makes room"
    shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=6)))
    assert len(scheduler.take(9)) == 2, "and a higher quota does"


def test_what_is_on_offer_counts() -> None:
    scheduler, _ = _with_quota(3)
    _fill(scheduler, A, 10)
    taken = scheduler.take(9)
    assert len(taken) == 3
    assert scheduler.take(9) == []
    place, _ = taken[0]
    scheduler.remove(place.job, place.task)
    assert len(scheduler.take(9)) == 1, "it was cancelled, and another may go"


def test_a_large_task_is_not_overtaken_for_ever_by_small_ones_of_its_own_namespace() -> None:
    scheduler, shares = _with_quota(4)
    _fill(scheduler, A, 4)
    small, ends = _run(scheduler, shares), 0
    large = _place(A, 50)
    scheduler.add(large, _need(A, 3), now=0)
    for now in range(100):
        scheduler.add(_place(A, 100 + now), _need(A, 1), now=now)
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
    scheduler.add(_place(A, 1), two)
    scheduler.order.keep_quota(Starving(_place(A, 1), two))
    scheduler.add(_place(A, 2), gpu)
    scheduler.add(_place(A, 3), _need(A, 6))
    scheduler.add(_place(A, 4), _need(A, 7))
    assert [place.job.job_id for place, _ in scheduler.take(9)] == ["job3"], "a CPU is left for the one that waits"


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
    gang = _place(A, 1)
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
        for place, need in taken:
            scheduler.on_declined(place, need, room=False)


def _deserving(scheduler: Scheduler, now: float = 30) -> list[Place]:
    return [each.place for each in scheduler.deserving(now=now, reserve_after_s=10)]


def _place_one(scheduler: Scheduler, shares: Shares, namespace: Namespace, order: int, *, now: float = 0) -> None:
    """One CPU is found by a task of the namespace, behind all that is there."""
    place, need = _place(namespace, order), _need(namespace, 1)
    scheduler.add(place, need, now=now)
    (taken,) = scheduler.take(1)
    assert taken == (place, need)
    scheduler.on_accepted(need, place, now=now)
    shares.take(namespace, need)
    scheduler.remove(place.job, place.task)


def test_a_task_is_overtaken_by_those_whose_namespace_has_more_and_by_no_other() -> None:
    scheduler, shares = _scheduler()
    for _ in range(10):
        shares.take(A, _need(A, 1))
    ours, theirs = _place(A, 1), _place(B, 2)
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
    ours = _place(A, 1)
    scheduler.add(ours, _need(A, 4))
    _decline_all(scheduler)
    _place_one(scheduler, shares, A, 50)
    assert _deserving(scheduler) == [ours]
    theirs = _place(B, 60)
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
    ours = _place(A, 1)
    scheduler.add(ours, _need(A, 4))
    _decline_all(scheduler)
    _place_one(scheduler, shares, A, 50)
    gang = _place(B, 60)
    scheduler.add_gang(gang, _need(B, 1), 4)
    assert _deserving(scheduler) == []
    _place_one(scheduler, shares, A, 61, now=20)
    assert _deserving(scheduler) == [gang, ours]


def test_nothing_is_kept_free_for_what_its_quota_has_no_room_for() -> None:
    scheduler, shares = _with_quota(4)
    ours = _place(A, 1)
    scheduler.add(ours, _need(A, 4))
    _decline_all(scheduler)
    _place_one(scheduler, shares, A, 2)
    assert _deserving(scheduler) == []
    assert [each.place for each in scheduler.starving(now=30, reserve_after_s=10)] == [ours]
    shares.give_back(A, _need(A, 1))
    (starving,) = scheduler.deserving(now=30, reserve_after_s=10)
    scheduler.reserve(starving)
    assert scheduler.order.kept_quota(A) == ours, "small ones of its namespace leave it its quota, too"
    scheduler.add(_place(A, 3), _need(A, 1))
    assert scheduler.take(9) == []
    assert not scheduler.is_short_of_quota(starving)
    shares.take(A, _need(A, 1))
    assert scheduler.is_short_of_quota(starving)


def test_a_worker_that_is_kept_free_is_so_for_others_of_its_priority_too() -> None:
    scheduler, shares = _scheduler()
    shares.on_namespace(NamespaceRecord(name=C, quota=NamespaceQuota(max_priority=5)))
    shares.take(A, _need(A, 4))
    scheduler.add(_place(A, 5), _need(A, 4))
    scheduler.reserve(Starving(_place(A, 5), _need(A, 4)))
    behind = {
        place: scheduler.is_behind_reserved(place)
        for place in (
            _place(A, 4),
            _place(A, 6),
            _place(B, 1),
            _place(B, 9),
            _place(B, 9, -1),
            _place(B, 9, 5),
            _place(C, 9, 5),
        )
    }
    assert list(behind.values()) == [False, True, True, True, True, True, False]
    assert scheduler.order.goes_before(_place(C, 9, 5), _place(A, 5))
    assert not scheduler.order.goes_before(_place(B, 1), _place(A, 5))


class _Pools:
    """Workers on which tasks of several namespaces come and go, by a clock."""

    def __init__(self, dice: random.Random, workers: int, cpus: float) -> None:
        self.dice = dice
        self.free = {f"w{each}": cpus for each in range(workers)}
        self.cpus = cpus
        self.scheduler, self.shares = _scheduler(workers * cpus)
        self.orders = itertools.count()
        self.running: list[tuple[float, str, Place, Capacity]] = []
        self.started: dict[Place, float] = {}
        self.cpu_s: defaultdict[Namespace, float] = defaultdict(float)
        self.waiting: Counter[Namespace] = Counter()
        self.kept_free = ""
        self.now = 0.0

    def add(self, namespace: Namespace, cpu: float) -> Place:
        place = _place(namespace, next(self.orders))
        self.waiting[namespace] += 1
        self.scheduler.add(place, _need(namespace, cpu), now=self.now)
        return place

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
            for place, need in taken:
                behind = scheduler.is_behind_reserved(place)
                free = [
                    name
                    for name, left in self.free.items()
                    if left >= need.cpu and not (behind and name == self.kept_free)
                ]
                if not free:
                    scheduler.on_declined(place, need, room=False)
                    continue
                worker = self.dice.choice(free)
                self.free[worker] -= need.cpu
                self.started[place] = self.now
                self.waiting[place.job.namespace] -= 1
                self.running.append((self.now + self.dice.uniform(2, 6), worker, place, need))
                scheduler.on_accepted(need, place, now=self.now)
                self.shares.take(place.job.namespace, need)
                scheduler.remove(place.job, place.task)

    def step(self) -> None:
        """Until the next task ends."""
        self.running.sort()
        ends, worker, place, need = self.running.pop(0)
        for *_, each, its_need in self.running:
            self.cpu_s[each.job.namespace] += its_need.cpu * (ends - self.now)
        self.now = ends
        self.free[worker] += need.cpu
        self.shares.give_back(place.job.namespace, need)
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
    large: Place | None = None
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
        ((place, need),) = scheduler.take(1)
        assert fits(need, Capacity(cpu=64, memory=64, namespaces=need.namespaces))
        scheduler.on_accepted(need, place, now=0)
        shares.take(place.job.namespace, need)
        scheduler.remove(place.job, place.task)
