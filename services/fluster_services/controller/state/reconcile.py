"""What must be written next about a job, decided from its records alone.

It may be asked at any time and any number of times: after a change, after a restart, after a write that another
beat. So nothing depends on having seen every event.

A job with `after` is recorded without tasks. Once all that it names have ended it is released: its record says so, for
good, and its tasks are recorded and offered. So neither the scheduler nor a worker ever meets a task that must not run
yet, and a waiting job costs nothing but its record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from fluster_bus.core.names import did_you_mean, near_names
from fluster_bus.messages import Endpoint, JobId, JobRecord, JobRequest, JobStatus, TaskRecord
from fluster_services import gangs, job_lifecycle, lifecycle
from fluster_services.controller.state.job_index import JobEntry


def next_records(
    entry: JobEntry,
    *,
    now: float,
    parent: JobRecord | None,
    launcher: TaskRecord | None = None,
    after: Mapping[JobId, JobRecord] | None = None,
    is_gathering: bool = False,
    with_children: Collection[int] = (),
) -> list[JobRecord | TaskRecord]:
    """The records that replace present ones, so many at most that the rest is asked for when these are written: kill wishes passed on, retries, the release of a job that waited for those
    in `after`, the job's end.

    `launcher` is the task of `parent` that launched the job. `is_gathering` says that this controller has offers of the
    job, which is a gang, out. `with_children` are the tasks that launched jobs which have not ended: their next attempts
    do not begin yet.
    """
    if entry.job is None:
        return []
    job = entry.job.value
    if job.state.finished():
        return []
    orphaned = _orphaned(job, parent, launcher) if parent is not None else None
    if orphaned is not None:
        killed = job_lifecycle.request_job_kill(job, reason=orphaned)
        if killed is not None:
            return [killed]
    if job_lifecycle.awaits_others(job):
        followed = next_dependent_record(job, after or {}, now=now)
        return [followed] if followed is not None else []
    tasks = entry.task_records()
    stop = job.kill_requested or (gangs.why_stop(tasks) if job.request.gang else _too_many_failures(job, tasks))
    if job.request.gang and stop is None:
        following = gangs.next_records(job, tasks, now=now, is_gathering=is_gathering)
        if following:
            return following if not with_children else [each for each in following if not _begins_anew(each, entry)]
    changes = (
        new
        for task in tasks
        if (new := _next_task(task, now, stop=stop)) is not None
        and not (task.task in with_children and _begins_anew(new, entry))
    )
    if changed := list(islice(changes, gangs.MAX_AT_ONCE)):
        return list(changed)
    if len(tasks) < job.request.replicas:
        return []  # its tasks' records are still being written
    finished = job_lifecycle.finish_job(job, tasks, now=now)
    return [finished] if finished is not None else []


def _begins_anew(record: JobRecord | TaskRecord, entry: JobEntry) -> bool:
    """True for the next attempt of a task."""
    return isinstance(record, TaskRecord) and record.attempt > entry.tasks[record.task].value.attempt


def _orphaned(job: JobRecord, parent: JobRecord, launcher: TaskRecord | None) -> str | None:
    """Why the job has to end: what launched it did, or the one that has the parent's id now is another."""
    attempt = job.request.parent_attempt
    if attempt is not None and attempt < parent.first_attempt:
        return f"its parent {parent.job_id} was replaced"
    if parent.state.finished():
        return f"its parent {parent.job_id} ended as {parent.state}"
    return why_attempt_is_over(job.request, launcher)


def why_attempt_is_over(request: JobRequest, launcher: TaskRecord | None) -> str | None:
    """Why a job that was launched from within another's attempt cannot live on: that attempt has ended.

    What an unfinished task launched belongs to its present attempt at the latest, whatever the request says.
    """
    if launcher is None or request.parent_attempt is None:
        return None
    if launcher.attempt > request.parent_attempt or launcher.state.finished():
        return f"attempt {request.parent_attempt} of its parent {launcher.job_id} has ended"
    return None


