"""Has the workers of a job publish what its tasks have written: tenants may not ask workers themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError
from fluster_bus.messages import AttemptsFlushRequest, JobId, Namespace, TaskRecord, WorkerId

_TIMEOUT_S = 4.0  # above what a worker takes at most, and below the client's own
_AT_ONCE = 100  # workers

log = logging.getLogger(__name__)


async def flush_job(bus: Bus, namespace: Namespace, job_id: JobId, tasks: Sequence[TaskRecord]) -> None:
    """Return when what these tasks had written is in the log stream, or some seconds have passed."""
    workers = {task.worker_id for task in tasks if task.worker_id is not None and not task.state.finished()}
    request = AttemptsFlushRequest(namespace=namespace, job_id=job_id)
    room = asyncio.Semaphore(_AT_ONCE)

    async def flush(worker_id: WorkerId) -> None:
        async with room:
            try:
                await bus.request(subjects.worker_verb(worker_id, "flush"), request.to_json(), timeout_s=_TIMEOUT_S)
            except BusError as error:  # it is away, or of a version that does not know how: what is stored is told
                log.info("the output of %s is not flushed at worker %s: %s", job_id, worker_id, error)

    flushes = [asyncio.create_task(flush(worker_id)) for worker_id in sorted(workers)]
    if not flushes:
        return
    try:
        await asyncio.wait(flushes, timeout=_TIMEOUT_S)
    finally:
        for each in flushes:
            each.cancel()
