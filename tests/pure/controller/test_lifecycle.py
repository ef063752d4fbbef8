"""Histories of tasks, by the tens of thousands, with events that come late, twice, out of order or from nowhere."""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from fluster_bus.messages import (
    Entrypoint,
    JobId,
    JobRecord,
    JobRequest,
    JobStatus,
    Namespace,
    TaskError,
    TaskRecord,
    WorkerId,
)
from fluster_bus.messages.records import KEPT_TRANSITIONS
from fluster_services import job_lifecycle, lifecycle
from fluster_services.job_lifecycle import job_info

WORKERS = (WorkerId("w1"), WorkerId("w2"))
ENDS = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.KILLED, JobStatus.WORKER_FAILED)
S, F, K, W, U = (
    JobStatus.SUCCEEDED,
    JobStatus.FAILED,
    JobStatus.KILLED,
    JobStatus.WORKER_FAILED,
    JobStatus.UNSCHEDULABLE,
)


def _job(replicas: int = 1, *, failures: int = 0, preemptions: int = 100) -> JobRecord:
    request = JobRequest(
        name="train",
        entrypoint=Entrypoint(command=("true",)),
        replicas=replicas,
        max_retries_failure=failures,
        max_retries_preemption=preemptions,
    )
    return job_lifecycle.new_job(Namespace("default"), JobId("train-1"), request, order=7, now=0)


def _task(*, failures: int = 0, preemptions: int = 100) -> TaskRecord:
    return job_lifecycle.new_tasks(_job(failures=failures, preemptions=preemptions))[0]


def _random_event(task: TaskRecord, now: float, dice: random.Random) -> tuple[str, TaskRecord | None]:
    """An event about some attempt and worker, which may be long past, and what becomes of the record."""
    attempt = dice.choice((task.attempt, task.attempt, task.attempt, dice.randint(1, task.attempt + 1)))
    worker_id = dice.choice((task.worker_id or WORKERS[0], *WORKERS))
    name = dice.choice(("claim", "claim", "run", "end", "end", "lose", "kill", "give_up", "retry", "retry"))
    match name:
        case "claim":
            claimed = lifecycle.claim(task, attempt=attempt, worker_id=worker_id, now=now)
            if claimed is not None:
                assert (task.attempt, claimed.worker_id) == (attempt, worker_id)
            return name, claimed
        case "run":
            running = lifecycle.run(task, attempt=attempt, worker_id=worker_id, now=now)
            if running is not None:
                assert (task.attempt, task.worker_id) == (attempt, worker_id)
            return name, running
        case "end":
            state = dice.choice(ENDS)
            ended = lifecycle.end(task, attempt=attempt, worker_id=worker_id, now=now, state=state, reason="it ended")
            if ended is not None:
                assert (task.attempt, task.worker_id) == (attempt, worker_id)
                assert ended.state is state
            return name, ended
        case "lose":
            return name, lifecycle.lose_worker(task, worker_id=worker_id, now=now, reason="silent")
        case "kill":
            if dice.random() < 0.7:
                return name, None
            return name, lifecycle.request_kill(task, now=now, reason="enough")
        case "give_up":
            if dice.random() < 0.7:
                return name, None
            return name, lifecycle.give_up(task, now=now, reason="too large")
        case _:
            return name, lifecycle.retry(task, now=now)


LEGAL = {
    "claim": {(JobStatus.PENDING, JobStatus.BUILDING)},
    "run": {(JobStatus.BUILDING, JobStatus.RUNNING)},
    "end": {(before, after) for before in (JobStatus.BUILDING, JobStatus.RUNNING) for after in ENDS},
    "lose": {(before, W) for before in (JobStatus.BUILDING, JobStatus.RUNNING)},
    "kill": {(before, K) for before in (JobStatus.PENDING, F, W)}
    | {(held, held) for held in (JobStatus.BUILDING, JobStatus.RUNNING)},
    "give_up": {(JobStatus.PENDING, U)},
    "retry": {(before, JobStatus.PENDING) for before in (F, W)},
}


