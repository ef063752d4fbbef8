"""What notebooks show of a job, and of other objects: a heading, facts, tables and bars. All text in it is escaped."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluster_bus.messages.jobs import JobInfo, TaskStatus

_MOST_ROWS = 20
_COLOURS = {
    "RUNNING": "#0b7285",
    "SUCCEEDED": "#2b8a3e",
    "FAILED": "#c92a2a",
    "WORKER_FAILED": "#c92a2a",
    "UNSCHEDULABLE": "#c92a2a",
    "KILLED": "#e67700",
    "lost": "#c92a2a",
}


def view(heading: str, facts: Mapping[str, object], *parts: str) -> str:
    """HTML of an object with that heading, its facts, those that are neither None nor empty, and further parts."""
    told = {name: value for name, value in facts.items() if value is not None and value != ""}
    rows = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th><td style="text-align: left">{_cell(value)}</td></tr>'
        for name, value in told.items()
    )
    return f"<div><strong>{escape(heading)}</strong><table>{rows}</table>{''.join(parts)}</div>"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of the first rows; nothing when there are none."""
    if not rows:
        return ""
    head = "".join(f'<th style="text-align: left">{escape(column)}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align: left">{_cell(cell)}</td>' for cell in row) + "</tr>"
        for row in rows[:_MOST_ROWS]
    )
    left = len(rows) - _MOST_ROWS
    more = f"<div>… and {left:,} more</div>" if left > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def bar(done: float, total: float | None, text: str) -> str:
    """A bar as long as what is done of all, and a text behind it. Without a total, one that only says that it goes on."""
    extent = "" if total is None else f' value="{done:g}" max="{max(total, 1e-9):g}"'
    return f'<div><progress{extent} style="width: 20em"></progress> {escape(text)}</div>'


def _cell(value: object) -> str:
    text = "-" if value is None else str(value)
    colour = _COLOURS.get(text)
    return escape(text) if colour is None else f'<span style="color: {colour}">{escape(text)}</span>'


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
    return view(f"Job {job.job_id}", facts, shown, table(_TASK_COLUMNS, [_row(task) for task in job.tasks]))


_TASK_COLUMNS = ("task", "status", "attempt", "worker", "exit code", "ran for", "error")


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
