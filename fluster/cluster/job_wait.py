"""Waiting for jobs without asking again and again: their records are watched."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from fluster_bus import subjects
from fluster_bus.bus import Bus, Delivery
from fluster_bus.messages import JobId, JobInfo, JobRecord, Namespace


async def wait_finished(
    bus: Bus,
    namespace: Namespace,
    unfinished: set[JobId],
    statuses: Callable[[Sequence[JobId]], Awaitable[Sequence[JobInfo]]],
) -> None:
    """Return when all jobs in `unfinished` have ended, each taken out of the set as it ends.

    Their records tell, as the server republishes them, so nobody needs to answer; after each reconnect, when a
    change may have been missed, `statuses` is asked.
    """
    changed = asyncio.Event()
    unsure = True

    def on_record(delivery: Delivery) -> None:
        job_id = JobId(subjects.last_token(delivery.subject))
        if job_id in unfinished and delivery.data and JobRecord.from_json(delivery.data).state.finished():
            unfinished.discard(job_id)
            changed.set()

    def on_reconnect() -> None:
        nonlocal unsure
        unsure = True
        changed.set()

    key = next(iter(unfinished)) if len(unfinished) == 1 else subjects.ANY_TOKEN
    bus.on_reconnect(on_reconnect)
    subscription = await bus.subscribe(subjects.watch_jobs(namespace, key), on_record)
    try:
        await bus.flush()
        while unfinished:
            changed.clear()
            if unsure:
                unsure = False
                for info in await statuses(sorted(unfinished)):
                    if info.status.finished():
                        unfinished.discard(info.job_id)
            else:
                await changed.wait()
    finally:
        bus.off(on_reconnect)
        if bus.connected:
            await subscription.unsubscribe()
