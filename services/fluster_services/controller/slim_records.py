"""Records without what a controller has no use for, so that many jobs fit into its memory.

A pickled callable is needed by the worker alone, which reads the record itself; once the job has finished, by nobody, so
its last record is written without it. In its place stands its hash, by which two requests can be told apart. The
exceptions of finished jobs are read again for whoever asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fluster_bus.messages import (
    Entrypoint,
    EnvironmentConfig,
    JobRecord,
    JobRequest,
    ResourceConfig,
    TaskError,
    TaskRecord,
    Transition,
)

_SMALL_BYTES = 1_024  # not worth the trouble
_MARK = b"sha256:"  # no pickle begins so
# What nobody asks of a job that has finished: the same for all.
_OF_NO_USE: Mapping[str, Any] = MappingProxyType(
    {
        "entrypoint": Entrypoint(pickled=_MARK),
        "resources": ResourceConfig(),
        "environment": EnvironmentConfig(),
        "origin": None,
    }
)


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


def is_slim_end(job: JobRecord) -> bool:
    """True for the record of a finished job as it is kept in memory, which must not be written so."""
    return job.request.entrypoint.pickled == _MARK


def whole_end(job: JobRecord, present: JobRecord) -> JobRecord:
    """A changed version of such a record, with what only the one on the bus has."""
    return job.model_copy(
        update={"request": present.request, "error": present.error, "transitions": present.transitions}
    )


def slim_job(job: JobRecord) -> JobRecord:
    """The job's record as it is kept in memory. That of a finished job is not written again, so more of it can go."""
    if not job.state.finished():
        request = slim_request(job.request)
        return job if request is job.request else job.model_copy(update={"request": request})
    error = job.error
    if error is not None and _size(error) > _SMALL_BYTES:
        error = error.model_copy(update={"pickled": _MARK, "traceback": ""})
    request = job.request.compact_copy({**_OF_NO_USE, "job_id": job.request.job_id and job.job_id})
    return job.compact_copy({"request": request, "error": error, "transitions": _last(job.transitions)})


def slim_task(task: TaskRecord, job: JobRecord) -> TaskRecord:
    """The record of a task of a finished job, whose error is in that of the job, if it is the one that counts."""
    return task.compact_copy(
        {
            "job_id": job.job_id,
            "namespace": job.namespace,
            "error": None,
            "resources": _OF_NO_USE["resources"],
            "result": task.result and task.result.compact_copy({}),
            "transitions": _last(task.transitions),
        }
    )


def _last(transitions: tuple[Transition, ...]) -> tuple[Transition, ...]:
    return tuple(each.compact_copy({}) for each in transitions[-1:])


def is_slim_error(error: TaskError | None) -> bool:
    """True when there is more to the error than is kept in memory."""
    return error is not None and error.pickled == _MARK


def _size(error: TaskError) -> int:
    return len(error.traceback) + len(error.pickled or b"")
