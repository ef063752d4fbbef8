"""Seeing a job change, without asking again and again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from fluster.cluster.jobs.job_states import JobStates
from fluster.cluster.jobs.job_wait import get_finished, get_patiently, wait_finished
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import DisconnectedError
from fluster_bus.messages import JobId, JobInfo, Namespace

_SETTLED_AFTER_S = 0.3


async def watch_job(bus: Bus, namespace: Namespace, job_id: JobId, states: JobStates) -> AsyncGenerator[JobInfo]:
    """The job as it stands, and again whenever that has changed; the last is how it ended."""
    changed = asyncio.Event()
    watched = (
        subjects.watch_jobs(namespace, subjects.task_key_of_any(job_id)),
        subjects.watch_progress(namespace, job_id),
    )
    subscriptions = [await bus.subscribe(subject, lambda _delivery: changed.set()) for subject in watched]
    bus.on_reconnect(changed.set)
    ended = asyncio.create_task(wait_finished(bus, namespace, {job_id}, states))
    ended.add_done_callback(lambda _ended: changed.set())
    shown: JobInfo | None = None
    is_settled = False
    try:
        with contextlib.suppress(DisconnectedError):
            await bus.flush()
        while not ended.done():
            changed.clear()
            (info,) = await get_patiently(bus, states, [job_id])
            if info != shown and not info.status.finished():
                yield info
                shown = info
            # Whoever watches may hear of a change a moment before the controller: it is asked once more.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if is_settled else _SETTLED_AFTER_S):
                    await changed.wait()
            is_settled = not is_settled and not changed.is_set()
        await ended
        (info,) = await get_finished(bus, states, [job_id])
        yield info
    finally:
        ended.cancel()
        bus.off(changed.set)
        for subscription in subscriptions:
            await subscription.unsubscribe()
