"""Has the worker of a task say where that is in its Python code: tenants may not ask workers themselves."""

from __future__ import annotations

from collections.abc import Sequence

from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import NoRespondersError, RequestTimeoutError, ServiceError
from fluster_bus.messages import AttemptQuery, JobRecord, JobStatus, TaskRecord
from fluster_bus.messages.parts.arrays import number_in
from fluster_bus.messages.stacks import TaskStack, TaskStackRequest

_TIMEOUT_S = 15.0  # above the time that a worker takes at most, and below that of the client


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