def _check_step(name: str, before: TaskRecord, after: TaskRecord) -> None:
    assert not lifecycle.is_final(before), "a final state stays final"
    assert (before.state, after.state) in LEGAL[name]
    assert after.attempt == before.attempt + (name == "retry")
    assert after.failures == before.failures + (name == "end" and after.state is F)
    assert after.preemptions == before.preemptions + (name in ("end", "lose") and after.state is W)
    assert after.failures <= before.max_retries_failure + 1
    assert after.preemptions <= before.max_retries_preemption + 1
    assert after.attempt <= 1 + before.max_retries_failure + before.max_retries_preemption
    assert lifecycle.is_held(after) == (after.state in (JobStatus.BUILDING, JobStatus.RUNNING))
    if lifecycle.is_held(after):
        assert after.worker_id is not None
    if before.kill_requested is not None:
        assert name in ("run", "end", "lose")
    if after.state is JobStatus.PENDING:
        assert (after.worker_id, after.exit_code, after.error, after.started_at) == (None, None, None, None)
    assert (after.finished_at is not None) == after.state.finished()
    moved = after.state is not before.state
    assert after.transitions[-1].number == before.transitions[-1].number + moved
    assert after.transitions[-1].state is after.state
    assert len(after.transitions) <= KEPT_TRANSITIONS
    numbers = [each.number for each in after.transitions]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


