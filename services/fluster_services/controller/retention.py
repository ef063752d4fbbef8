"""Which records of finished jobs are kept no longer, and their removal. What happened stays in the event stream.

A job's record goes last, so that a sweep that was cut short is taken up again. What a deletion leaves behind for
watchers, its mark, goes a while later.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from fluster_bus.errors import BusError, RevisionConflictError
from fluster_bus.messages import JobRecord, Namespace, TaskRecord
from fluster_bus.results import ResultStore
from fluster_bus.tables import Deleted, Row
from fluster_services.config import RecordLimits
from fluster_services.controller.books import JobKey

if TYPE_CHECKING:
    from fluster_services.controller.controller import Controller

log = logging.getLogger(__name__)

_MAX_MARKS = 100_000
_REMOVED_AT_ONCE = 256
_MARK_KEPT_S = 600.0  # a watcher that was away longer reads the record again when it needs it, and finds none


class RetentionPlan:
    """The finished jobs, the longest finished first. It decides which go; removing them is for others."""

    def __init__(self, limits: RecordLimits) -> None:
        self._limits = limits
        self._finished: dict[Namespace, dict[JobKey, float]] = {}  # {namespace: {job: when it ended}}
        self._oldest: dict[
            Namespace, list[tuple[float, JobKey]]
        ] = {}  # heaps; what was forgotten stays until it comes up

    def on_finished(self, key: JobKey, finished_at: float) -> None:
        """A job has ended."""
        known = self._finished.setdefault(key.namespace, {})
        if known.get(key) != finished_at:
            known[key] = finished_at
            heapq.heappush(self._oldest.setdefault(key.namespace, []), (finished_at, key))

    def forget(self, key: JobKey) -> None:
        """A job is not there any more."""
        self._finished.get(key.namespace, {}).pop(key, None)

    def take_due(self, now: float, *, limit: int) -> list[JobKey]:
        """At most `limit` jobs whose time is over, or that are too many, each once: the longest finished first."""
        due: list[JobKey] = []
        for namespace, heap in self._oldest.items():
            known = self._finished[namespace]
            while heap and len(due) < limit:
                finished_at, key = heap[0]
                if known.get(key) == finished_at:
                    age_s = now - finished_at
                    is_too_many = len(known) > self._limits.max_finished and age_s >= self._limits.kept_at_least_s
                    if age_s < self._limits.kept_s and not is_too_many:
                        break
                    del known[key]
                    due.append(key)
                heapq.heappop(heap)
        return due

    def __len__(self) -> int:
        return sum(map(len, self._finished.values()))


class RecordSweep:
    """Removes what the plan names."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._limits = controller.config.records
        self._plan = RetentionPlan(self._limits)
        # Of deletions, the oldest first. One that stands by never removes them, so they are bounded.
        self._marks: deque[tuple[float, Namespace, Deleted]] = deque(maxlen=_MAX_MARKS)

    def on_record(self, key: JobKey, record: JobRecord | TaskRecord) -> None:
        """A record was read or written."""
        if isinstance(record, JobRecord) and record.is_over:
            self._plan.on_finished(key, record.finished_at or record.submitted_at)
        elif isinstance(record, JobRecord):
            self._plan.forget(key)  # its id has gone, or goes, to another job

    def on_deleted(self, namespace: Namespace, deleted: Deleted) -> None:
        """A record was removed, by whomever."""
        self._marks.append((time.monotonic(), namespace, deleted))
        gone = self._controller.books.remove(namespace, deleted)
        if gone is not None:
            self._forget(*gone)

    def _forget(self, key: JobKey, records: list[JobRecord | TaskRecord]) -> None:
        self._plan.forget(key)
        self._controller.events.forget(records)
        self._controller.waits.forget(key)
        self._controller.gangs.on_job_changed(key)

    async def run(self) -> None:
        """Sweep, until cancelled."""
        while True:
            await asyncio.sleep(self._limits.sweep_s)
            if not self._controller.bus.connected:
                continue
            await self._controller.seat.wait_sure()
            try:
                # By the wall clock, as the records have it: an hour more or less does no harm here.
                while due := self._plan.take_due(time.time(), limit=_REMOVED_AT_ONCE):
                    needed = [key for key in due if not await self.removed(key)]
                    if len(needed) == len(due):
                        break
                await self._forget_marks()
            except BusError as error:
                log.info("old records are removed later: %s", error)

    async def removed(self, key: JobKey) -> bool:
        """Remove the records and results of a job that is over; False when that has to wait. Raises BusError."""
        books = self._controller.books
        entry = books.get(key)
        if entry is None or entry.job is None or not entry.job.value.is_over:
            return True
        # Taken now: while anything is written, another job may get the id.
        job, tasks = entry.job, list(entry.tasks.values())
        finished_at = job.value.finished_at or job.value.submitted_at
        if any(not child.state.finished() for child in books.child_records(key)):  # they are stopped by its record
            self._plan.on_finished(key, finished_at)
            return False
        table = self._controller.records[key.namespace]
        try:
            if any(row.value.result is not None and row.value.result.size for row in tasks):
                await ResultStore(self._controller.bus, key.namespace).remove(key.job_id)
            rows: list[Row[TaskRecord] | Row[JobRecord]] = [*tasks, job]
            for row in rows:
                try:
                    await table.delete(row.key, revision=row.revision)
                except RevisionConflictError:
                    if (
                        await table.get(row.key) is not None
                    ):  # not as it was known here: it is read again, and judged anew
                        self._plan.on_finished(key, finished_at)
                        return False
        except BusError:
            self._plan.on_finished(key, finished_at)
            raise
        gone = books.discard(key) if entry.job is job else None
        if gone is not None:
            self._forget(key, gone)
        return True

    async def _forget_marks(self) -> None:
        now = time.monotonic()
        while self._marks and now - self._marks[0][0] > _MARK_KEPT_S:
            _, namespace, deleted = self._marks[0]
            await self._controller.records[namespace].forget_deleted(deleted)
            self._marks.popleft()