def missing_tasks(entry: JobEntry) -> Iterator[TaskRecord]:
    """The tasks of a job that have no record yet, if they are recorded later than the job."""
    if entry.job is None or entry.job.value.state.finished() or not job_lifecycle.is_recorded_later(entry.job.value):
        return
    if len(entry.tasks) == entry.job.value.request.replicas:
        return  # as nearly always, and this is asked after each change of each task
    for task in job_lifecycle.each_new_task(entry.job.value):
        if task.task not in entry.tasks:
            yield task


def _too_many_failures(job: JobRecord, tasks: list[TaskRecord]) -> str | None:
    """Why the tasks that are left are to be stopped, when more have failed for good than the job puts up with."""
    failed = [task for task in tasks if task.state in _FAILURES and lifecycle.is_final(task)]
    allowed = job.request.max_task_failures
    if job.request.array is not None and not allowed:
        return None
    if len(failed) <= allowed:
        return None
    return f"{len(failed)} of {job.request.replicas} tasks failed, and max_task_failures is {allowed}"


_FAILURES = (JobStatus.FAILED, JobStatus.WORKER_FAILED, JobStatus.UNSCHEDULABLE)


def _next_task(task: TaskRecord, now: float, *, stop: str | None) -> TaskRecord | None:
    if stop is not None:
        return lifecycle.request_kill(task, now=now, reason=stop)
    return lifecycle.retry(task, now=now) if not task.gang else None


def is_stale(endpoint: Endpoint, entry: JobEntry | None) -> bool:
    """True when the attempt that made this endpoint is over. One of no job lives by its lease instead."""
    if endpoint.job_id is None:
        return False
    row = entry.tasks.get(endpoint.task) if entry is not None else None
    return row is None or endpoint.attempt <= last_attempt_over(row.value)


def last_attempt_over(task: TaskRecord) -> int:
    """The newest attempt of a task whose endpoints are of no use.

    A record of an attempt that no worker holds yet is from before its endpoints: registry and records come by different ways.
    """
    return task.attempt if task.state.finished() else task.attempt - 1


def next_dependent_record(job: JobRecord, known: Mapping[JobId, JobRecord], *, now: float) -> JobRecord | None:
    """The waiting job's record with what follows: released, or ended with the reason; None while it has to wait.

    `known` has the jobs that it names. One that is not there is over, and ended well enough: it was there when the job
    was submitted, its record outlives it by days, and had it failed this job would have heard of it then.
    """
    if not job_lifecycle.awaits_others(job):
        return None
    if job.kill_requested is not None:
        return job_lifecycle.end_unreleased(job, state=JobStatus.KILLED, now=now, reason=job.kill_requested)
    failed = next((each for each in _ended(job, known) if each.state is not JobStatus.SUCCEEDED), None)
    if failed is not None and job.request.after_failure == "fail":
        why = f": {failed.error_message}" if failed.error_message else ""
        reason = f"it was to run after job {failed.job_id}, which ended as {failed.state}{why}"
        return job_lifecycle.end_unreleased(job, state=JobStatus.FAILED, now=now, reason=reason)
    if waits_for(job, known):
        return None
    return job_lifecycle.release_job(job, now=now)


def waits_for(job: JobRecord, known: Mapping[JobId, JobRecord]) -> list[JobRecord]:
    """The jobs that it still waits for, in the order in which it names them."""
    return [known[job_id] for job_id in job.request.after if job_id in known and not known[job_id].is_over]


def _ended(job: JobRecord, known: Mapping[JobId, JobRecord]) -> Iterable[JobRecord]:
    return (known[job_id] for job_id in job.request.after if job_id in known and known[job_id].is_over)


def unknown_dependency(
    job_ids: Iterable[JobId], is_known: Callable[[JobId], bool], names: Callable[[], Sequence[JobId]]
) -> str | None:
    """Why a job cannot wait for these: one does not exist. `names` are ids among which a similar one is looked for."""
    missing = next((job_id for job_id in job_ids if not is_known(job_id)), None)
    if missing is None:
        return None
    hint = did_you_mean(near_names(missing, names())) or ": submit it first"
    return f"after={missing!r}: there is no such job{hint}"