@pytest.mark.parametrize("seed", range(10))
def test_random_histories(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(1_000):
        task = _task(failures=dice.randint(0, 3), preemptions=dice.randint(0, 3))
        for step in range(dice.randint(1, 40)):
            untouched = task.to_json() if step == 0 else None
            name, after = _random_event(task, float(step), dice)
            if untouched is not None:
                assert task.to_json() == untouched
            if after is not None:
                _check_step(name, task, after)
                task = after
            elif lifecycle.is_final(task):
                assert task.state.finished()


@pytest.mark.parametrize("seed", range(5))
def test_messages_that_come_late_and_twice_change_nothing_that_was_settled(seed: int) -> None:
    """Two workers act on what they saw; their writes are compare-and-sets that arrive whenever they like."""
    dice = random.Random(100 + seed)
    for _ in range(300):
        record, revision = _task(failures=1, preemptions=2), 1
        on_the_way: list[tuple[int, TaskRecord]] = []  # (the revision it was decided from, what is to be written)
        running: dict[tuple[int, WorkerId], bool] = {}  # claims that were won, and not ended
        for step in range(80):
            if on_the_way and dice.random() < 0.6:
                seen, wanted = dice.choice(on_the_way) if dice.random() < 0.3 else on_the_way.pop(0)
                if seen == revision:
                    if lifecycle.is_held(wanted) and wanted.worker_id is not None:
                        running = {(wanted.attempt, wanted.worker_id): True}
                    else:
                        running = {}
                    assert not lifecycle.is_final(record)
                    assert wanted.attempt >= record.attempt
                    record, revision = wanted, revision + 1
            else:
                _, after = _random_event(record, float(step), dice)
                if after is not None:
                    on_the_way.append((revision, after))
            assert len(running) <= 1
            assert bool(running) == lifecycle.is_held(record)


def _lead(task: TaskRecord, *steps: Callable[[TaskRecord], TaskRecord | None]) -> TaskRecord:
    for step in steps:
        after = step(task)
        assert after is not None
        task = after
    return task


def _claim(task: TaskRecord) -> TaskRecord | None:
    return lifecycle.claim(task, attempt=task.attempt, worker_id=WORKERS[0], now=1)


def _end(state: JobStatus, reason: str = "it ended") -> Callable[[TaskRecord], TaskRecord | None]:
    def end(task: TaskRecord) -> TaskRecord | None:
        assert task.worker_id is not None
        return lifecycle.end(
            task, attempt=task.attempt, worker_id=task.worker_id, now=2, state=state, reason=reason, exit_code=1
        )

    return end


def _retry(task: TaskRecord) -> TaskRecord | None:
    return lifecycle.retry(task, now=3)


def _kill(task: TaskRecord) -> TaskRecord | None:
    return lifecycle.request_kill(task, now=2, reason="enough")


def test_the_failure_budget() -> None:
    task = _lead(_task(failures=2), _claim, _end(F), _retry, _claim, _end(F), _retry, _claim, _end(F))
    assert lifecycle.retry(task, now=9) is None
    assert (task.attempt, task.failures, lifecycle.is_final(task)) == (3, 3, True)


def _failed_after(task: TaskRecord, ran_s: float, *, error: TaskError | None = None) -> TaskRecord:
    """The next attempt, or the last, after one that ran for so long."""
    started = _lead(task, _claim)
    assert started.started_at is not None
    ended = lifecycle.end(
        started,
        attempt=started.attempt,
        worker_id=WORKERS[0],
        now=started.started_at + ran_s,
        state=F,
        reason="it ended",
        error=error,
    )
    assert ended is not None
    return lifecycle.retry(ended, now=0) or ended


def test_failures_before_the_window_are_not_counted() -> None:
    task = _task(failures=2).model_copy(update={"retry_window_s": 60.0})
    for _ in range(20):  # never three in a minute
        task = _failed_after(task, 35.0)
        assert not lifecycle.is_final(task)
    assert lifecycle.is_final(_failed_after(task, 10.0))


def test_a_failure_counts_to_the_end_of_the_window() -> None:
    for apart_s, is_final in ((60.0, True), (60.1, False)):
        task = _failed_after(_task(failures=1).model_copy(update={"retry_window_s": 60.0}), 7.0)
        assert lifecycle.is_final(_failed_after(task, apart_s)) is is_final


def test_a_window_is_passed_on_to_the_tasks_and_a_clock_that_is_set_back_does_no_harm() -> None:
    request = JobRequest(name="a", entrypoint=Entrypoint(command=("true",)), max_retries_failure=1, retry_window_s=60.0)
    job = job_lifecycle.new_job(Namespace("default"), JobId("a-1"), request, order=1, now=0)
    task = job_lifecycle.new_tasks(job)[0]
    task = _failed_after(task, -3_600.0)
    assert task.failure_ages_s == (0.0,)
    assert lifecycle.is_final(_failed_after(task, -3_600.0))


def test_an_error_that_is_final_spends_the_budget() -> None:
    error = TaskError(type="E", message="given up", is_final=True)
    for window in (None, 60.0):
        task = _task(failures=5).model_copy(update={"retry_window_s": window})
        ended = _failed_after(task, 1.0, error=error)
        assert lifecycle.is_final(ended)
        assert ended.failures == 6
        assert lifecycle.is_final(ended.model_copy(update={"error": None}))  # also where the record is kept without it


def test_a_lost_worker_costs_no_failure() -> None:
    def lose(task: TaskRecord) -> TaskRecord | None:
        return lifecycle.lose_worker(task, worker_id=WORKERS[0], now=2, reason="silent")

    task = _lead(_task(preemptions=1), _claim, lose, _retry, _claim, lose)
    assert (task.failures, task.preemptions) == (0, 2)
    assert lifecycle.is_final(task)
    assert _retry(task) is None
    assert _retry(_lead(_task(preemptions=0), _claim, lose)) is None


def test_a_kill_wish_ends_what_nobody_holds_and_asks_who_holds() -> None:
    waiting = _lead(_task(), _kill)
    assert (waiting.state, waiting.kill_requested) == (K, "enough")
    held = _lead(_task(), _claim, _kill)
    assert (held.state, held.kill_requested) == (JobStatus.BUILDING, "enough")
    assert _kill(held) is None
    assert lifecycle.run(held, attempt=1, worker_id=WORKERS[0], now=2) is not None
    between = _lead(_task(failures=1), _claim, _end(F), _kill)
    assert between.state is K
    lost = _lead(_task(), _claim, _kill, _end(W))
    assert lifecycle.is_final(lost)


def test_an_error_that_is_not_final_costs_one_failure() -> None:
    again = _failed_after(_task(failures=5), 1.0, error=TaskError(type="E", message="try again"))
    assert (again.failures, again.state) == (1, JobStatus.PENDING)


def test_what_is_refused_spends_the_budget() -> None:
    refused = lifecycle.refuse(_task(failures=2), now=4, reason="no such folder")
    assert refused is not None
    assert (refused.state, refused.failures, refused.finished_at, lifecycle.is_final(refused)) == (F, 3, 4, True)
    held = _lead(_task(), _claim)
    assert lifecycle.refuse(held, now=4, reason="no such folder") is None
    assert lifecycle.give_up(held, now=4, reason="too large") is None


def test_what_is_to_be_killed_is_not_claimed() -> None:
    assert _claim(_task().model_copy(update={"kill_requested": "enough"})) is None


def test_only_who_holds_a_task_of_a_gang_makes_it_ready_or_lets_it_go_and_only_for_its_epoch() -> None:
    of_gang = _task().model_copy(update={"gang": True})
    held = lifecycle.claim(of_gang, attempt=1, worker_id=WORKERS[0], now=1, epoch=1)
    assert held is not None
    assert lifecycle.claim(_task(), attempt=1, worker_id=WORKERS[0], now=1, epoch=1) is None, "not of a task alone"

    def ready(task: TaskRecord, attempt: int = 1, worker_id: WorkerId = WORKERS[0]) -> TaskRecord | None:
        return lifecycle.make_ready(task, attempt=attempt, worker_id=worker_id, gang_address="w1:1")

    is_ready = ready(held)
    assert is_ready is not None
    assert (is_ready.is_ready, is_ready.gang_address) == (True, "w1:1")
    running = lifecycle.run(held, attempt=1, worker_id=WORKERS[0], now=2)
    alone = _claim(_task())
    assert running is not None
    assert alone is not None
    for wrong in (
        ready(held, attempt=2),
        ready(held, worker_id=WORKERS[1]),
        ready(is_ready),
        ready(running),
        ready(alone),
    ):
        assert wrong is None

    def release(task: TaskRecord, attempt: int = 1, worker_id: WorkerId = WORKERS[0], epoch: int = 1) -> object:
        return lifecycle.release(task, attempt=attempt, worker_id=worker_id, epoch=epoch, now=3, reason="called off")

    assert release(held) is not None
    assert release(held, attempt=2) is release(held, worker_id=WORKERS[1]) is release(held, epoch=2) is None
    assert release(running) is None


def test_a_task_of_a_gang_waits_since_its_first_hold_until_it_has_run() -> None:
    """What has waited longest is not put back for having been held in vain."""

    def hold(task: TaskRecord, epoch: int, stored_at: datetime) -> TaskRecord:
        held = lifecycle.claim(
            task, attempt=task.attempt, worker_id=WORKERS[0], now=1, epoch=epoch, stored_at=stored_at
        )
        assert held is not None
        return held

    first, second = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    held = hold(_task(failures=1).model_copy(update={"gang": True}), 1, first)
    assert held.waiting_since == first
    released = lifecycle.release(held, attempt=1, worker_id=WORKERS[0], epoch=1, now=3, reason="called off")
    assert released is not None
    again = hold(released, 2, second)
    assert again.waiting_since == first
    retried = _lead(again, _end(F), _retry)
    assert retried.waiting_since is None
    alone = lifecycle.claim(_task(), attempt=1, worker_id=WORKERS[0], now=1, stored_at=first)
    assert alone is not None
    assert alone.waiting_since is None


def test_a_restart_is_asked_of_what_runs_and_costs_nothing() -> None:
    held = lifecycle.claim(_task().model_copy(update={"gang": True}), attempt=1, worker_id=WORKERS[0], now=1, epoch=1)
    assert held is not None
    asked = lifecycle.request_restart(held, reason="its gang starts again")
    assert asked is not None
    assert lifecycle.is_to_be_stopped(asked)
    assert not lifecycle.is_to_be_stopped(held)
    assert lifecycle.is_to_be_stopped(_lead(held, _kill))
    assert lifecycle.request_restart(asked, reason="again") is None
    assert lifecycle.request_restart(_lead(held, _kill), reason="again") is None
    assert lifecycle.request_restart(_task(), reason="again") is None
    assert lifecycle.restart(asked, now=3) is None, "it runs still"
    for state in (F, K, W):
        ended = _lead(asked, _end(state))
        assert (ended.failures, ended.preemptions) == (0, 0)
        assert not lifecycle.is_final(ended)
        assert not lifecycle.is_to_be_stopped(ended)
        again = lifecycle.restart(ended, now=3)
        assert again is not None
        assert (again.attempt, again.backoff_s, again.restart_requested) == (2, 0, None)
        assert again.transitions[-1].reason == f"its gang starts again; this attempt ended as {state}"
    for state in (S, F, K):
        killed_too = _lead(asked, _kill, _end(state))
        assert lifecycle.restart(killed_too, now=3) is None, "nobody wants it any longer"
    alone = _lead(_task(failures=1), _claim, _end(F))
    assert lifecycle.restart(alone, now=3) is None, "it has no gang"


def test_a_retry_that_costs_nothing_says_so() -> None:
    spared = lifecycle.retry(_ended(_task(), is_spared=True), now=3)
    assert spared is not None
    assert spared.transitions[-1].reason == "again, at no cost, after WORKER_FAILED"


# ---- jobs -----------------------------------------------------------------------------------------------


def test_a_kill_by_force_overtakes_one_with_a_grace() -> None:
    held = _claim(_task())
    assert held is not None
    wanted = lifecycle.request_kill(held, now=1, reason="enough")
    assert wanted is not None
    assert not wanted.kill_at_once
    forced = lifecycle.request_kill(wanted, now=2, reason="at once", force=True)
    assert forced is not None
    assert (forced.kill_requested, forced.kill_at_once, forced.state) == ("enough", True, JobStatus.BUILDING)
    assert lifecycle.request_kill(forced, now=3, reason="again", force=True) is None
    at_once = lifecycle.request_kill(held, now=1, reason="at once", force=True)
    assert at_once is not None
    assert at_once.kill_at_once


def _tasks_in(*states: JobStatus) -> tuple[JobRecord, list[TaskRecord]]:
    job = _job(len(states), preemptions=0)
    made = []
    for task, state in zip(job_lifecycle.new_tasks(job), states, strict=True):
        match state:
            case JobStatus.UNSCHEDULABLE:
                made.append(_lead(task, lambda each: lifecycle.give_up(each, now=2, reason="too large")))
            case JobStatus.PENDING:
                made.append(task)
            case JobStatus.BUILDING:
                made.append(_lead(task, _claim))
            case JobStatus.RUNNING:
                made.append(
                    _lead(task, _claim, lambda each: lifecycle.run(each, attempt=1, worker_id=WORKERS[0], now=2))
                )
            case _:
                made.append(_lead(task, _claim, _end(state, f"ended as {state}")))
    return job, made


@pytest.mark.parametrize(
    ("states", "joined", "culprit"),
    [
        ((S,), S, None),
        ((S, S), S, None),
        ((F,), F, 0),
        ((S, F, K), F, 1),
        ((W,), W, 0),
        ((S, W), W, 1),
        ((W, F), F, 1),
        ((K,), K, 0),
        ((K, W), W, 1),
        ((U,), U, 0),
        ((U, W), U, 0),
        ((U, F), F, 1),
    ],
)
def test_the_end_of_a_job(states: tuple[JobStatus, ...], joined: JobStatus, culprit: int | None) -> None:
    job, tasks = _tasks_in(*states)
    finished = job_lifecycle.finish_job(job, tasks, now=9)
    assert finished is not None
    assert (finished.state, finished.finished_at) == (joined, 9)
    assert job_lifecycle.finish_job(finished, tasks, now=10) is None
    if culprit is None:
        assert finished.error_message == ""
    else:
        reason = tasks[culprit].transitions[-1].reason
        assert finished.error_message == (f"task {culprit}: {reason}" if len(states) > 1 else reason)


@pytest.mark.parametrize(
    ("states", "joined"), [((K,), K), ((K, F), K), ((S, K), K), ((S, S), S), ((W,), K), ((F,), K), ((S, W), K)]
)
def test_a_job_that_was_to_be_killed_ends_as_killed_unless_all_succeeded(
    states: tuple[JobStatus, ...], joined: JobStatus
) -> None:
    job, tasks = _tasks_in(*states)
    wanted = job_lifecycle.request_job_kill(job, reason="enough")
    assert wanted is not None
    assert job_lifecycle.request_job_kill(wanted, reason="more than enough") is None
    finished = job_lifecycle.finish_job(wanted, tasks, now=9)
    assert finished is not None
    assert finished.state is joined
    assert bool(finished.error_message) == (joined is K)
    assert not finished.error_message.startswith("task "), "it was the whole job that was to be killed"
    assert "succeeded" not in finished.transitions[-1].reason or joined is S


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        ((JobStatus.PENDING,), JobStatus.PENDING),
        ((JobStatus.PENDING, JobStatus.BUILDING), JobStatus.BUILDING),
        ((JobStatus.PENDING, JobStatus.RUNNING), JobStatus.RUNNING),
        ((JobStatus.PENDING, S), JobStatus.RUNNING),
        ((JobStatus.BUILDING, JobStatus.RUNNING), JobStatus.RUNNING),
    ],
)
def test_a_job_on_its_way(states: tuple[JobStatus, ...], shown: JobStatus) -> None:
    job, tasks = _tasks_in(*states)
    assert job_lifecycle.finish_job(job, tasks, now=9) is None
    info = job_info(job, reversed(tasks))
    assert info.status is shown
    assert [task.task for task in info.tasks] == list(range(len(states)))


