"""Pauses and deadlines of tasks that wait, whatever is held and let go, seen and read again in between."""

import random
from datetime import UTC, datetime

import pytest

from fluster_bus.messages import Entrypoint, JobId, JobRequest, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_bus.storage.tables import Row
from fluster_services import job_lifecycle, lifecycle
from fluster_services.controller.scheduling.wait_times import WaitTimes, waited_s
from fluster_services.controller.state.job_index import JobKey

KEY = JobKey(Namespace("default"), JobId("job"))
WORKER = WorkerId("w1")


def _task(*, timeout_s: float | None = 10, backoff_s: float = 0, gang: bool = False, order: int = 1) -> TaskRecord:
    request = JobRequest(
        name="job",
        entrypoint=Entrypoint(command=("true",)),
        scheduling_timeout_s=timeout_s,
        gang=gang,
        max_retries_failure=100,
    )
    job = job_lifecycle.new_job(KEY.namespace, KEY.job_id, request, order=order, now=0)
    (task,) = job_lifecycle.new_tasks(job)
    return task.model_copy(update={"backoff_s": backoff_s})


def _held(task: TaskRecord, epoch: int) -> TaskRecord:
    held = lifecycle.claim(task, attempt=task.attempt, worker_id=WORKER, now=0, epoch=epoch)
    assert held is not None
    return held


def _let_go(held: TaskRecord) -> TaskRecord:
    released = lifecycle.release(held, attempt=held.attempt, worker_id=WORKER, epoch=held.epoch, now=0, reason="off")
    assert released is not None
    return released


def _failed(task: TaskRecord) -> TaskRecord:
    end = {"worker_id": WORKER, "now": 0, "state": JobStatus.FAILED, "reason": "so"}
    failed = lifecycle.end(task, attempt=task.attempt, **end)  # type: ignore[arg-type]
    assert failed is not None
    return failed


def test_a_task_waits_since_it_was_first_seen() -> None:
    wait_times, task = WaitTimes(), _task(backoff_s=3)
    wait_times.on_task(KEY, task, since=100)
    wait_times.on_task(KEY, task, since=105)
    assert (wait_times.pause_s(KEY, task, now=101), wait_times.left_s(KEY, task, now=101)) == (2, 12)
    assert (wait_times.pause_s(KEY, task, now=105), wait_times.left_s(KEY, task, now=120)) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_held_and_let_go_again_and_again_waits_no_longer_for_that(seed: int) -> None:
    dice = random.Random(seed)
    wait_times, task, now = WaitTimes(), _task(gang=True, backoff_s=dice.choice((0, 3))), 100.0
    wait_times.on_task(KEY, task, since=now)
    deadline, offered_at = now + task.backoff_s + 10, now + task.backoff_s
    for epoch in range(1, 20):
        for record in (held := _held(task, epoch), _let_go(held)):
            now += dice.uniform(0, 2)
            wait_times.on_task(KEY, record, since=now)
            task = record
            assert wait_times.left_s(KEY, task, now=now) == pytest.approx(max(0, deadline - now))
            assert wait_times.pause_s(KEY, task, now=now) == pytest.approx(max(0, offered_at - now))


def test_the_next_attempt_and_the_next_job_wait_anew() -> None:
    wait_times, task = WaitTimes(), _task()
    wait_times.on_task(KEY, task, since=100)
    again = lifecycle.retry(_failed(_held(task, 0)), now=0)
    assert again is not None
    wait_times.on_task(KEY, again, since=150)
    assert wait_times.left_s(KEY, again, now=150) == again.backoff_s + 10
    successor = _task(order=2).model_copy(update={"attempt": again.attempt})
    wait_times.on_task(KEY, successor, since=200)
    assert wait_times.left_s(KEY, successor, now=200) == 10


def test_what_does_not_wait_any_more_is_forgotten() -> None:
    wait_times, task = WaitTimes(), _task()
    for record in (task, _held(task, 0)):
        wait_times.on_task(KEY, record, since=100)
    assert len(wait_times) == 0
    wait_times.on_task(KEY, task, since=100)
    wait_times.forget(KEY)
    assert len(wait_times) == 0


def test_a_hold_says_since_when_its_attempt_waits() -> None:
    stored = [datetime.fromtimestamp(second, UTC) for second in range(3)]
    task = _task(gang=True)
    held = lifecycle.claim(task, attempt=1, worker_id=WORKER, now=0, epoch=1, stored_at=stored[0])
    assert held is not None
    released = _let_go(held)
    assert released.waiting_since == stored[0]
    again = lifecycle.claim(released, attempt=1, worker_id=WORKER, now=0, epoch=2, stored_at=stored[2])
    assert again is not None
    assert again.waiting_since == stored[0]
    next_attempt = lifecycle.restart(_failed(again), now=0)
    assert next_attempt is not None
    assert next_attempt.waiting_since is None


def test_what_was_stored_before_is_as_old_as_the_clock_says_that_stamped_it() -> None:
    now, stored_at = datetime.fromtimestamp(1_000, UTC), datetime.fromtimestamp(990, UTC)
    task = _task(gang=True)
    assert waited_s(Row("job.0", task, 1, stored_at), now) == 10
    assert waited_s(Row("job.0", task, 1, now), stored_at) == 0, "stored since it was asked for its time"
    released = task.model_copy(update={"waiting_since": datetime.fromtimestamp(900, UTC)})
    assert waited_s(Row("job.0", released, 1, stored_at), now) == 100
