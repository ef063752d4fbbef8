"""Which finished jobs are kept no longer."""

import random

from fluster_bus.messages import JobId, Namespace
from fluster_services.config import RecordLimits
from fluster_services.controller.books import JobKey
from fluster_services.controller.retention import RetentionPlan

NS = Namespace("default")
LIMITS = RecordLimits(kept_s=100, max_finished=3, kept_at_least_s=10)


def key(name: str, namespace: Namespace = NS) -> JobKey:
    return JobKey(namespace, JobId(name))


def plan_of(**finished: float) -> RetentionPlan:
    plan = RetentionPlan(LIMITS)
    for name, at in finished.items():
        plan.on_finished(key(name), at)
    return plan


def test_a_job_goes_when_its_time_is_over() -> None:
    plan = plan_of(b=20, a=0)
    assert plan.take_due(99, limit=10) == []
    assert plan.take_due(100, limit=10) == [key("a")]
    assert plan.take_due(100, limit=10) == []
    assert plan.take_due(1_000, limit=10) == [key("b")]
    assert len(plan) == 0


def test_of_too_many_the_longest_finished_go() -> None:
    plan = plan_of(a=3, b=1, c=2, d=4, e=5)
    assert plan.take_due(20, limit=10) == [key("b"), key("c")]


def test_however_many_there_are_the_newest_stay_a_while() -> None:
    plan = plan_of(a=1, b=2, c=3, d=4, e=5)
    assert plan.take_due(11.5, limit=10) == [key("a")]
    assert plan.take_due(11.5, limit=10) == []
    assert plan.take_due(12, limit=10) == [key("b")]
    assert plan.take_due(50, limit=10) == []


def test_no_more_are_taken_than_asked_for() -> None:
    plan = plan_of(a=1, b=2, c=3)
    assert plan.take_due(1_000, limit=2) == [key("a"), key("b")]
    assert plan.take_due(1_000, limit=2) == [key("c")]


def test_what_was_forgotten_or_told_twice_counts_once() -> None:
    plan = plan_of(a=1, b=2)
    plan.on_finished(key("a"), 1)
    plan.on_finished(key("b"), 3)  # its record was read again
    plan.forget(key("a"))
    plan.forget(key("nobody"))
    assert len(plan) == 1
    assert plan.take_due(1_000, limit=10) == [key("b")]


def test_namespaces_are_counted_apart() -> None:
    plan = plan_of(a=1, b=2, c=3)
    plan.on_finished(key("a", Namespace("other")), 1)
    assert plan.take_due(50, limit=10) == []


def test_a_clock_that_went_back_removes_nothing() -> None:
    assert plan_of(a=500).take_due(0, limit=10) == []


def test_any_history_keeps_within_the_limits() -> None:
    chance = random.Random(7)
    for _ in range(300):
        plan = RetentionPlan(LIMITS)
        alive: dict[JobKey, float] = {}
        now = 0.0
        for number in range(60):
            now += chance.expovariate(0.3)
            if chance.random() < 0.7:
                alive[key(f"j{number}")] = now
                plan.on_finished(key(f"j{number}"), now)
            elif alive:
                gone = chance.choice(list(alive))
                del alive[gone]
                plan.forget(gone)
            taken = plan.take_due(now, limit=1_000)
            ended = [alive.pop(each) for each in taken]
            assert ended == sorted(ended)
            assert all(now - at < LIMITS.kept_s for at in alive.values())
            young = sum(now - at < LIMITS.kept_at_least_s for at in alive.values())
            assert len(alive) <= max(LIMITS.max_finished, young)
            assert len(plan) == len(alive)