def test_a_task_that_will_be_tried_again_does_not_end_its_job() -> None:
    job = _job(failures=1)
    task = _lead(job_lifecycle.new_tasks(job)[0], _claim, _end(F))
    assert job_lifecycle.finish_job(job, [task], now=9) is None
    assert job_lifecycle.finish_job(job, [], now=9) is None


def test_transitions_are_numbered_on_from_those_that_were_told_before() -> None:
    job = _job()
    assert [each.number for each in job.transitions] == [1]
    (task,) = job_lifecycle.new_tasks(job.model_copy(update={"told_before": 3}))
    assert [each.number for each in task.transitions] == [4]
    job, tasks = _tasks_in(S)
    finished = job_lifecycle.finish_job(job, tasks, now=9)
    assert finished is not None
    assert finished.transitions[-1].reason == "all tasks succeeded"
    first = _lead(_task().model_copy(update={"transitions": ()}), _claim)
    assert [each.number for each in first.transitions] == [1]
    assert [(each.number, each.attempt, each.worker_id) for each in finished.transitions] == [
        (1, 0, None),
        (2, 0, None),
    ]


def test_a_wish_to_stop_what_has_ended_does_nothing() -> None:
    job, _ = _tasks_in(S)
    ended = job.model_copy(update={"state": S})
    assert job_lifecycle.request_job_kill(ended, reason="enough") is None


