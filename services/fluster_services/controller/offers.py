"""Offers waiting tasks to workers, several at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from fluster_bus import subjects
from fluster_bus.errors import BusError, NoRespondersError
from fluster_bus.messages import Capacity, Offer, OfferReply, TaskRecord, WorkerId
from fluster_bus.tables import Row
from fluster_services.capacity import class_of, fits, is_between_levels
from fluster_services.controller.books import JobKey
from fluster_services.controller.reservation import choose
from fluster_services.controller.scheduler import Place, Scheduler

if TYPE_CHECKING:
    from fluster_services.controller.controller import Controller

log = logging.getLogger(__name__)

_OUT_AT_ONCE = 32
_OFFER_TIMEOUT_S = 2.0  # an answer takes milliseconds: after this the worker has probably died with the offer
_PAUSE_AFTER_ERROR_S = 0.2
_TRIES_BESIDE_SPARED = 3  # a class hands an offer to any member: it may be one that is kept free
_NAMED_BESIDE_SPARED = 32  # workers that are then asked by name
_CHOOSING_COSTS = 20  # workers to keep free are chosen so seldom that it takes one part in so many of the time
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
        self._kept_free: tuple[WorkerId, ...] = ()  # for whom the scheduler has a reservation
        self._chooses_at = 0.0

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    def add(self, place: Place, need: Capacity) -> None:
        """A task waits."""
        self._scheduler.add(place, need, now=time.monotonic())
        self._wake.set()

    def remove(self, job: JobKey, task: int) -> None:
        """A task does not wait any more."""
        reserved = self._scheduler.reserved
        self._scheduler.remove(job, task)
        if reserved is not None and self._scheduler.reserved is None:
            self._controller.gangs.on_room()  # a worker was kept free for it, also from them
        self._wake.set()

    def add_gang(self, place: Place, need: Capacity, count: int) -> None:
        """A gang waits; it is gathered by others, and has its place in the order here."""
        self._scheduler.add_gang(place, need, count)

    def remove_gang(self, job: JobKey) -> None:
        """A gang does not wait any more."""
        if self._scheduler.remove_gang(job):
            self._controller.gangs.on_room()  # workers may have been kept free for it
            self._wake.set()

    def on_gathered(self, job: JobKey) -> None:
        """All tasks of a gang are claimed."""
        self._scheduler.on_gathered(job, now=time.monotonic())
        self._wake.set()

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
                self._reserve()
                for place, need in self._scheduler.take(_OUT_AT_ONCE - self._out):
                    self._out += 1
                    tasks.create_task(self._offer(place, need))

    @property
    def reservation(self) -> tuple[JobKey, tuple[WorkerId, ...]] | None:
        """The job that has been overtaken for too long, and the workers that are kept free for it."""
        place = self._scheduler.reserved
        return (place.job, self._kept_free) if place is not None else None

    def spared(self, place: Place) -> tuple[WorkerId, ...]:
        """The workers that whatever stands there may not have, since they are kept free for what is before it."""
        return self._kept_free if self._scheduler.is_behind_reserved(place) else ()

    def _reserve(self) -> None:
        """Keep workers free for the first in the order that has been overtaken for too long, if there is one."""
        judge, scheduler, now = self._controller.judge, self._scheduler, time.monotonic()
        if scheduler.reserved is not None and not all(judge.takes_work(each) for each in self._kept_free):
            scheduler.release()
            self._controller.gangs.on_room()
        if now < self._chooses_at:
            return
        reserve_after_s = self._controller.config.timing.reserve_after_s
        for starving in scheduler.starving(now=now, reserve_after_s=reserve_after_s):
            place = starving.place
            if scheduler.reserved is not None and place >= scheduler.reserved:
                break
            workers = choose(starving.need, starving.count, judge.views())
            if workers:
                self._kept_free = tuple(WorkerId(worker) for worker in workers)
                scheduler.reserve(starving)
                self._controller.gangs.on_room()
                log.info("kept free for %s, which others have overtaken: %s", place.job.job_id, ", ".join(workers))
                break
        self._chooses_at = now + _CHOOSING_COSTS * (time.monotonic() - now)

    async def _offer(self, place: Place, need: Capacity) -> None:
        rooms = self._rooms
        try:
            entry = self._controller.books.get(place.job)
            row = entry.tasks.get(place.task) if entry is not None else None
            if row is None:
                self._scheduler.remove(place.job, place.task)
                return
            await self._controller.seat.wait_sure()
            accepted, is_worth_repeating = await self._place(row, place, need)
            if accepted:
                self._scheduler.on_accepted(need, place, now=time.monotonic())
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

    async def _place(self, row: Row[TaskRecord], place: Place, need: Capacity) -> tuple[bool, bool]:
        """Whether a worker has claimed the task, and if none did, whether another may."""
        task = row.value
        spared = self.spared(place)
        offer = Offer(
            namespace=task.namespace,
            job_id=task.job_id,
            task=task.task,
            attempt=task.attempt,
            revision=row.revision,
            spared=spared,
        )
        offered = class_of(need)
        if offered is not None:
            answer = await self._answer(offered.subject, offer)
            for _ in range(_TRIES_BESIDE_SPARED - 1):
                if answer is None or not answer.spared:
                    break
                answer = await self._answer(offered.subject, offer)
            if answer is not None and not answer.spared:
                # A worker that has just become full may still be reached; the next offer goes to another, or to nobody.
                return answer.accepted, True
            if answer is None and not is_between_levels(need, offered):
                return False, False
        has_declined = False
        for worker_id in self._candidates(place, need, spared):
            answer = await self._answer(subjects.worker_verb(worker_id, "offer"), offer)
            if answer is not None and answer.accepted:
                return True, True
            has_declined |= answer is not None and fits(need, self._controller.judge.free(worker_id))
        # One that said it has room may have had another reason, which passes without that it ever has more room to tell of.
        return False, has_declined

    def _candidates(self, place: Place, need: Capacity, spared: Collection[WorkerId]) -> list[WorkerId]:
        """The workers that have room by what they said last."""
        judge, spared = self._controller.judge, frozenset(spared)
        found = [each for each in judge.alive() if each not in spared and fits(need, judge.free(each))]
        if spared:
            return found[:_NAMED_BESIDE_SPARED]
        if place == self._scheduler.reserved:
            return [*self._kept_free, *found]  # it may have got room since
        return found

    async def _answer(self, subject: str, offer: Offer) -> OfferReply | None:
        """What a worker says to the offer; None when nobody listens."""
        try:
            answer = await self._controller.bus.request(subject, offer.to_json(), timeout_s=_OFFER_TIMEOUT_S)
        except NoRespondersError:
            return None
        return OfferReply.from_json(answer.data)
