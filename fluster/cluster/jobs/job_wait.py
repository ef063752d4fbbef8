"""Waiting for jobs without asking again and again: their records are watched."""

from __future__ import annotations

import asyncio

from fluster.cluster.jobs.job_states import UNANSWERED, JobStates
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.messages import JobId, JobInfo, JobRecord, Namespace

_MOMENT_S = 0.005
_PAUSE_S = 0.5  # while there is nobody to ask, or a job is not recorded yet


async def wait_finished(
    bus: Bus, namespace: Namespace, unfinished: set[JobId], states: JobStates, *, left: int = 0
) -> None:
    """Return when no more than `left` of the jobs in `unfinished` have not ended; each is taken out of the set as it ends.

    Their records tell, as the server republishes them, so nobody needs to answer; after each reconnect, when a
    change may have been missed, the controller is asked. While it is away it is waited for. Raises ClosedError.
    """
    changed = asyncio.Event()
    unsure = True

    def on_record(delivery: Delivery) -> None:
        job_id = JobId(subjects.last_token(delivery.subject))
        if job_id in unfinished and delivery.data and JobRecord.from_json(delivery.data).is_over:
            unfinished.discard(job_id)
            changed.set()

    def ask() -> None:
        nonlocal unsure
        unsure = True
        changed.set()

    key = next(iter(unfinished)) if len(unfinished) == 1 else subjects.ANY_TOKEN
    subscription = await bus.subscribe(subjects.watch_jobs(namespace, key), on_record)
    bus.on_reconnect(ask)
    bus.on_end(ask)  # which raises then
    try:
        # The server hears of the subscription before it hears the question, on the same connection: no change is missed
        # between the two.
        while len(unfinished) > left:
            changed.clear()
            if unsure:
                unsure = False
                infos = await get_patiently(bus, states, sorted(unfinished))
                unfinished.difference_update(info.job_id for info in infos if info.status.finished())
                if any(info.submitted_at is None for info in infos):
                    unsure = True  # it may yet be refused, which no record tells
                    await asyncio.sleep(_PAUSE_S)
            else:
                await changed.wait()
    finally:
        bus.off(ask)
        await subscription.unsubscribe()


async def get_finished(bus: Bus, states: JobStates, job_ids: list[JobId]) -> list[JobInfo]:
    """How jobs ended whose records said that they have.

    The controller waits for the acknowledgement of what it is writing, but one that was lost is made up for later.
    """
    while True:
        infos = await get_patiently(bus, states, job_ids)
        if all(info.status.finished() for info in infos):
            return infos
        await asyncio.sleep(_MOMENT_S)


async def get_patiently(bus: Bus, states: JobStates, job_ids: list[JobId]) -> list[JobInfo]:
    """How the jobs stand, once there is somebody to tell. Raises JobNotFoundError, JobRefusedError."""
    while True:
        try:
            return await states.get(job_ids)
        except UNANSWERED:
            await bus.wait_connected()
            await asyncio.sleep(_PAUSE_S)