def test_only_a_job_that_waits_for_others_is_released_or_ended_before_its_tasks_are_there() -> None:
    job = _job()
    waits = job.model_copy(update={"request": job.request.model_copy(update={"after": ("b",)})})
    released = job_lifecycle.release_job(waits, now=3)
    assert released is not None
    ended = job_lifecycle.end_unreleased(waits, state=F, now=3, reason="b ended as FAILED")
    assert ended is not None
    assert (ended.state, ended.error_message, ended.finished_at) == (F, "b ended as FAILED", 3)
    for other in (job, released, ended):
        assert job_lifecycle.release_job(other, now=4) is None
        assert job_lifecycle.end_unreleased(other, state=F, now=4, reason="so") is None


def test_what_happened_to_one_task_names_it() -> None:
    for states, gang in (((S, K), False), ((S, F), True)):
        job, tasks = _tasks_in(*states)
        job = job.model_copy(update={"request": job.request.model_copy(update={"gang": gang})})
        finished = job_lifecycle.finish_job(job, tasks, now=9)
        assert finished is not None
        assert finished.error_message == f"task 1: ended as {states[1]}"


def test_a_job_started_with_the_first_of_its_tasks() -> None:
    job, (first, second) = _tasks_in(S, S)
    later = second.model_copy(update={"started_at": 7})
    for tasks in ([first, later], [later, first]):
        finished = job_lifecycle.finish_job(job, tasks, now=9)
        assert finished is not None
        assert finished.started_at == first.started_at


