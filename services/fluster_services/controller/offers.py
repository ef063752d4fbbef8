"""Offers waiting tasks to workers, several at once."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from fluster_bus import subjects
from fluster_bus.errors import BusError, DisconnectedError, NoRespondersError, RequestTimeoutError
from fluster_bus.messages import Capacity, Offer, OfferReply, TaskRecord
from fluster_bus.tables import Row
from fluster_services.capacity import class_of, fits, is_between_levels
from fluster_services.controller.books import JobKey
from fluster_services.controller.scheduler import Place, Scheduler

if TYPE_CHECKING:
    from fluster_services.controller.controller import Controller

log = logging.getLogger(__name__)

_OUT_AT_ONCE = 32
_OFFER_TIMEOUT_S = 5.0
_PAUSE_AFTER_ERROR_S = 0.2


class Offers:
    """The scheduler's hands."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._scheduler = Scheduler()
        self._out = 0
        self._wake = asyncio.Event()

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def add(self, place: Place, need: Capacity) -> None:
        """A task waits."""
        self._scheduler.add(place, need)
        self._wake.set()

    def remove(self, job: JobKey, task: int) -> None:
        """A task does not wait any more."""
        self._scheduler.remove(job, task)

    def on_room(self) -> None:
        """Some worker has room again."""
        self._scheduler.on_room()
        self._wake.set()

    async def run(self) -> None:
        """Offer what waits, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wake.wait()
                self._wake.clear()
                for place, need in self._scheduler.take(_OUT_AT_ONCE - self._out):
                    self._out += 1
                    tasks.create_task(self._offer(place, need))

    async def _offer(self, place: Place, need: Capacity) -> None:
        try:
            entry = self._controller.books.get(place.job)
            row = entry.tasks.get(place.task) if entry is not None else None
            if row is None:
                self._scheduler.remove(place.job, place.task)
            elif not await self._place(row, need):
                self._scheduler.on_declined(place, need, room=False)
            # Placed: the worker's claim is in the record, which takes the task out of the line when it arrives.
        except (RequestTimeoutError, BusError) as error:
            # Perhaps claimed, perhaps not: offering again does no harm, since only one claim of a revision succeeds.
            log.warning("the offer of %s.%d is made again: %s", place.job.job_id, place.task, error)
            await self._controller.bus.wait_connected()
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
            self._scheduler.on_declined(place, need, room=True)
        finally:
            self._out -= 1
            self._wake.set()

    async def _place(self, row: Row[TaskRecord], need: Capacity) -> bool:
        """True when a worker has claimed the task."""
        task = row.value
        offer = Offer(
            namespace=task.namespace,
            job_id=task.job_id,
            task=task.task,
            attempt=task.attempt,
            revision=row.revision,
        )
        offered = class_of(need)
        if offered is not None and await self._accepted(offered.subject, offer):
            return True
        if offered is not None and not is_between_levels(need, offered):
            return False
        judge = self._controller.judge
        candidates = [worker_id for worker_id in judge.alive() if fits(need, judge.free(worker_id))]
        for worker_id in candidates:
            if await self._accepted(subjects.worker_verb(worker_id, "offer"), offer):
                return True
        return False

    async def _accepted(self, subject: str, offer: Offer) -> bool:
        try:
            answer = await self._controller.bus.request(subject, offer.to_json(), timeout_s=_OFFER_TIMEOUT_S)
        except NoRespondersError:
            return False
        return OfferReply.from_json(answer.data).accepted


__all__ = ["DisconnectedError", "Offers"]
