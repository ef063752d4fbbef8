"""The life of a job, as pure functions: its record, those of its tasks, and what is asked in; the new record out.
And how a job and its tasks stand, as users see them.

A job that is to run after others has no tasks until it is released. Its end follows from those of its tasks (`lifecycle.py`).
A function that makes records returns None when nothing is to be written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from fluster_bus.messages import (
    JobId,
    JobInfo,
    JobRecord,
    JobRequest,
    JobStatus,
    Namespace,
    Progress,
    TaskRecord,
    TaskStatus,
    Transition,
)
from fluster_bus.messages.parts.arrays import TaskArray, number_in
from fluster_services.lifecycle import is_final, moved

TASKS_WITH_JOB = 64  # a job that has more is recorded before them, so that the next job need not wait for all
_UNHAPPY = (JobStatus.FAILED, JobStatus.KILLED, JobStatus.WORKER_FAILED, JobStatus.UNSCHEDULABLE)


def new_job(namespace: Namespace, job_id: JobId, request: JobRequest, *, order: int, now: float) -> JobRecord:
    """The record of a job as it is submitted."""
    first = Transition(number=1, state=JobStatus.PENDING, time=now, reason="submitted")
    return JobRecord(
        job_id=job_id, namespace=namespace, request=request, order=order, submitted_at=now, transitions=(first,)
    )


def new_tasks(job: JobRecord) -> list[TaskRecord]:
    """The records of a job's tasks, all waiting for a worker; none yet while the job waits for others."""
    return list(each_new_task(job))


def is_recorded_later(job: JobRecord) -> bool:
    """True when the tasks are not recorded together with the job: it had to wait for others, or has so many of them that other
    jobs would wait for that.
    """
    return job.released or job.request.replicas > TASKS_WITH_JOB


def each_new_task(job: JobRecord) -> Iterator[TaskRecord]:
    """The same, one after the other: it takes some time to make 10,000 of them."""
    if awaits_others(job):
        return
    request = job.request
    # When it was submitted, or released.
    since = job.transitions[-1]
    first = Transition(
        number=job.told_before + 1,
        state=JobStatus.PENDING,
        time=since.time,
        reason=since.reason,
        attempt=job.first_attempt,
    )
    for task in range(request.replicas):
        yield TaskRecord(
            job_id=job.job_id,
            namespace=job.namespace,
            task=task,
            order=job.order,
            priority=request.priority,
            resources=request.resources,
            max_retries_failure=request.max_retries_failure,
            max_retries_preemption=request.max_retries_preemption,
            retry_window_s=request.retry_window_s,
            retry_backoff_s=request.retry_backoff_s,
            scheduling_timeout_s=request.scheduling_timeout_s,
            gang=request.gang,
            attempt=job.first_attempt,
            transitions=(first,),
        )


def request_job_kill(job: JobRecord, *, reason: str) -> JobRecord | None:
    """The job is to be stopped; its tasks are stopped one by one after this is written.

    One that is about to be replaced is being stopped already: then the wish is meant for its replacement.
    """
    if job.replacement is not None:
        if job.replacement.kill_requested is not None:
            return None
        stopped = job.replacement.model_copy(update={"kill_requested": reason})
        return job.model_copy(update={"replacement": stopped})
    if job.state.finished() or job.kill_requested is not None:
        return None
    return job.model_copy(update={"kill_requested": reason})


def awaits_others(job: JobRecord) -> bool:
    """True while jobs that it is to run after have not ended: then its tasks have no records."""
    return bool(job.request.after) and not job.released


def release_job(job: JobRecord, *, now: float) -> JobRecord | None:
    """What the job was to run after has ended: its tasks may be recorded, and offered."""
    if job.state.finished() or not awaits_others(job):
        return None
    return moved(job, JobStatus.PENDING, now, "what it was to run after has ended", released=True)


def end_unreleased(job: JobRecord, *, state: JobStatus, now: float, reason: str) -> JobRecord | None:
    """The end of a job that still waited for others, so that none of its tasks was ever there."""
    if job.state.finished() or not awaits_others(job):
        return None
    return moved(job, state, now, reason, error_message=reason, finished_at=now)