@pytest.mark.parametrize(
    ("last_words", "told"),
    [
        ("", "ended as FAILED"),
        ("Killed", "ended as FAILED; its last words:\nKilled"),
        ("ended as FAILED", "ended as FAILED"),
        ("fluster: ended as FAILED", "ended as FAILED"),
    ],
)
def test_the_last_words_are_told_unless_they_say_the_same(last_words: str, told: str) -> None:
    job, (task,) = _tasks_in(F)
    finished = job_lifecycle.finish_job(job, [task.model_copy(update={"last_words": last_words})], now=9)
    assert finished is not None
    assert finished.error_message == told


@pytest.mark.parametrize(("gang", "told"), [(True, "too large"), (False, "task 0: too large")])
def test_that_nothing_can_hold_a_gang_is_said_of_all_its_tasks(gang: bool, told: str) -> None:
    job, tasks = _tasks_in(U, U)
    job = job.model_copy(update={"request": job.request.model_copy(update={"gang": gang})})
    finished = job_lifecycle.finish_job(job, tasks, now=9)
    assert finished is not None
    assert finished.error_message == told


def test_the_error_of_the_culprit_is_the_jobs() -> None:
    job = _job()
    task = _lead(job_lifecycle.new_tasks(job)[0], _claim)
    error = TaskError(type="ValueError", message="bad")
    ended = lifecycle.end(
        task, attempt=1, worker_id=WORKERS[0], now=5, state=F, reason="ValueError: bad", exit_code=1, error=error
    )
    assert ended is not None
    finished = job_lifecycle.finish_job(job, [ended], now=9)
    assert finished is not None
    info = job_info(finished, [ended])
    assert (info.error, info.error_message, info.exit_code) == (error, "ValueError: bad", 1)
    assert (info.submitted_at, info.started_at, info.finished_at) == (0, 1, 9)
    assert info.tasks[0].error_message == "ValueError: bad"


