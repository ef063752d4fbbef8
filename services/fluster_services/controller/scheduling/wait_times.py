"""Since when tasks wait that must not before, or not after, a time: by this controller's own monotonic clock.

It takes in records also while it stands by. So a deadline goes on where it stood when another leads, and when a task of a
gang is held and let go. What waited before this controller was there is as old as the bus says, by the one clock that has
stamped its record and tells its time now.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import TYPE_CHECKING

from fluster_bus.messages import JobRecord, JobStatus, Namespace, TaskRecord
from fluster_bus.storage.tables import Row
from fluster_services import lifecycle
from fluster_services.controller.scheduling.explain import why_given_up
from fluster_services.controller.state.job_index import JobIndex, JobKey

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.leading.record_writer import RecordWriter
    from fluster_services.controller.scheduling.dispatch import Dispatch
    from fluster_services.controller.state.worker_index import WorkerIndex

_PAUSE_AFTER_ERROR_S = 0.2


class WaitTimes:
    """The tasks that wait, or are held for a gang, and have a pause or a deadline. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[JobKey, dict[int, tuple[int, int, float]]] = {}  # {job: {task: (order, attempt, since)}}

    def __len__(self) -> int:
        return len(self._since)

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
        """A job is gone."""
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
    """For how long what the record describes had waited when the bus's clock showed `now`."""
    held_after = row.value.waiting_since if isinstance(row.value, TaskRecord) else None
    since = held_after or row.stored_at
    return max(0.0, (now - since).total_seconds()) if since is not None else 0.0


class Deadlines:
    """Gives tasks up that have waited for a worker for as long as their job allows."""

    def __init__(
        self,
        bus: Bus,
        job_index: JobIndex,
        worker_index: WorkerIndex,
        *,
        wait_times: WaitTimes,
        dispatch: Dispatch,
        writer: RecordWriter,
    ) -> None:
        self._bus = bus
        self._job_index = job_index
        self._worker_index = worker_index
        self._wait_times = wait_times
        self._dispatch = dispatch
        self._writer = writer
        self._timers: dict[tuple[JobKey, int], asyncio.TimerHandle] = {}  # {task that waits: when it is given up}

    def on_task(self, key: JobKey, task: TaskRecord, *, now: float) -> None:
        """A task's record has changed."""
        timer = self._timers.pop((key, task.task), None)
        if timer is not None:
            timer.cancel()
        left_s = self._wait_times.left_s(key, task, now=now)
        if left_s is not None and task.state is JobStatus.PENDING:
            self._give_up_later(left_s, key, task)

    def forget(self, namespace: Namespace) -> None:
        """The namespace is gone."""
        for position in [position for position in self._timers if position[0].namespace == namespace]:
            self._timers.pop(position).cancel()

    def _give_up_later(self, delay_s: float, key: JobKey, task: TaskRecord) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, self._give_up, key, task)
        self._timers[key, task.task] = timer

    def _give_up(self, key: JobKey, task: TaskRecord) -> None:
        self._timers.pop((key, task.task), None)
        row = self._job_index.present(key, task)
        if row is not None and self._dispatch.awaits_slot(key, task.task):
            self._give_up_later(task.scheduling_timeout_s or 0.0, key, task)  # it is not workers that it waits for
        elif row is not None:
            job = self._job_index.get(key)
            short = self._dispatch.why_short(job.job.value) if job is not None and job.job is not None else None
            reason = why_given_up(task, self._worker_index.views(), short)
            given_up = lifecycle.give_up(task, now=time.time(), reason=reason)
            if given_up is not None:
                self._bus.spawn(
                    self._end_waiting(key, task, given_up, row.revision), f"end of {key.job_id}.{task.task}"
                )

    async def _end_waiting(self, key: JobKey, task: TaskRecord, given_up: TaskRecord, revision: int) -> None:
        await self._writer.write_verdicts([(given_up, revision)])
        if self._job_index.present(key, task) is not None:  # it could not be written
            self._give_up_later(_PAUSE_AFTER_ERROR_S, key, task)
