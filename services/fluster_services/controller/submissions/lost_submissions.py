"""Completes what was begun for submissions that are gone.

A job's record is written before those of its tasks, and a job that is to be replaced is marked before its successor takes its place; what was
submitted waits in its stream until all of that is done. In a store that was restored from a backup it may be missing, as streams are read
there one after the other: then the job goes on, and what was to be replaced is not.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from typing import TYPE_CHECKING

from fluster_bus.core.errors import BusError
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.submissions import is_waiting
from fluster_services import job_lifecycle
from fluster_services.controller.rules import conflicts
from fluster_services.controller.state.job_index import JobIndex, JobKey

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.leading.record_writer import RecordWriter

log = logging.getLogger(__name__)

_AT_ONCE = 1_000


async def settle_lost_submissions(bus: Bus, job_index: JobIndex, writer: RecordWriter) -> None:
    """Look once at each job, and complete what is missing of it."""
    for number, key in enumerate(job_index.keys()):
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
        if _is_incomplete(job_index, key):
            await retried(functools.partial(_settle, bus, job_index, writer, key), on=(BusError,), timeout_s=math.inf)


def _is_incomplete(job_index: JobIndex, key: JobKey) -> bool:
    entry = job_index.get(key)
    if entry is None or entry.job is None:
        return False
    job = entry.job.value
    lacks_tasks = len(entry.tasks) < job.request.replicas and not job_lifecycle.awaits_others(job)
    return job.replacement is not None or (lacks_tasks and not job.state.finished())


async def _settle(bus: Bus, job_index: JobIndex, writer: RecordWriter, key: JobKey, _left_s: float) -> None:
    entry = job_index.get(key)
    if entry is None or entry.job is None or not _is_incomplete(job_index, key):
        return
    row = entry.job
    job, awaited = row.value, row.value.replacement
    if await is_waiting(bus, job.order if awaited is None else awaited.order):
        return  # it is completed when that is taken in
    log.warning("job %s of namespace %s is completed without what was submitted", key.job_id, key.namespace)
    if awaited is not None:
        await writer.write(conflicts.unmark(job), row.revision)
        return
    for task in job_lifecycle.new_tasks(job):
        if task.task not in entry.tasks:
            await writer.record_task(task)
