"""Records without what a controller has no use for, so that many jobs fit into its memory.

A pickled callable is needed by the worker alone, which reads the record itself; once the job has finished, nothing needs it, so
its last record is written without it. In its place stands its hash, by which two requests can be distinguished. What else may
be large of a request (a long command, variables, fields of another version) stays on the bus, and is read there before the
record is written again. The exceptions of finished jobs are read again when a client asks.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from types import MappingProxyType

from fluster_bus.messages import (
    Entrypoint,
    EnvironmentConfig,
    JobRecord,
    JobRequest,
    Message,
    ResourceConfig,
    TaskError,
    TaskRecord,
    Transition,
)

_SMALL_BYTES = 1_024  # not worth the trouble
_MARK = b"sha256:"  # no pickle begins so
_LEFT = b"on the bus"  # in the place of a request's body
MAX_BODY_BYTES = 8 << 10  # that are kept in memory of a request's body, as `weighs_more` counts them
_OVERHEAD_BYTES = 50  # of each value
_WITHOUT_PARTS = frozenset({type(None), bool, int, float})
_TEXTS, _ROWS = (str, bytes), (list, tuple)
# What is not asked of a job that has finished: the same for all.
_OF_NO_USE: Mapping[str, object] = MappingProxyType(
    {
        "entrypoint": Entrypoint(pickled=_MARK),
        "resources": ResourceConfig(),
        "environment": EnvironmentConfig(),
        "origin": None,
    }
)


def weighs_more(value: object, limit: int) -> bool:
    """True when a value takes more than about `limit` bytes of memory. It is not looked at beyond that."""
    weight, ahead = 0, [value]
    while ahead and weight <= limit:
        each = ahead.pop()
        weight += _OVERHEAD_BYTES
        # By the type first: this is done for each record, and most values are small and plain.
        kind = type(each)
        if kind in _WITHOUT_PARTS:
            continue
        if isinstance(each, _TEXTS):
            weight += len(each)
        elif isinstance(each, _ROWS):
            weight += len(each)
            ahead += itertools.islice(each, limit)
        elif isinstance(each, Message):
            weight += _OVERHEAD_BYTES * len(each.__dict__)
            ahead += filter(None, each.__dict__.values())
            if each.__pydantic_extra__:
                ahead += each.__pydantic_extra__.items()
        elif isinstance(each, Mapping):
            weight += _OVERHEAD_BYTES * len(each)
            ahead += itertools.islice(each.items(), limit)
    return weight > limit


def slim_request(request: JobRequest) -> JobRequest:
    """The request with the hash of its callable in its place, and without a body that is large for another reason."""
    request = without_callable(request)
    if is_left(request) or not weighs_more(_body(request), MAX_BODY_BYTES):
        return request
    entrypoint = Entrypoint(pickled=_LEFT)
    environment = EnvironmentConfig(secrets=request.environment.secrets)
    left = {"entrypoint": entrypoint, "environment": environment, "origin": None}
    return request.compact_copy(left).without_unknown()


def _body(request: JobRequest) -> tuple[object, ...]:
    return request.entrypoint, request.environment, request.origin, request.__pydantic_extra__ or None


def is_left(request: JobRequest) -> bool:
    """True when the request's body is on the bus alone."""
    return request.entrypoint.pickled == _LEFT


def without_callable(request: JobRequest) -> JobRequest:
    """The request with the hash of its callable in its place."""
    pickled = request.entrypoint.pickled
    if pickled is None or len(pickled) <= _SMALL_BYTES:
        return request
    mark = _MARK + hashlib.sha256(pickled).digest()
    entrypoint = request.entrypoint.model_copy(update={"pickled": mark, "callable": None, "args": (), "kwargs": {}})
    return request.model_copy(update={"entrypoint": entrypoint})


def is_slim_request(request: JobRequest) -> bool:
    """True when the callable, or the whole body, is not there."""
    pickled = request.entrypoint.pickled
    return pickled is not None and pickled.startswith((_MARK, _LEFT))


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
    request = job.request.compact_copy({**_OF_NO_USE, "job_id": job.request.job_id and job.job_id}).without_unknown()
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