def test_a_task_that_is_cancelled_while_its_hold_is_called_off_ends() -> None:
    of_gang = _task().model_copy(update={"gang": True})
    held = lifecycle.claim(of_gang, attempt=1, worker_id=WORKERS[0], now=1, epoch=1)
    assert held is not None
    wished = _lead(held, _kill)
    released = lifecycle.release(wished, attempt=1, worker_id=WORKERS[0], epoch=1, now=3, reason="called off")
    assert released is not None
    assert (released.state, released.finished_at, lifecycle.is_final(released)) == (JobStatus.KILLED, 3, True)
    assert released.transitions[-1].reason == "enough"
    kept = lifecycle.release(held, attempt=1, worker_id=WORKERS[0], epoch=1, now=3, reason="called off")
    assert kept is not None
    assert kept.state is JobStatus.PENDING


def _ended(task: TaskRecord, worker_id: WorkerId = WORKERS[0], **how: Any) -> TaskRecord:
    claimed = lifecycle.claim(task, attempt=task.attempt, worker_id=worker_id, now=1)
    assert claimed is not None
    ended = lifecycle.end(
        claimed, attempt=task.attempt, worker_id=worker_id, now=2, state=W, reason="could not be started", **how
    )
    assert ended is not None
    return ended


def test_a_workers_own_fault_is_charged_to_nobody_but_not_without_end() -> None:
    task = _task(preemptions=0)
    for spared in range(10):
        ended = _ended(task, is_spared=True)
        assert (ended.failures, ended.preemptions, ended.spared) == (0, 0, spared + 1)
        again = lifecycle.retry(ended, now=3)
        assert again is not None
        assert again.backoff_s == 0
        task = again
    ended = _ended(task, is_spared=True)
    assert (ended.preemptions, lifecycle.is_final(ended)) == (1, True)


@pytest.mark.parametrize(
    ("takers", "told"),
    [
        (("w1", "w2", "w1", "w3"), "it did so 4 times, on w1, w2, w3"),
        (("w1", "w2", "w3"), "it did so 3 times, on w1, w2, w3"),
        (("w1",) * 6, "it did so 6 times, on w1"),
        (("w1", "w2") * 3, "it did so 6 times, on w1, w2"),
    ],
)
def test_a_task_that_fills_the_disks_of_three_workers_or_one_six_times_has_failed(
    takers: tuple[str, ...], told: str
) -> None:
    task = _task(failures=5)
    for count, worker_id in enumerate(takers, 1):
        assert task.state is JobStatus.PENDING
        ended = _ended(task, WorkerId(worker_id), filled_disk=True)
        assert len(ended.disk_filled) == count
        task = lifecycle.retry(ended, now=3) or ended
    assert (task.state, task.preemptions, lifecycle.is_final(task)) == (F, len(takers) - 1, True)
    assert task.failures == 6
    assert task.transitions[-1].reason == f"could not be started; {told}"


def test_where_little_was_left_it_is_spared_ten_times_before_it_counts_as_too_large() -> None:
    task = _task()
    for attempt in range(1, 17):
        assert task.state is JobStatus.PENDING
        ended = _ended(task, WorkerId("w1"), is_spared=True, filled_disk=True)
        assert (ended.spared, len(ended.disk_filled)) == (min(attempt, 10), max(0, attempt - 10))
        task = lifecycle.retry(ended, now=3) or ended
    assert (task.state, task.preemptions, lifecycle.is_final(task)) == (F, 5, True)


def test_disks_that_were_filled_before_make_no_failure_of_an_attempt_that_fills_none() -> None:
    task = _task().model_copy(update={"disk_filled": (*WORKERS, WorkerId("w3"))})
    assert _lead(task, _claim, _end(S)).state is S