def finish_job(job: JobRecord, tasks: Iterable[TaskRecord], *, now: float) -> JobRecord | None:
    """The job's end, once all its tasks have ended: SUCCEEDED if all did, KILLED if that was asked for, else the
    worst that happened to one, with its error and its last words.
    """
    tasks = sorted(tasks, key=lambda task: task.task)  # so that each decision names the same culprit
    if job.state.finished() or not tasks or not all(is_final(task) for task in tasks):
        return None
    state = _joined_state(job, tasks)
    culprit = next((task for task in tasks if task.state is state), None) if state is not JobStatus.SUCCEEDED else None
    message = (job.kill_requested or "") if state is JobStatus.KILLED else ""
    if culprit is not None:
        message = culprit.transitions[-1].reason if culprit.transitions else ""
        if len(tasks) > 1 and not _is_of_all(job, state):
            message = f"task {number_in(job.request.array, culprit.task)}: {message}"
        # What could not be started says the same there.
        if culprit.last_words.removeprefix("fluster: ") not in message:
            message = f"{message}; its last words:\n{culprit.last_words}"
    started = [task.started_at for task in tasks if task.started_at is not None]
    return moved(
        job,
        state,
        now,
        message or "all tasks succeeded",
        error_message=message,
        error=culprit.error if culprit else None,
        started_at=min(started, default=None),
        finished_at=now,
    )


def _is_of_all(job: JobRecord, state: JobStatus) -> bool:
    """True when what happened to one task was meant for all: a wish to stop the job, or a gang that nothing can hold."""
    return job.kill_requested is not None or (state is JobStatus.UNSCHEDULABLE and job.request.gang)


def _joined_state(job: JobRecord, tasks: list[TaskRecord]) -> JobStatus:
    states = {task.state for task in tasks}
    if states == {JobStatus.SUCCEEDED}:
        return JobStatus.SUCCEEDED
    if job.kill_requested is not None:
        return JobStatus.KILLED
    order = (JobStatus.FAILED, JobStatus.UNSCHEDULABLE, JobStatus.WORKER_FAILED, JobStatus.KILLED)
    return next(state for state in order if state in states)


def job_info(
    job: JobRecord, tasks: Iterable[TaskRecord], progress: Mapping[int, Progress] = MappingProxyType({})
) -> JobInfo:
    """The job as users see it. Before its end its tasks tell how it stands; `progress` is what those that run have said."""
    tasks = list(tasks)
    return job_summary(job, tasks).model_copy(update={"tasks": tuple(task_statuses(job, tasks, progress))})


def job_summary(job: JobRecord, tasks: Sequence[TaskRecord]) -> JobInfo:
    """The same without its tasks, of which there may be thousands."""
    started = [task.started_at for task in tasks if task.started_at is not None]
    return JobInfo(
        job_id=job.job_id,
        name=job.request.name,
        namespace=job.namespace,
        status=job_status(job, tasks),
        submitted_at=job.submitted_at,
        started_at=job.started_at or min(started, default=None),
        finished_at=job.finished_at,
        error_message=job.error_message,
        error=job.error,
        parent=job.request.parent,
        after=tuple(job.request.after),
        priority=job.request.priority,
        first_attempt=job.first_attempt,
        array=job.request.array,
    )


def task_statuses(
    job: JobRecord, tasks: Iterable[TaskRecord], progress: Mapping[int, Progress]
) -> Iterator[TaskStatus]:
    """The tasks of a job as users see them, by their ranks."""
    for task in sorted(tasks, key=lambda task: task.task):
        yield _task_status(task, job.request.array, progress.get(task.task))


def job_status(job: JobRecord, tasks: Sequence[TaskRecord]) -> JobStatus:
    """How the job stands."""
    if job.state.finished():
        return job.state if job.is_over else JobStatus.PENDING  # it is the replacement that is asked for
    return _present_state(tasks)


def _present_state(tasks: Sequence[TaskRecord]) -> JobStatus:
    # One that ended without having been started, as for want of room, makes no job run.
    if any(task.state is JobStatus.RUNNING or (task.state.finished() and task.started_at) for task in tasks):
        return JobStatus.RUNNING
    return JobStatus.BUILDING if any(task.state is JobStatus.BUILDING for task in tasks) else JobStatus.PENDING


def _task_status(task: TaskRecord, array: TaskArray | None, progress: Progress | None) -> TaskStatus:
    return TaskStatus(
        task=task.task,
        status=task.state,
        attempt=task.attempt,
        worker_id=task.worker_id,
        exit_code=task.exit_code,
        error_message=task.transitions[-1].reason if task.transitions and task.state in _UNHAPPY else "",
        started_at=task.started_at,
        finished_at=task.finished_at,
        has_output=task.has_output,
        failures=task.failures,
        preemptions=task.preemptions,
        will_retry=task.state.finished() and not is_final(task),
        last_failure=task.last_failure if task.failures or task.preemptions else "",
        result=task.result,
        progress=progress or task.progress,
        image=task.image,
        gpus=task.gpus,
        array_id=None if array is None else number_in(array, task.task),
    )
