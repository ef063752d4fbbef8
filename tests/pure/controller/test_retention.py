"""Which finished jobs are kept no longer."""

import random
from dataclasses import replace

from fluster_bus.messages import JobId, Namespace
from fluster_services.config import RecordLimits
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.sweeps.retention import Finished, RetentionPlan, ended_since

NS = Namespace("default")
LIMITS = RecordLimits(kept_s=100, max_finished=3, kept_at_least_s=10, sure_after_s=0)


def key(name: str, namespace: Namespace = NS) -> JobKey:
    return JobKey(namespace, JobId(name))


def plan_of(**finished: float) -> RetentionPlan:
    plan = RetentionPlan(LIMITS, began=0.0)
    for name, at in finished.items():
        plan.on_finished(key(name), Finished(at, at))
    return plan


def test_a_job_goes_when_its_time_is_over() -> None:
    plan = plan_of(b=20, a=0)
    assert plan.take_due(99, wall=99, limit=10) == []
    assert plan.take_due(100, wall=100, limit=10) == [key("a")]
    assert plan.take_due(100, wall=100, limit=10) == []
    assert plan.take_due(1_000, wall=1_000, limit=10) == [key("b")]
    assert len(plan) == 0


def test_of_too_many_the_longest_finished_go() -> None:
    plan = plan_of(a=3, b=1, c=2, d=4, e=5)
    assert plan.take_due(20, wall=20, limit=10) == [key("b"), key("c")]


def test_however_many_there_are_the_newest_stay_a_while() -> None:
    plan = plan_of(a=1, b=2, c=3, d=4, e=5)
    assert plan.take_due(11.5, wall=11.5, limit=10) == [key("a")]
    assert plan.take_due(11.5, wall=11.5, limit=10) == []
    assert plan.take_due(12, wall=12, limit=10) == [key("b")]
    assert plan.take_due(50, wall=50, limit=10) == []


def test_no_more_are_taken_than_asked_for() -> None:
    plan = plan_of(a=1, b=2, c=3)
    assert plan.take_due(1_000, wall=1_000, limit=2) == [key("a"), key("b")]
    assert plan.take_due(1_000, wall=1_000, limit=2) == [key("c")]


def test_what_was_forgotten_or_told_twice_counts_once() -> None:
    plan = plan_of(a=1, b=2)
    plan.on_finished(key("a"), Finished(1, 1))
    plan.on_finished(key("b"), Finished(3, 3))  # its record was read again
    plan.forget(key("a"))
    plan.forget(key("nobody"))
    assert len(plan) == 1
    assert plan.take_due(1_000, wall=1_000, limit=10) == [key("b")]


def test_namespaces_are_counted_apart() -> None:
    plan = plan_of(a=1, b=2, c=3)
    plan.on_finished(key("a", Namespace("other")), Finished(1, 1))
    assert plan.take_due(50, wall=50, limit=10) == []


def test_a_clock_that_went_back_removes_nothing() -> None:
    assert plan_of(a=500).take_due(0, wall=0, limit=10) == []


DAYS_S = 8 * 86_400.0


def test_when_a_job_ended_is_as_late_as_either_clock_has_it() -> None:
    assert ended_since(50, wall_age_s=20, bus_age_s=DAYS_S) == 30
    assert ended_since(50, wall_age_s=DAYS_S, bus_age_s=20) == 30
    assert ended_since(50, wall_age_s=-DAYS_S, bus_age_s=20) == 50


def test_a_wall_clock_that_is_set_days_ahead_removes_nothing() -> None:
    plan = plan_of(a=1, b=2)
    assert plan.take_due(50, wall=50 + DAYS_S, limit=10) == []
    assert plan.take_due(101, wall=101 + DAYS_S, limit=10) == [key("a")]


def test_a_clock_that_was_wrong_at_the_start_is_not_believed_when_it_is_put_right() -> None:
    plan = RetentionPlan(replace(LIMITS, sure_after_s=60), began=0.0)
    plan.on_finished(key("a"), Finished(at=1_000, since=ended_since(1, wall_age_s=DAYS_S, bus_age_s=DAYS_S)))
    assert plan.take_due(59, wall=1_059 + DAYS_S, limit=10) == []
    assert plan.take_due(60, wall=1_060, limit=10) == []
    assert plan.take_due(99, wall=1_099, limit=10) == []
    assert plan.take_due(100, wall=1_100, limit=10) == [key("a")]


def test_that_there_are_too_many_is_no_matter_of_clocks() -> None:
    plan = RetentionPlan(replace(LIMITS, sure_after_s=60), began=100.0)
    for number in range(5):
        plan.on_finished(key(str(number)), Finished(at=1_000, since=100 - DAYS_S + number))
    assert plan.take_due(109, wall=1_000, limit=10) == []
    assert plan.take_due(110, wall=1_000, limit=10) == [key("0"), key("1")]


def test_what_could_not_be_removed_is_due_again() -> None:
    plan = plan_of(a=1)
    assert plan.take_due(101, wall=101, limit=10) == [key("a")]
    plan.put_back(key("a"))
    plan.put_back(key("nobody"))
    assert plan.take_due(101, wall=101, limit=10) == [key("a")]
    plan.forget(key("a"))
    plan.put_back(key("a"))
    assert len(plan) == 0


def test_any_history_keeps_within_the_limits() -> None:
    chance = random.Random(7)
    for _ in range(300):
        plan = RetentionPlan(LIMITS, began=0.0)
        alive: dict[JobKey, float] = {}
        now = 0.0
        for number in range(60):
            now += chance.expovariate(0.3)
            if chance.random() < 0.7:
                alive[key(f"j{number}")] = now
                plan.on_finished(key(f"j{number}"), Finished(now, now))
            elif alive:
                gone = chance.choice(list(alive))
                del alive[gone]
                plan.forget(gone)
            taken = plan.take_due(now, wall=now, limit=1_000)
            ended = [alive.pop(each) for each in taken]
            assert ended == sorted(ended)
            assert all(now - at < LIMITS.kept_s for at in alive.values())
            young = sum(now - at < LIMITS.kept_at_least_s for at in alive.values())
            assert len(alive) <= max(LIMITS.max_finished, young)
            assert len(plan) == len(alive)
