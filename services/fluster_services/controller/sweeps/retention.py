"""Which records of finished jobs are kept no longer, and their removal. What happened stays in the event stream.

Secrets go with the end of a job. Those of a controller that died in between are found here, later.

A job's record goes last, so that a sweep that was cut short is taken up again. What a deletion leaves behind for
watchers, its mark, goes a while later.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from fluster_bus.core.errors import BusError, RevisionConflictError
from fluster_bus.messages import JobRecord, Namespace, TaskRecord
from fluster_bus.storage.stored_messages import ResultStore, SecretStore
from fluster_bus.storage.tables import Deleted, Row
from fluster_services.config import RecordLimits
from fluster_services.controller.state.job_index import JobKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from fluster_bus.connection.bus import Bus
    from fluster_services.config import RecordLimits
    from fluster_services.controller.leading.record_writer import RecordTables
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.state.job_index import JobIndex
    from fluster_services.controller.store_room import JobRooms

log = logging.getLogger(__name__)

_MAX_MARKS = 100_000
_REMOVED_AT_ONCE = 256
_MARK_KEPT_S = 600.0  # a watcher that was away longer reads the record again when it needs it, and finds none


class Finished(NamedTuple):
    """When a job has ended: by the wall clock of who wrote it, and by this controller's monotonic clock."""

    at: float
    since: float


def ended_since(now: float, *, wall_age_s: float, bus_age_s: float) -> float:
    """When a job ended by the monotonic clock that shows `now`: as late as either of two others' clocks has it.

    So a wall clock that is days ahead makes no record old, be it the controller's or the server's.
    """
    return now - max(0.0, min(wall_age_s, bus_age_s))


class RetentionPlan:
    """The finished jobs, the longest finished first. It decides which go; removing them is for others.

    `began` is when the controller started, by its monotonic clock, as all times are that are not said to be others.
    """

    def __init__(self, limits: RecordLimits, began: float) -> None:
        self._limits = limits
        self._began = began
        self._finished: dict[Namespace, dict[JobKey, Finished]] = {}
        self._due: dict[JobKey, Finished] = {}  # taken, and not removed yet
        self._oldest: dict[
            Namespace, list[tuple[float, JobKey]]
        ] = {}  # heaps; what was forgotten stays until it comes up

    def on_finished(self, key: JobKey, finished: Finished) -> None:
        """A job has ended. Told again of the same end, it knows since when already."""
        known = self._finished.setdefault(key.namespace, {})
        if key not in known or known[key].at != finished.at:
            self._put(key, finished)

    def _put(self, key: JobKey, finished: Finished) -> None:
        self._due.pop(key, None)
        self._finished[key.namespace][key] = finished
        heapq.heappush(self._oldest.setdefault(key.namespace, []), (finished.since, key))

    def put_back(self, key: JobKey) -> None:
        """A job that was due could not be removed: it is due again."""
        if key in self._due:
            self._put(key, self._due[key])

    def forget(self, key: JobKey) -> None:
        """A job is gone."""
        self._finished.get(key.namespace, {}).pop(key, None)
        self._due.pop(key, None)

    def take_due(self, now: float, *, wall: float, limit: int, crowded: Collection[Namespace] = ()) -> list[JobKey]:
        """At most `limit` jobs whose time is over, or that are too many, each once: the longest finished first.

        In namespaces that are `crowded`, whose room is running out, all are too many.

        What was there when this controller began goes for its age only after a while, and if the wall clock, which may
        have been put right meanwhile, still says so.
        """
        due: list[JobKey] = []
        is_sure = now - self._began >= self._limits.sure_after_s
        for namespace, heap in self._oldest.items():
            known = self._finished.get(namespace, {})
            while heap and len(due) < limit:
                since, key = heap[0]
                finished = known.get(key)
                if finished is None or finished.since != since:
                    heapq.heappop(heap)
                    continue
                seen_s = now - max(since, self._began)
                is_over = len(known) > self._limits.max_finished or namespace in crowded
                is_too_many = is_over and seen_s >= self._limits.kept_at_least_s
                is_old = is_sure and now - since >= self._limits.kept_s
                if not is_old and not is_too_many:
                    break
                heapq.heappop(heap)
                wall_age_s = max(0.0, wall - finished.at)
                if is_too_many or wall_age_s >= self._limits.kept_s:
                    self._due[key] = known.pop(key)
                    due.append(key)
                else:
                    self._put(key, finished._replace(since=now - wall_age_s))
        return due

    def namespaces(self) -> list[Namespace]:
        """Those with finished jobs."""
        return [namespace for namespace, known in self._finished.items() if known]

    def forget_namespace(self, namespace: Namespace) -> None:
        """All of its jobs are gone."""
        self._finished.pop(namespace, None)
        self._oldest.pop(namespace, None)
        for key in [key for key in self._due if key.namespace == namespace]:
            del self._due[key]

    def __len__(self) -> int:
        return sum(map(len, self._finished.values()))


