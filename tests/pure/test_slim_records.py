"""What a controller keeps of records in its memory."""

from fluster_bus.messages import Entrypoint, JobId, JobRecord, JobRequest, JobStatus, Namespace, TaskError
from fluster_services import lifecycle
from fluster_services.controller.slim_records import (
    is_slim_error,
    is_slim_request,
    slim_job,
    slim_request,
    slim_task,
)


def _request(data: bytes) -> JobRequest:
    return JobRequest(name="job", entrypoint=Entrypoint(callable=print, args=(data,)))


def _job(data: bytes = b"", **fields: object) -> JobRecord:
    job = lifecycle.new_job(Namespace("default"), JobId("job"), _request(data), order=1, now=0)
    return job.model_copy(update=fields)


def _error(size: int) -> TaskError:
    return TaskError(type="ValueError", message="no", traceback="line", pickled=b"\x80" * size)


def test_small_callables_and_commands_stay() -> None:
    for request in (_request(b"small"), JobRequest(name="job", entrypoint=Entrypoint(command=("x" * 10_000,)))):
        assert slim_request(request) is request
        assert not is_slim_request(request)


def test_of_a_large_callable_the_hash_stays() -> None:
    slim = slim_request(_request(b"x" * 100_000))
    assert is_slim_request(slim)
    assert len(slim.to_json()) < 300
    assert slim_request(slim) == slim
    assert slim == slim_request(_request(b"x" * 100_000))
    assert slim != slim_request(_request(b"y" * 100_000))
    assert (
        JobRequest.from_json(slim.to_json()).to_json() == slim.to_json()
    )  # as it is written when the job has finished


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
    (task,) = lifecycle.new_tasks(_job())
    slim = slim_task(task.model_copy(update={"error": _error(10)}), _job())
    assert slim.error is None
    assert slim.to_json() == task.to_json()
    assert slim.model_copy(update={"attempt": 2}).attempt == 2
    assert slim.attempt == 1


def test_unknown_fields_of_another_version_are_kept() -> None:
    job = JobRecord.from_json(_job(state=JobStatus.FAILED).to_json()[:-1] + b',"of_another_version":1}')
    assert b'"of_another_version":1' in slim_job(job).to_json()
