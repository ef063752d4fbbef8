"""Writes what follows from the records of each job that has changed."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from fluster_bus.core.errors import BusError, FaultLog
from fluster_services import job_lifecycle
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.reconcile import missing_tasks, next_records
from fluster_services.gangs import MAX_AT_ONCE

if TYPE_CHECKING:
    from fluster_bus.messages import TaskRecord
    from fluster_services.controller.leading.record_writer import RecordWriter
    from fluster_services.controller.scheduling.gangs import Gangs
    from fluster_services.controller.state.dirty_jobs import DirtyJobs
    from fluster_services.controller.state.job_index import JobIndex

log = logging.getLogger(__name__)


class Reconciler:
    """Takes one job after the other that has changed; `run` may run many times at once."""

    def __init__(self, job_index: JobIndex, dirty: DirtyJobs, gangs: Gangs, writer: RecordWriter) -> None:
        self._job_index = job_index
        self._dirty = dirty
        self._gangs = gangs
        self._writer = writer
        self._faults = FaultLog(log)

    async def run(self) -> None:
        """Look at what has changed, until cancelled."""
        while True:
            key = await self._dirty.take()
            try:
                with self._faults.contained("job %s of namespace %s is left as it is", key.job_id, key.namespace):
                    await self._reconcile(key)
            finally:
                self._dirty.done(key)

    async def _reconcile(self, key: JobKey) -> None:
        entry = self._job_index.get(key)
        if entry is None or entry.job is None:
            return
        parent_id = entry.job.value.request.parent
        parent = self._job_index.get(JobKey(key.namespace, parent_id)) if parent_id is not None else None
        parent_record = parent.job.value if parent is not None and parent.job is not None else None
        after = self._job_index.dependencies(key) if job_lifecycle.awaits_others(entry.job.value) else None
        is_gathering = self._gangs.is_gathering(key)
        wanted = next_records(
            entry,
            now=time.time(),
            parent=parent_record,
            launcher=self._job_index.launcher(key.namespace, entry.job.value.request),
            after=after,
            is_gathering=is_gathering,
            with_children=self._job_index.with_children(key),
        )
        # Taken now: while one is written, the index may move on to records that the others were not decided from.
        for record, revision in [(record, entry.revision_of(record)) for record in wanted]:
            await self._writer.write(record, revision)
        for number, task in enumerate(missing_tasks(entry)):
            if number == MAX_AT_ONCE:
                self._dirty.mark(key)  # then it is the others' turn
            if number == MAX_AT_ONCE or not await self._record_missing(task):
                return

    async def _record_missing(self, task: TaskRecord) -> bool:
        """Write the first record of a task that was not recorded together with its job; False when that is tried again later."""
        try:
            await self._writer.record_task(task)
        except BusError as error:
            await self._writer.try_later([task], error)
            return False
        return True
