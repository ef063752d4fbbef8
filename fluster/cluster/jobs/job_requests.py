"""Requests to the controller about jobs: which there are, to end one, why one waits, where its tasks are in their
code.
"""

from __future__ import annotations

from collections.abc import Sequence

from fluster.errors import JobNotFoundError, StackError
from fluster_bus.connection.bus import Bus, Reply
from fluster_bus.core import subjects
from fluster_bus.core.errors import ServiceError
from fluster_bus.messages import (
    ExplainReply,
    ExplainRequest,
    JobId,
    JobInfo,
    JobStatus,
    ListReply,
    ListRequest,
    Message,
    Namespace,
    TaskStatus,
    TerminateReply,
    TerminateRequest,
)
from fluster_bus.messages.requests import MAX_JOBS_A_REQUEST
from fluster_bus.messages.stacks import JobStack, TaskStack, TaskStackRequest

_TASKS = 16  # that are asked about at once: each is work for its worker
_TIMEOUT_S = 20.0  # the worker takes 10 s at most, for a task of many processes
_ATTEMPT_NOT_FOUND = "AttemptNotFoundError"  # the worker's word


async def list_jobs(
    bus: Bus, namespace: Namespace, *, limit: int, states: Sequence[JobStatus], details: bool
) -> list[JobInfo]:
    """The namespace's jobs, the newest first, `limit` at most. Raises what `Bus.ask` raises."""
    found: dict[JobId, JobInfo] = {}  # a job that is submitted meanwhile moves the others on
    skip, cursor, more = 0, None, True
    while more and len(found) < limit:
        at_once = min(limit - len(found), MAX_JOBS_A_REQUEST)
        request = ListRequest(limit=at_once, states=tuple(states), skip=skip, after=cursor, details=details)
        reply = await bus.ask(subjects.jobs_verb(namespace, "list"), request, ListReply)
        found |= {info.job_id: info for info in reply.jobs}
        more, cursor = reply.more, reply.cursor
        # A controller of an older version has no cursors.
        skip = 0 if cursor is not None else skip + len(reply.jobs)
    return list(found.values())


async def terminate(bus: Bus, namespace: Namespace, job_id: JobId, reason: str) -> None:
    """Have the job stopped. Raises JobNotFoundError, and what `Bus.ask` raises."""
    await _ask(bus, namespace, "terminate", TerminateRequest(job_id=job_id, reason=reason), TerminateReply)


async def explain(bus: Bus, namespace: Namespace, job_id: JobId) -> str:
    """Why the job is not running, in one sentence. Raises JobNotFoundError, and what `Bus.ask` raises."""
    return (await _ask(bus, namespace, "explain", ExplainRequest(job_id=job_id), ExplainReply)).reason


async def _ask(bus: Bus, namespace: Namespace, verb: str, request: Message, reply: type[Reply]) -> Reply:
    try:
        return await bus.ask(subjects.jobs_verb(namespace, verb), request, reply)
    except ServiceError as error:
        if error.code == JobNotFoundError.__name__:
            raise JobNotFoundError(str(error)) from error
        raise


async def ask_stack(bus: Bus, namespace: Namespace, job_id: JobId, task: int) -> TaskStack:
    """Where a task that runs is in its Python code, as its worker tells the controller.

    Raises StackError when that is not known, and what `Bus.request` raises.
    """
    request = TaskStackRequest(job_id=job_id, task=task)
    subject = subjects.jobs_verb(namespace, "stack")
    try:  # once: it is work for the worker, and an answer is late when it has been asked for twice
        answer = await bus.request(subject, request.to_json(), timeout_s=_TIMEOUT_S)
    except ServiceError as error:
        if error.code == JobNotFoundError.__name__:
            raise JobNotFoundError(str(error)) from error
        if error.code in (StackError.__name__, _ATTEMPT_NOT_FOUND):
            raise StackError(str(error)) from error
        raise
    return TaskStack.from_json(answer.data)


async def job_stack(bus: Bus, namespace: Namespace, info: JobInfo, task: int | None) -> JobStack:
    """The same of those tasks of a job that run, or of one. Raises StackError when none of them is known."""
    running = _running(info, task)
    found: list[TaskStack] = []
    problems: list[StackError] = []
    for each in running[:_TASKS]:
        try:
            found.append(await ask_stack(bus, namespace, info.job_id, each.task))
        except StackError as error:
            problems.append(error)
            problem = TaskStack(worker_id=each.worker_id, task=each.task, attempt=each.attempt, problem=str(error))
            found.append(problem)
    if len(problems) == len(found):
        raise problems[0]
    return JobStack(job_id=info.job_id, running=len(running), tasks=tuple(found))


def _running(info: JobInfo, task: int | None) -> Sequence[TaskStatus]:
    if task is not None and task >= len(info.tasks):
        raise ValueError(f"task={task}: job {info.job_id} has {len(info.tasks)}, from 0 on")
    asked = info.tasks if task is None else info.tasks[task : task + 1]
    running = [each for each in asked if each.status is JobStatus.RUNNING]
    if not running:
        what = f"job {info.job_id}" if task is None else f"task {info.number_of(task)} of job {info.job_id}"
        state = info.status if task is None else info.tasks[task].status
        hint = "" if state.finished() else f"; `fluster explain {info.job_id}` says why"
        raise StackError(f"{what} does not run, so it has no stack: it is {state}{hint}")
    return running
