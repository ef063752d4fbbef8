"""What notebooks show of a job."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fluster_bus.core.html_view import bar, table, view

if TYPE_CHECKING:
    from fluster_bus.messages.jobs import JobInfo, TaskStatus


def job_view(job: JobInfo) -> str:
    """HTML of a job as it stands in `job`, with its tasks."""
    facts: dict[str, object] = {
        "status": job.status,
        "namespace": job.namespace,
        "submitted": _moment(job.submitted_at),
        "ran for" if job.finished_at is not None else "runs for": _duration(job.started_at, job.finished_at),
        "exit code": job.exit_code,
        "error": job.error_message,
        "after": ", ".join(job.after),
        "parent": job.parent,
    }
    fraction = job.progress
    shown = bar(fraction, 1, f"{fraction:.0%} {job.progress_message}".strip()) if fraction is not None else ""
    return view(f"Job {job.job_id}", facts, shown, table(_COLUMNS, [_row(task) for task in job.tasks]))


_COLUMNS = ("task", "status", "attempt", "worker", "exit code", "ran for", "error")


def _row(task: TaskStatus) -> tuple[object, ...]:
    return (
        task.number,
        task.status,
        task.attempt,
        task.worker_id,
        task.exit_code,
        _duration(task.started_at, task.finished_at),
        task.error_message or task.last_failure,
    )


def _moment(since_epoch: float | None) -> str | None:
    return None if since_epoch is None else f"{datetime.fromtimestamp(since_epoch, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _duration(started_at: float | None, finished_at: float | None) -> str | None:
    if started_at is None:
        return None
    return f"{max((finished_at or time.time()) - started_at, 0):,.1f} s"
