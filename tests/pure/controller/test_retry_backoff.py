from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.messages import Entrypoint, JobId, JobRequest, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_services import job_lifecycle, lifecycle

WORKER = WorkerId("w1")
NOW = 1_000.0


def task(job: str = "train-1", **options: object) -> TaskRecord:
    request = JobRequest.model_validate(
        {"name": "train", "entrypoint": Entrypoint(command=("true",)), "max_retries_failure": 100, **options}
    )
    record = job_lifecycle.new_job(Namespace("default"), JobId(job), request, order=1, now=NOW)
    return job_lifecycle.new_tasks(record)[0]


def once_more(waiting: TaskRecord, state: JobStatus) -> TaskRecord:
    """The task after one more attempt that ended as `state`."""
    claimed = lifecycle.claim(waiting, attempt=waiting.attempt, worker_id=WORKER, now=NOW)
    assert claimed is not None
    ended = lifecycle.end(claimed, attempt=claimed.attempt, worker_id=WORKER, now=NOW, state=state, reason="so")
    assert ended is not None
    again = lifecycle.retry(ended, now=NOW)
    assert again is not None
    return again


def pauses(state: JobStatus, count: int) -> list[float]:
    waiting, found = task(), []
    for _ in range(count):
        waiting = once_more(waiting, state)
        found.append(waiting.backoff_s)
    return found


def test_the_pause_doubles_after_each_failure_up_to_64_times() -> None:
    expected = [1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert pauses(JobStatus.FAILED, 9) == [pytest.approx(each, rel=0.25) for each in expected]


def test_a_lost_worker_costs_no_pause_the_first_time() -> None:
    first, second, third = pauses(JobStatus.WORKER_FAILED, 3)
    assert first == 0
    assert second == pytest.approx(1, rel=0.25)
    assert third == pytest.approx(2, rel=0.25)


def test_no_pause_where_none_is_wanted() -> None:
    assert once_more(task(retry_backoff_s=0), JobStatus.FAILED).backoff_s == 0


@given(st.integers(0, 10**6))
def test_the_same_attempt_has_the_same_pause_whoever_computes_it(number: int) -> None:
    waiting = task(f"job-{number}")
    assert once_more(waiting, JobStatus.FAILED).backoff_s == once_more(waiting, JobStatus.FAILED).backoff_s


def test_jobs_that_failed_together_do_not_come_back_together() -> None:
    found = {once_more(task(f"job-{number}"), JobStatus.FAILED).backoff_s for number in range(100)}
    assert len(found) > 50
    assert found == {round(each, 3) for each in found}, "to the millisecond"
    assert min(found) < 0.85
    assert max(found) > 1.15


def test_the_reason_says_when_the_retry_comes() -> None:
    again = once_more(task(), JobStatus.FAILED)
    assert again.transitions[-1].reason == f"retry 1 of 100 after FAILED, in {again.backoff_s:.1f} s"
