"""Jobs and tasks as users see them, made of their records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from fluster_bus.messages import JobInfo, JobRecord, JobStatus, Progress, TaskRecord, TaskStatus
from fluster_bus.messages.parts.arrays import TaskArray, number_in
from fluster_services.lifecycle import is_final

_UNHAPPY = (JobStatus.FAILED, JobStatus.KILLED, JobStatus.WORKER_FAILED, JobStatus.UNSCHEDULABLE)


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
        after=job.request.after,
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
