"""What jobs returned: read, checked, and made into objects again."""

from __future__ import annotations

import json

from fluster.errors import JobFailedError, JobResultError
from fluster.remote_errors.kindred_errors import restored
from fluster_bus.connection.bus import Bus
from fluster_bus.core import codec
from fluster_bus.core.errors import ObjectCorruptError, ObjectNotFoundError
from fluster_bus.core.stream_bounds import PAYLOADS
from fluster_bus.messages import JobInfo, JobStatus, TaskResult, TaskStatus
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.stored_messages import ResultStore


async def results_of(bus: Bus, info: JobInfo, task: int | None) -> object:
    """What the finished job returned: of its only task, of task `task`, or of all by rank.

    Raises what it raised, else JobFailedError; JobResultError, and ValueError for a task that it does not have.
    """
    values = [_decoded(info, each, await _pickled(bus, info, each)) for each in _wanted(info, task)]
    return values if task is None and len(info.tasks) > 1 else values[0]


async def plain_results_of(bus: Bus, info: JobInfo, task: int | None) -> object:
    """The same where it is plain data, as JSON has it: no code of the job's runs here.

    Raises JobResultError for what has no such form, and as `results_of` does.
    """
    values = [await _plain(bus, info, each) for each in _wanted(info, task)]
    return values if task is None and len(info.tasks) > 1 else values[0]


async def pickled_result_of(bus: Bus, info: JobInfo, task: int | None) -> bytes | None:
    """The pickle of what one task returned, None for None. Raises as `results_of` does."""
    wanted = _wanted(info, task)
    if len(wanted) > 1:
        raise JobResultError(f"job {info.job_id} has {len(wanted)} tasks: say which one's result is meant")
    return await _pickled(bus, info, wanted[0])


def _wanted(info: JobInfo, task: int | None) -> list[TaskStatus]:
    wanted = [each for each in info.tasks if task is None or each.task == task]
    if not wanted and task is not None:
        raise ValueError(f"job {info.job_id} has no task {task}: it has {len(info.tasks)}, numbered from 0")
    status = info.status if task is None else wanted[0].status
    if status is not JobStatus.SUCCEEDED or not wanted:
        raise _failure(info)
    return wanted


def _failure(info: JobInfo) -> Exception:
    failed = JobFailedError(info)
    if info.error is None:
        return failed
    return restored(info.error.pickled, failed, traceback=info.error.traceback, where=f"in job {info.job_id}")


async def _pickled(bus: Bus, info: JobInfo, status: TaskStatus) -> bytes | None:
    if status.result is None:
        return None
    data = await _stored(bus, info, status, status.result)
    return data[: len(data) - status.result.json_size]


async def _plain(bus: Bus, info: JobInfo, status: TaskStatus) -> object:
    result = status.result
    if result is None:
        return None
    data = await _stored(bus, info, status, result) if result.json_size or result.error else b""
    try:
        return json.loads(data[len(data) - result.json_size :])
    except (ValueError, RecursionError) as error:
        raise JobResultError(
            f"what {_name(info, status)} returned is not plain data of 1 MiB at most, so that it has to be "
            "unpickled: that runs code "
            "of the job's choice with your rights (`fluster result --unpickle`); --pickled FILE writes it without"
        ) from error


async def _stored(bus: Bus, info: JobInfo, status: TaskStatus, result: TaskResult) -> bytes:
    if result.error:
        raise JobResultError(f"{_name(info, status)} succeeded, and its result is not kept: {result.error}")
    try:
        if result.object:
            return await ObjectStore(bus, info.namespace, PAYLOADS).get(result.object)
        store = ResultStore(bus, info.namespace)
        return await store.get(info.job_id, status.task, status.attempt, result.size)
    except (ObjectNotFoundError, ObjectCorruptError) as error:
        raise JobResultError(f"{_name(info, status)} succeeded, but {error}") from error


def _decoded(info: JobInfo, status: TaskStatus, pickled: bytes | None) -> object:
    if pickled is None:
        return None
    try:
        return codec.decode(pickled)
    except Exception as error:
        raise JobResultError(
            f"what {_name(info, status)} returned cannot be unpickled here: {type(error).__name__}: {error}; "
            "the modules that it needs must be importable, in the same versions"
        ) from error


def _name(info: JobInfo, status: TaskStatus) -> str:
    return f"task {status.number} of job {info.job_id}" if len(info.tasks) > 1 else f"job {info.job_id}"
