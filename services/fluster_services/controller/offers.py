"""Offers waiting tasks to workers, several at once."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from fluster_bus import subjects
from fluster_bus.errors import BusError, NoRespondersError
from fluster_bus.messages import Capacity, Offer, OfferReply, TaskRecord
from fluster_bus.tables import Row
from fluster_services.capacity import class_of, fits, is_between_levels
from fluster_services.controller.books import JobKey
from fluster_services.controller.scheduler import Place, Scheduler

if TYPE_CHECKING:
    from fluster_services.controller.controller import Controller

log = logging.getLogger(__name__)

_OUT_AT_ONCE = 32
_OFFER_TIMEOUT_S = 2.0  # an answer takes milliseconds: after this the worker has probably died with the offer
_PAUSE_AFTER_ERROR_S = 0.2
_FIRST_PAUSE_AFTER_DECLINE_S, _LAST_PAUSE_AFTER_DECLINE_S = 0.01, 0.5


class Offers:
    """The scheduler's hands."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._scheduler = Scheduler()
        self._out = 0
        self._rooms = 0  # how often there was word of more room
        self._wake = asyncio.Event()
        self._decline_pause_s = _FIRST_PAUSE_AFTER_DECLINE_S
        self._opening: asyncio.TimerHandle | None = None

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
        self._rooms += 1
        self._scheduler.on_room()
        self._controller.gangs.on_room()
        self._wake.set()

    def _open_later(self) -> None:
        """Have what was declined offered again soon; later each time, as long as nobody accepts anything."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().call_later(self._decline_pause_s, self._open)
            self._decline_pause_s = min(2 * self._decline_pause_s, _LAST_PAUSE_AFTER_DECLINE_S)

    def _open(self) -> None:
        self._opening = None
        self.on_room()

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
        rooms = self._rooms
        try:
            entry = self._controller.books.get(place.job)
            row = entry.tasks.get(place.task) if entry is not None else None
            if row is None:
                self._scheduler.remove(place.job, place.task)
                return
            await self._controller.seat.wait_sure()
            accepted, is_worth_repeating = await self._place(row, need)
            if accepted:
                self._scheduler.on_accepted(need)
                self._decline_pause_s = _FIRST_PAUSE_AFTER_DECLINE_S
                return  # the worker's claim is in the record, which takes the task out of the line when it arrives
            if is_worth_repeating:
                self._open_later()  # the line waits as a whole, and so stays in order
            # Room that came while the offer was out must not be forgotten because of the answer from before.
            self._scheduler.on_declined(place, need, room=rooms != self._rooms)
        except BusError as error:
            # Perhaps claimed, perhaps not: offering again does no harm, since only one claim of a revision succeeds.
            log.warning("the offer of %s.%d is made again: %s", place.job.job_id, place.task, error)
            await self._controller.bus.wait_connected()
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
            self._scheduler.on_declined(place, need, room=True)
        finally:
            self._out -= 1
            self._wake.set()

    async def _place(self, row: Row[TaskRecord], need: Capacity) -> tuple[bool, bool]:
        """Whether a worker has claimed the task, and if none did, whether another may."""
        task = row.value
        offer = Offer(
            namespace=task.namespace,
            job_id=task.job_id,
            task=task.task,
            attempt=task.attempt,
            revision=row.revision,
        )
        offered = class_of(need)
        if offered is not None:
            accepted = await self._answer(offered.subject, offer)
            if accepted is not None:
                # A worker that has just become full may still be reached; the next offer goes to another, or to nobody.
                return accepted, True
            if not is_between_levels(need, offered):
                return False, False
        judge = self._controller.judge
        candidates = [worker_id for worker_id in judge.alive() if fits(need, judge.free(worker_id))]
        for worker_id in candidates:
            if await self._answer(subjects.worker_verb(worker_id, "offer"), offer):
                return True, True
        return False, False

    async def _answer(self, subject: str, offer: Offer) -> bool | None:
        """Whether the offer was accepted; None when nobody listens."""
        try:
            answer = await self._controller.bus.request(subject, offer.to_json(), timeout_s=_OFFER_TIMEOUT_S)
        except NoRespondersError:
            return None
        return OfferReply.from_json(answer.data).accepted
