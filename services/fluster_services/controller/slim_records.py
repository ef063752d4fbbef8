"""Records without what a controller has no use for, so that many jobs fit into its memory.

A pickled callable is needed by the worker alone, which reads the record itself; once the job has finished, by nobody, so
its last record is written without it. In its place stands its hash, by which two requests can be told apart. The
exceptions of finished jobs are read again for whoever asks.
"""

from __future__ import annotations

import hashlib

from fluster_bus.messages import JobRecord, JobRequest, TaskError, TaskRecord

_SMALL_BYTES = 1_024  # not worth the trouble
_MARK = b"sha256:"  # no pickle begins so


def slim_request(request: JobRequest) -> JobRequest:
    """The request with the hash of its callable in its place."""
    pickled = request.entrypoint.pickled
    if pickled is None or len(pickled) <= _SMALL_BYTES:
        return request
    mark = _MARK + hashlib.sha256(pickled).digest()
    return request.model_copy(update={"entrypoint": request.entrypoint.model_copy(update={"pickled": mark})})


def is_slim_request(request: JobRequest) -> bool:
    """True when the callable is not there."""
    return request.entrypoint.pickled is not None and request.entrypoint.pickled.startswith(_MARK)


def slim_job(job: JobRecord) -> JobRecord:
    """The job's record as it is kept in memory."""
    changes: dict[str, object] = {}
    request = slim_request(job.request)
    if request is not job.request:
        changes["request"] = request
    if job.state.finished() and job.error is not None and _size(job.error) > _SMALL_BYTES:
        changes["error"] = job.error.model_copy(update={"pickled": _MARK, "traceback": ""})
    return job.model_copy(update=changes) if changes else job


def slim_task(task: TaskRecord) -> TaskRecord:
    """The record of a task of a finished job, whose error is in that of the job, if it is the one that counts."""
    return task if task.error is None else task.model_copy(update={"error": None})


def is_slim_error(error: TaskError | None) -> bool:
    """True when there is more to the error than is kept in memory."""
    return error is not None and error.pickled == _MARK


def _size(error: TaskError) -> int:
    return len(error.traceback) + len(error.pickled or b"")
