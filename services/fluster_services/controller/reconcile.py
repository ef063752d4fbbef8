"""What must be written next about a job, decided from its records alone.

It may be asked at any time and any number of times: after a change, after a restart, after a write that somebody else
beat. So nothing depends on having seen every event.
"""

from __future__ import annotations

from fluster_bus.messages import Endpoint, JobRecord, TaskRecord
from fluster_services import lifecycle
from fluster_services.controller.books import JobEntry


def next_records(entry: JobEntry, *, now: float, parent: JobRecord | None) -> list[JobRecord | TaskRecord]:
    """The records that replace present ones: kill wishes passed on, retries, tasks that are missing, the job's end."""
    if entry.job is None:
        return []
    job = entry.job.value
    if job.state.finished():
        return []
    if parent is not None and parent.state.finished():
        killed = lifecycle.request_job_kill(job, reason=f"its parent {parent.job_id} ended as {parent.state}")
        if killed is not None:
            return [killed]
    tasks = entry.task_records()
    changed = [new for task in tasks if (new := _next_task(job, task, now)) is not None]
    if changed:
        return list(changed)
    if len(tasks) < job.request.replicas:
        return []  # its tasks' records are still being written
    finished = lifecycle.finish_job(job, tasks, now=now)
    return [finished] if finished is not None else []


def _next_task(job: JobRecord, task: TaskRecord, now: float) -> TaskRecord | None:
    if job.kill_requested is not None:
        return lifecycle.request_kill(task, now=now, reason=job.kill_requested)
    return lifecycle.retry(task, now=now)


def is_stale(endpoint: Endpoint, entry: JobEntry | None) -> bool:
    """True when no attempt that is alive has this endpoint. One of no job lives by its lease instead."""
    if endpoint.job_id is None:
        return False
    row = entry.tasks.get(endpoint.task) if entry is not None else None
    return row is None or row.value.attempt != endpoint.attempt or not lifecycle.is_held(row.value)