class RecordSweep:
    """Removes what the plan names."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        job_index: JobIndex,
        tables: RecordTables,
        job_rooms: JobRooms,
        limits: RecordLimits,
        on_removed: Callable[[JobKey, list[JobRecord | TaskRecord]], None],
    ) -> None:
        """`on_removed` is called with a job, and the records of it, that are gone."""
        self._bus = bus
        self._seat = seat
        self._job_index = job_index
        self._tables = tables
        self._job_rooms = job_rooms
        self._limits = limits
        self._on_removed = on_removed
        self._plan = RetentionPlan(self._limits, time.monotonic())
        # Of deletions, the oldest first. One that stands by never removes them, so they are bounded.
        self._marks: deque[tuple[float, Namespace, Deleted]] = deque(maxlen=_MAX_MARKS)

    @property
    def planned(self) -> int:
        """How many jobs that are over wait for their removal."""
        return len(self._plan)

    def on_record(self, key: JobKey, record: JobRecord | TaskRecord, *, since: float) -> None:
        """A record was read or written; by the bus's clock it stands since that time of the monotonic one."""
        if isinstance(record, JobRecord) and record.is_over:
            now, finished_at = time.monotonic(), record.finished_at or record.submitted_at
            ended = ended_since(now, wall_age_s=time.time() - finished_at, bus_age_s=now - since)
            self._plan.on_finished(key, Finished(finished_at, ended))
        elif isinstance(record, JobRecord):
            self._plan.forget(key)  # its id has gone, or goes, to another job

    def on_deleted(self, namespace: Namespace, deleted: Deleted) -> None:
        """A record was removed, here or elsewhere."""
        self._marks.append((time.monotonic(), namespace, deleted))
        gone = self._job_index.remove(namespace, deleted)
        if gone is not None:
            self._forget(*gone)

    def forget_namespace(self, namespace: Namespace) -> None:
        """The namespace is gone, with all its records."""
        for key in self._job_index.keys_of(namespace):
            gone = self._job_index.discard(key)
            self._forget(key, gone or [])
        self._plan.forget_namespace(namespace)
        left = [mark for mark in self._marks if mark[1] != namespace]
        self._marks.clear()
        self._marks.extend(left)

    def _forget(self, key: JobKey, records: list[JobRecord | TaskRecord]) -> None:
        self._plan.forget(key)
        self._on_removed(key, records)

    async def run(self) -> None:
        """Sweep, until cancelled."""
        while True:
            await asyncio.sleep(self._limits.sweep_s)
            if not self._bus.connected:
                continue
            await self._seat.wait_sure()
            try:
                while due := await self._take_due():
                    needed = [key for key in due if not await self.removed(key)]
                    if len(needed) == len(due):
                        break
                await self._forget_marks()
            except BusError as error:
                log.info("old records are removed later: %s", error)

    async def _take_due(self) -> list[JobKey]:
        crowded = await self._job_rooms.crowded(self._plan.namespaces())
        return self._plan.take_due(time.monotonic(), wall=time.time(), limit=_REMOVED_AT_ONCE, crowded=crowded)

    async def removed(self, key: JobKey) -> bool:
        """Remove the records and results of a job that is over; False when that has to wait. Raises BusError."""
        job_index = self._job_index
        entry = job_index.get(key)
        if entry is None or entry.job is None or not entry.job.value.is_over:
            return True
        # Taken now: while anything is written, another job may get the id.
        job, tasks = entry.job, list(entry.tasks.values())
        if any(not child.state.finished() for child in job_index.child_records(key)):  # they are stopped by its record
            self._plan.put_back(key)
            return False
        table = self._tables[key.namespace]
        try:
            if any(row.value.result is not None and row.value.result.size for row in tasks):
                await ResultStore(self._bus, key.namespace).remove(key.job_id)
            rows: list[Row[TaskRecord] | Row[JobRecord]] = [*tasks, job]
            for row in rows:
                try:
                    await table.delete(row.key, revision=row.revision)
                except RevisionConflictError:
                    if (
                        await table.get(row.key) is not None
                    ):  # not as it was known here: it is read again, and judged anew
                        self._plan.put_back(key)
                        return False
        except BusError:
            self._plan.put_back(key)
            raise
        gone = job_index.discard(key) if entry.job is job else None
        if gone is not None:
            self._forget(key, gone)
        return True

    async def _forget_marks(self) -> None:
        now = time.monotonic()
        while self._marks and now - self._marks[0][0] > _MARK_KEPT_S:
            _, namespace, deleted = self._marks[0]
            await self._tables[namespace].forget_deleted(deleted)
            self._marks.popleft()


class SecretSweep:
    """Looks for secrets of no unfinished job. Those of a submission that is on its way are among them, so it looks twice."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        job_index: JobIndex,
        tables: RecordTables,
        limits: RecordLimits,
        has_parked: Callable[[], bool],
    ) -> None:
        """`has_parked()` tells whether submissions wait that have no records yet."""
        self._bus = bus
        self._seat = seat
        self._job_index = job_index
        self._tables = tables
        self._limits = limits
        self._has_parked = has_parked
        self._orphans: dict[tuple[Namespace, str], float] = {}  # {secrets: since when they belong to no job}

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._limits.secrets_sweep_s)
            for namespace in list(self._tables):
                try:
                    await self._look(namespace)
                except BusError as error:
                    log.info("left secrets are removed later: %s", error)

    async def _look(self, namespace: Namespace) -> None:
        store = SecretStore(self._bus, namespace)
        kept = await store.names()
        wanted = self._wanted(store, namespace) if kept else set()
        if self._has_parked():  # they have no records yet, and may wait for long
            wanted |= kept
        now, orphans = time.monotonic(), kept - wanted
        self._orphans = {key: since for key, since in self._orphans.items() if key[0] != namespace or key[1] in orphans}
        for name in orphans:
            if now - self._orphans.setdefault((namespace, name), now) >= self._limits.secrets_orphaned_s:
                await self._seat.wait_sure()
                await store.remove_named(name)

    def _wanted(self, store: SecretStore, namespace: Namespace) -> set[str]:
        records = (record for key, record in self._job_index.records() if key.namespace == namespace)
        jobs = [record for record in records if isinstance(record, JobRecord)]
        return {
            store.name_of(job.request.submission)
            for job in jobs
            if job.request.environment.secrets and job.request.submission is not None and not job.state.finished()
        }
