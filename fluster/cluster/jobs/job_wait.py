"""Waiting for jobs, and seeing them change, without asking again and again: their records are watched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from fluster.cluster.jobs.arguments import check_timeout
from fluster.cluster.jobs.job_states import UNANSWERED, JobStates
from fluster.cluster.outages import Outages
from fluster.errors import JobTimeoutError
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import DisconnectedError
from fluster_bus.messages import JobId, JobInfo, JobRecord, Namespace
from fluster_bus.running.coroutines import wait_set

_MOMENT_S = 0.005
_PAUSE_S = 0.5  # while no controller answers, or a job is not recorded yet
_SETTLED_AFTER_S = 0.3


class JobWaits:
    """Waits of one client for its jobs; `outages` ends them with ConnectionLostError when the connection is lost for
    too long.
    """

    def __init__(self, bus: Bus, namespace: Namespace, states: JobStates, outages: Outages) -> None:
        self._bus = bus
        self._namespace = namespace
        self._states = states
        self._outages = outages

    async def wait_all(self, job_ids: list[JobId], timeout: float | None) -> list[JobInfo]:
        """The jobs in order, once all have finished. Raises as `AsyncCluster.wait` does."""
        unfinished = set(job_ids)
        limit = asyncio.timeout(check_timeout(timeout))
        try:
            async with limit:
                return await self._wait(unfinished, 0, lambda: job_ids)
        except TimeoutError as error:
            if not limit.expired():
                raise
            shown = ", ".join(sorted(unfinished)[:5]) + (" …" if len(unfinished) > 5 else "")
            raise JobTimeoutError(f"after {timeout:g} s not finished: {shown}; they go on") from error

    async def wait_first(self, job_ids: list[JobId], timeout: float | None) -> JobInfo:
        """The first of the jobs that has finished. Raises as `AsyncCluster.wait_first` does."""
        if not job_ids:
            raise ValueError("jobs is empty: give the ids of one job or more")
        unfinished = set(job_ids)
        limit = asyncio.timeout(check_timeout(timeout))
        try:
            async with limit:
                left = len(unfinished) - 1
                (info,) = await self._wait(
                    unfinished, left, lambda: [next(each for each in job_ids if each not in unfinished)]
                )
                return info
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise JobTimeoutError(
                f"after {timeout:g} s none of {len(job_ids)} jobs has finished; they go on"
            ) from error

    async def _wait(self, unfinished: set[JobId], left: int, ended: Callable[[], list[JobId]]) -> list[JobInfo]:
        """How those ended that `ended` names once no more than `left` are unfinished."""
        await self._outages.bounded(wait_finished(self._bus, self._namespace, unfinished, self._states, left=left))
        return await self._outages.bounded(get_finished(self._bus, self._states, ended()))

    def watch(self, job_id: JobId) -> AsyncGenerator[JobInfo]:
        """The job as it stands, and again whenever that has changed; the last is how it ended."""
        return self._outages.bounded_each(watch_job(self._bus, self._namespace, job_id, self._states))


async def wait_finished(
    bus: Bus, namespace: Namespace, unfinished: set[JobId], states: JobStates, *, left: int = 0
) -> None:
    """Return when no more than `left` of the jobs in `unfinished` have not ended; each is taken out of the set as it
    ends.

    Their records tell, as the server republishes them, so no controller needs to answer; after each reconnect, when a
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
    subscription = await bus.hear(subjects.watch_jobs(namespace, key), on_record)
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
    """How the jobs stand, once a controller answers. Raises JobNotFoundError, JobRefusedError."""
    while True:
        try:
            return await states.get(job_ids)
        except UNANSWERED:
            await wait_to_retry(bus, _PAUSE_S)


async def watch_job(bus: Bus, namespace: Namespace, job_id: JobId, states: JobStates) -> AsyncGenerator[JobInfo]:
    """The job as it stands, and again whenever that has changed; the last is how it ended."""
    changed = asyncio.Event()
    watched = (
        subjects.watch_jobs(namespace, buckets.task_key_of_any(job_id)),
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
            # A watcher may hear of a change a moment before the controller: it is asked once more.
            await wait_set(changed, None if is_settled else _SETTLED_AFTER_S)
            is_settled = not is_settled and not changed.is_set()
        await ended
        (info,) = await get_finished(bus, states, [job_id])
        yield info
    finally:
        ended.cancel()
        bus.off(changed.set)
        for subscription in subscriptions:
            await subscription.unsubscribe()
