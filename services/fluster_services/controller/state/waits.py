"""Since when tasks wait that must not before, or not after, a time: by this controller's own monotonic clock.

It is told of records also while it stands by. So a deadline goes on where it stood when another leads, and when a task of a
gang is held and let go. What waited before this controller was there is as old as the bus says, by the one clock that has
stamped its record and tells its time now.
"""

from __future__ import annotations

from datetime import datetime

from fluster_bus.messages import JobRecord, JobStatus, TaskRecord
from fluster_bus.storage.tables import Row
from fluster_services.controller.state.books import JobKey


class Waits:
    """The tasks that wait, or are held for a gang, and have a pause or a deadline. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[JobKey, dict[int, tuple[int, int, float]]] = {}  # {job: {task: (order, attempt, since)}}

    def on_task(self, key: JobKey, task: TaskRecord, *, since: float) -> None:
        """A record was seen: if its attempt is new here, it waits since then."""
        waits = task.state is JobStatus.PENDING or (task.gang and task.state is JobStatus.BUILDING)
        if waits and (task.backoff_s or task.scheduling_timeout_s is not None):
            known = self._since.setdefault(key, {}).get(task.task)
            if known is None or known[:2] != (task.order, task.attempt):
                self._since[key][task.task] = (task.order, task.attempt, since)
        elif key in self._since:
            self._since[key].pop(task.task, None)
            if not self._since[key]:
                del self._since[key]

    def forget(self, key: JobKey) -> None:
        """A job is not there any more."""
        self._since.pop(key, None)

    def pause_s(self, key: JobKey, task: TaskRecord, *, now: float) -> float:
        """How long the task is not to be offered yet; 0 when it may be."""
        return max(0.0, task.backoff_s - self._waited_s(key, task, now))

    def left_s(self, key: JobKey, task: TaskRecord, *, now: float) -> float | None:
        """How long the task may wait yet, None when for ever. Its pause does not count."""
        if task.scheduling_timeout_s is None:
            return None
        return max(0.0, task.backoff_s + task.scheduling_timeout_s - self._waited_s(key, task, now))

    def _waited_s(self, key: JobKey, task: TaskRecord, now: float) -> float:
        known = self._since.get(key, {}).get(task.task)
        return now - known[2] if known is not None and known[:2] == (task.order, task.attempt) else 0.0


def waited_s(row: Row[JobRecord | TaskRecord], now: datetime) -> float:
    """For how long what the record tells of had waited when the bus's clock showed `now`."""
    held_after = row.value.waiting_since if isinstance(row.value, TaskRecord) else None
    since = held_after or row.stored_at
    return max(0.0, (now - since).total_seconds()) if since is not None else 0.0
