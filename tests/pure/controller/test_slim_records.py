"""What a controller keeps of records in its memory."""

import gc
import json
import tracemalloc

import pytest

from fluster_bus.messages import Entrypoint, JobId, JobRecord, JobRequest, JobStatus, Namespace, TaskError
from fluster_bus.storage.tables import Row
from fluster_services import job_lifecycle
from fluster_services.controller.state.job_index import JobIndex, JobKey
from fluster_services.controller.state.slim_records import (
    is_left,
    is_slim_error,
    is_slim_request,
    slim_job,
    slim_request,
    slim_task,
)


def _request(data: bytes) -> JobRequest:
    return JobRequest(name="job", entrypoint=Entrypoint(callable=print, args=(data,)))


def _job(data: bytes = b"", **fields: object) -> JobRecord:
    job = job_lifecycle.new_job(Namespace("default"), JobId("job"), _request(data), order=1, now=0)
    return job.model_copy(update=fields)


def _error(size: int) -> TaskError:
    return TaskError(type="ValueError", message="no", traceback="line", pickled=b"\x80" * size)


def test_small_callables_and_commands_stay() -> None:
    for request in (_request(b"small"), JobRequest(name="job", entrypoint=Entrypoint(command=("x" * 5_000,)))):
        assert slim_request(request) is request
        assert not is_slim_request(request)


def test_of_a_large_callable_the_hash_stays() -> None:
    slim = slim_request(_request(b"x" * 100_000))
    assert is_slim_request(slim)
    assert len(slim.to_json()) < 300
    assert slim_request(slim) == slim
    assert slim == slim_request(_request(b"x" * 100_000))
    assert slim != slim_request(_request(b"y" * 100_000))
    # As it is written when the job has finished.
    assert JobRequest.from_json(slim.to_json()).to_json() == slim.to_json()


LARGE: dict[str, dict[str, object]] = {
    "command": {"entrypoint": {"command": ["a"] * 6_000}},
    "variables": {"environment": {"env_vars": {f"A{n}": "x" for n in range(3_000)}, "secrets": ["TOKEN"]}},
    "unknown fields": {"newer": [[] for _ in range(10_000)]},
    "unknown fields of a part": {"environment": {"newer": {str(n): [] for n in range(3_000)}}},
    "a callable": {"entrypoint": {"python": "3.12", "pickled": "A" * 100_000}},
}


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("state", [JobStatus.PENDING, JobStatus.SUCCEEDED])
def test_the_books_retain_no_bodies_of_requests(large: str, state: JobStatus) -> None:
    plain = {"name": "job", "entrypoint": {"command": ["true"]}}
    data = json.dumps({**plain, **LARGE[large]}).encode()
    job_index, count = JobIndex(), 5

    def take(number: int) -> None:
        request = JobRequest.from_json(data)
        job = job_lifecycle.new_job(Namespace("default"), JobId(f"job-{number}"), request, order=number, now=0)
        (task,) = job_lifecycle.new_tasks(job)
        job_index.apply(Row(job.job_id, job, 1))
        job_index.apply(Row(f"{job.job_id}.0", task, 1))
        job_index.apply(Row(job.job_id, job.model_copy(update={"state": state}), 2))

    take(1)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(2, count + 2):
            take(number)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / count < 16_000
    entry = job_index.get(JobKey(Namespace("default"), JobId("job-1")))
    assert entry is not None
    assert entry.job is not None
    if state is JobStatus.PENDING:
        assert is_slim_request(entry.job.value.request)
        assert is_left(entry.job.value.request) == (large != "a callable")
        assert entry.job.value.request.environment.secrets == (("TOKEN",) if large == "variables" else ())


def test_errors_of_finished_jobs_are_cut() -> None:
    running = _job(state=JobStatus.PENDING, error=_error(5_000))
    assert slim_job(running) is running
    small = _job(state=JobStatus.FAILED, error=_error(10))
    assert slim_job(small).error is small.error
    slim = slim_job(_job(state=JobStatus.FAILED, error=_error(5_000)))
    assert is_slim_error(slim.error)
    assert slim.error is not None
    assert (slim.error.type, slim.error.message) == ("ValueError", "no")
    assert not is_slim_error(small.error)
    assert not is_slim_error(None)


def test_tasks_of_finished_jobs_need_no_error() -> None:
    (task,) = job_lifecycle.new_tasks(_job())
    slim = slim_task(task.model_copy(update={"error": _error(10)}), _job())
    assert slim.error is None
    assert slim.to_json() == task.to_json()
    assert slim.model_copy(update={"attempt": 2}).attempt == 2
    assert slim.attempt == 1


def test_unknown_fields_of_another_version_are_kept() -> None:
    job = JobRecord.from_json(_job(state=JobStatus.FAILED).to_json()[:-1] + b',"of_another_version":1}')
    assert b'"of_another_version":1' in slim_job(job).to_json()
