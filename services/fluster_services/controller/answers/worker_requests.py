"""Passes requests about a job on to its workers: tenants may not ask workers themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, NoRespondersError, RequestTimeoutError, ServiceError
from fluster_bus.messages import (
    AttemptQuery,
    AttemptsFlushRequest,
    JobId,
    JobRecord,
    JobStatus,
    Namespace,
    TaskRecord,
    WorkerId,
)
from fluster_bus.messages.parts.arrays import number_in
from fluster_bus.messages.stacks import TaskStack, TaskStackRequest

_TIMEOUT_S = 15.0  # above the time that a worker takes at most, and below that of the client
_FLUSH_TIMEOUT_S = 4.0  # above what a worker takes at most, and below the client's own
_AT_ONCE = 100  # workers


async def stack_of(bus: Bus, job: JobRecord, tasks: Sequence[TaskRecord], request: TaskStackRequest) -> TaskStack:
    """The stacks of one of the tasks of a job. Raises ServiceError when it does not run, or its worker cannot tell them."""
    task = next((each for each in tasks if each.task == request.task), None)
    which = f"task {number_in(job.request.array, request.task)} of job {request.job_id!r}"
    if task is None:
        raise ServiceError("StackError", f"{which} does not exist: the job has {len(tasks)} tasks, from 0 on")
    if task.worker_id is None or task.state is not JobStatus.RUNNING:
        raise ServiceError("StackError", f"{which} does not run, so it has no stack: it is {task.state}")
    query = AttemptQuery(namespace=task.namespace, job_id=task.job_id, task=task.task, attempt=task.attempt)
    verb = subjects.worker_verb(task.worker_id, "stack")
    try:
        answer = await bus.request(verb, query.to_json(), timeout_s=_TIMEOUT_S)
    except (NoRespondersError, RequestTimeoutError) as error:
        raise ServiceError(
            "StackError", f"{which}: worker {task.worker_id} does not answer: `fluster workers` says how it is"
        ) from error
    except ServiceError as error:
        raise ServiceError(error.code, f"{which}: {error}") from error
    return TaskStack.from_json(answer.data)


log = logging.getLogger(__name__)


async def flush_job(bus: Bus, namespace: Namespace, job_id: JobId, tasks: Sequence[TaskRecord]) -> None:
    """Return when what these tasks had written is in the log stream, or some seconds have passed."""
    workers = {task.worker_id for task in tasks if task.worker_id is not None and not task.state.finished()}
    request = AttemptsFlushRequest(namespace=namespace, job_id=job_id)
    room = asyncio.Semaphore(_AT_ONCE)

    async def flush(worker_id: WorkerId) -> None:
        async with room:
            try:
                await bus.request(
                    subjects.worker_verb(worker_id, "flush"), request.to_json(), timeout_s=_FLUSH_TIMEOUT_S
                )
            except BusError as error:  # it is away, or of a version that does not know how: what is stored is used
                log.info("the output of %s is not flushed at worker %s: %s", job_id, worker_id, error)

    flushes = [asyncio.create_task(flush(worker_id)) for worker_id in sorted(workers)]
    if not flushes:
        return
    try:
        await asyncio.wait(flushes, timeout=_FLUSH_TIMEOUT_S)
    finally:
        for each in flushes:
            each.cancel()
