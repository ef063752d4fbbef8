"""The flow of offers, without a bus or a clock: what is offered when, to whom, and what follows from each answer.

    waits -> taken -> offered to its class -> by name to those that have room -> accepted
                  ^                                                           -> declined: its line waits for room

Its caller sends what an offer asks, and gives it the answer: the controller with messages on the bus (see offers.py),
the simulator with a clock that jumps.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from fluster_bus.core import subjects
from fluster_bus.messages import Capacity, JobRecord, JobStatus, Namespace, Offer, OfferReply, TaskRecord, WorkerId
from fluster_bus.messages.namespaces import NamespaceRecord
from fluster_bus.running.backoff import Backoff
from fluster_bus.storage.tables import Row
from fluster_services import lifecycle
from fluster_services.capacity import class_of, fits, is_between_levels, needed
from fluster_services.controller.scheduling.order import (
    Position,
    Starving,
    TaskSlots,
    position_in_line,
    position_of,
    reserved_workers,
)
from fluster_services.controller.scheduling.scheduler import Scheduler
from fluster_services.controller.state.job_index import JobIndex, JobKey
from fluster_services.controller.state.worker_index import WorkerIndex

log = logging.getLogger(__name__)

_OUT_AT_ONCE = 32
_TRIES_BESIDE_SPARED = 3  # a class hands an offer to any member: it may be one that is kept free
_NAMED_BESIDE_SPARED = 32  # workers that are then asked by name
_KEPT_EVERY_S = 1.0  # it is looked at most so often for whom room in a quota is to be kept
_CHOOSING_COSTS = 20  # workers to keep free are chosen so seldom that it takes one part in so many of the time
_FIRST_PAUSE_AFTER_DECLINE_S, _LAST_PAUSE_AFTER_DECLINE_S = 0.01, 0.5


class DispatchDriver(Protocol):
    """What a Dispatch needs from the code that runs it: a clock, a timer, and two methods that it calls."""

    def now(self) -> float: ...
    def call_later(self, delay_s: float, action: Callable[[], None], /) -> None: ...

    def on_dispatchable(self) -> None:
        """`take` may have something."""

    def on_room(self) -> None:
        """Who does not wait here, such as a gang, may find room too."""


class Ask(NamedTuple):
    """What one offer wants to know: what the listener on the subject says to it."""

    subject: str
    offer: Offer


Asking = Generator[Ask, OfferReply | None, None]


def _at_once(job: JobRecord) -> int:
    return job.request.replicas if job.request.gang else 1


class Dispatch:
    """The tasks that wait, and the offers that are out."""

    def __init__(
        self,
        job_index: JobIndex,
        worker_index: WorkerIndex,
        driver: DispatchDriver,
        *,
        reserve_after_s: float,
        unfit_retry_s: float = 30.0,
    ) -> None:
        self.shares = job_index.shares
        self.shares.on_freed = self._on_quota_freed
        self.scheduler = Scheduler(self.shares)
        self._slots = TaskSlots()
        self._unfit: dict[JobKey, dict[WorkerId, str]] = {}  # {job: {worker that lacks what it names: why}}
        self._job_index = job_index
        self._worker_index = worker_index
        self._driver = driver
        self._reserve_after_s = reserve_after_s
        self._unfit_retry_s = unfit_retry_s
        self._out = 0
        self._rooms = 0  # how often there was word of more room
        self._declined = Backoff(_FIRST_PAUSE_AFTER_DECLINE_S, _LAST_PAUSE_AFTER_DECLINE_S)
        self._is_opening = False
        self._kept_free: tuple[WorkerId, ...] = ()  # for whom the scheduler has a reservation
        self._reserved_for: Starving | None = None  # the last
        self._chooses_at = 0.0
        self._keeps_at = -math.inf

    @property
    def is_idle(self) -> bool:
        """True while no offer is out, and none is about to be repeated."""
        return self._out == 0 and not self._is_opening

    def on_task(self, key: JobKey, task: TaskRecord, *, pause_s: float) -> None:
        """The record of a task has changed; if it waits, it is not to be offered before so much time has passed."""
        if task.state.finished() or (task.gang and task.state is JobStatus.PENDING):
            self.on_room(self._worker_index.left(task.worker_id) if task.worker_id is not None else None)
        if task.state is not JobStatus.PENDING or task.kill_requested is not None:
            self._remove(key, task.task)
            if not lifecycle.is_held(task):
                self._pass_slot(key, task.task)
        elif task.gang:
            return  # they are gathered, see gangs.py
        elif pause_s:
            self._driver.call_later(pause_s, partial(self._add, key, task))
        else:
            self._add(key, task)

    def _add(self, key: JobKey, task: TaskRecord) -> None:
        if self._job_index.present(key, task) is None:
            return  # it has changed during its pause
        if not self._has_slot(key, task.task):
            return
        position = Position(position_in_line(task.order, task.priority), task.task, key)
        self.scheduler.add(position, self._need(key, task), now=self._driver.now())
        self._driver.on_dispatchable()

    def _need(self, key: JobKey, task: TaskRecord) -> Capacity:
        need, unfit = needed(task.resources, task.namespace), self._unfit.get(key)
        return need if unfit is None else need.model_copy(update={"elsewhere": tuple(sorted(unfit))})

    def unfit(self, key: JobKey) -> Mapping[WorkerId, str]:
        """The workers that lack what the job names, and why they say so."""
        return self._unfit.get(key, {})

    def why_unfit(self, key: JobKey) -> str:
        """What is said of a job that no worker can run."""
        return f"no worker can run it: {'; '.join(sorted(set(self.unfit(key).values())))}"

    def forget(self, key: JobKey) -> None:
        """The job has ended."""
        self._unfit.pop(key, None)

    def _has_slot(self, key: JobKey, task: int) -> bool:
        """False for a task of an array as many of which wait for offers, or run, as may at once."""
        entry = self._job_index.get(key)
        array = entry.job.value.request.array if entry is not None and entry.job is not None else None
        if entry is None or array is None or array.at_once is None:
            return True
        held = (number for number, row in entry.tasks.items() if lifecycle.is_held(row.value))
        return self._slots.enter(key, task, array.at_once, held)

    def awaits_slot(self, key: JobKey, task: int) -> bool:
        """True for a task that is not offered, since others of its array are."""
        return self._slots.waits(key, task)

    def _pass_slot(self, key: JobKey, task: int) -> None:
        following = self._slots.leave(key, task)
        entry = self._job_index.get(key) if following is not None else None
        row = entry.tasks.get(following) if entry is not None and following is not None else None
        if row is not None:
            self._add(key, row.value)

    def _remove(self, key: JobKey, task: int) -> None:
        reserved = self.scheduler.reserved
        self.scheduler.remove(key, task)
        if reserved is not None and self.scheduler.reserved is None:
            self._driver.on_room()  # a worker was kept free for it, also from them
        self._driver.on_dispatchable()

    def add_gang(self, position: Position, need: Capacity, count: int) -> None:
        """A gang waits; it is gathered by others, and has its position in the order here."""
        self.scheduler.add_gang(position, need, count)

    def remove_gang(self, job: JobKey) -> None:
        """A gang no longer waits."""
        if self.scheduler.remove_gang(job):
            self._driver.on_room()  # workers may have been kept free for it
            self._driver.on_dispatchable()

    def on_gathered(self, job: JobKey) -> None:
        """All tasks of a gang are claimed."""
        self.scheduler.on_gathered(job, now=self._driver.now())
        self._driver.on_dispatchable()

    def on_gathering(self, job: JobKey) -> None:
        """All tasks of a gang are about to be offered."""
        self.scheduler.gangs.on_gathering(job)

    def on_no_offer(self, job: JobKey, task: int) -> None:
        """The offer of a gang's task was declined, or its record says that it is held."""
        self.scheduler.gangs.on_no_offer(job, task)

    def is_offered(self, job: JobKey) -> bool:
        """True while offers of the gang's tasks are out, or claimed and not yet recorded so."""
        return self.scheduler.gangs.is_offered(job)

    def has_quota(self, position: Position, need: Capacity, count: int) -> bool:
        """True when the quota of the gang's namespace has room for all of it."""
        return self.scheduler.order.has_quota(position, need, count)

    def rank(self, position: Position) -> tuple[int, float, Position]:
        """The rank of what waits at that position: the least goes first."""
        self._weigh()
        return self.scheduler.order.rank(position)

    def goes_before(self, one: Position, other: Position) -> bool:
        """True when it is before the other whatever their namespaces have."""
        return self.scheduler.order.goes_before(one, other)

    def why_short(self, job: JobRecord) -> str | None:
        """Why the quota of its namespace keeps what waits of the job waiting; None when it does not."""
        position, need, count = position_of(job), needed(job.request.resources, job.namespace), _at_once(job)
        why = self.shares.why_short(job.namespace, need, count)
        if (
            why is not None
            or self.scheduler.gangs.is_offered(position.job)
            or self.scheduler.order.has_quota(position, need, count)
        ):
            return why
        kept = self.scheduler.order.kept_quota(job.namespace)
        first = f"job {kept.job.job_id}" if kept is not None else "another job"
        return f"waits for the quota of namespace {job.namespace}: {first}, which others have overtaken for long, goes first"

    def who_goes_first(self, job: JobRecord) -> str | None:
        """Which other namespace's tasks go before its own, and why; None when none do."""
        position = position_of(job)
        self._weigh()
        before = min(self.scheduler.ranked_before(position), key=self.scheduler.order.rank, default=None)
        if before is None or self.scheduler.gangs.is_offered(position.job):
            return None
        other = before.job.namespace
        if self.scheduler.order.goes_before(before, position):
            return f"namespace {other} goes first: its tasks have a higher priority"
        return self.shares.compared(other, job.namespace)

    def on_namespace(self, record: NamespaceRecord) -> None:
        """A namespace has this quota and this weight from now on. What runs goes on, also beyond it."""
        self.scheduler.order.on_quota(record.name)
        self.shares.on_namespace(record)

    def on_namespace_gone(self, namespace: Namespace) -> None:
        """A namespace was dropped: it has no quota."""
        self.scheduler.order.on_quota(namespace)
        self.shares.on_namespace_gone(namespace)

    def _on_quota_freed(self) -> None:
        self._driver.on_room()  # for gangs
        self._driver.on_dispatchable()

    def on_room(self, free: Capacity | None = None) -> None:
        """Some worker has room again; `free` is all that it has left, where that is known."""
        self._rooms += 1
        self.scheduler.on_room(free)
        self._driver.on_room()
        self._driver.on_dispatchable()

    def _open_later(self) -> None:
        """Have what was declined offered again soon; later each time, as long as nothing is accepted."""
        if not self._is_opening:
            self._is_opening = True
            self._driver.call_later(self._declined.pause_s, self._open)
            self._declined.lengthen()

    def _open(self) -> None:
        self._is_opening = False
        self.on_room()

    # ---- reservation ------------------------------------------------------------------------------------

    @property
    def reservation(self) -> tuple[JobKey, tuple[WorkerId, ...]] | None:
        """The job that has been overtaken for too long, and the workers that are kept free for it."""
        position = self.scheduler.reserved
        return (position.job, self._kept_free) if position is not None else None

    def spared(self, position: Position) -> tuple[WorkerId, ...]:
        """The workers that whatever stands there may not have, since they are kept free for what is before it."""
        return self._kept_free if self.scheduler.is_behind_reserved(position) else ()

    def _reserve(self) -> None:
        """Keep workers free for the first in the order that has been overtaken for too long, if there is one."""
        worker_index, scheduler, now = self._worker_index, self.scheduler, self._driver.now()
        if scheduler.reserved is not None and self._reserved_for is not None:
            fits_still = all(worker_index.takes_work(each) for each in self._kept_free)
            if not fits_still or (self.shares.bounded and scheduler.is_short_of_quota(self._reserved_for)):
                scheduler.release()
                self._driver.on_room()
        if now < self._chooses_at:
            return
        if self.shares.bounded and now >= self._keeps_at:
            self._keeps_at = now + _KEPT_EVERY_S
            self._keep_quotas(now)
        is_alone = not self.shares.bounded and not scheduler.is_shared
        found = scheduler.starving if is_alone else scheduler.deserving
        for starving in found(now=now, reserve_after_s=self._reserve_after_s):
            position = starving.position
            if scheduler.reserved is not None and not scheduler.order.goes_before(position, scheduler.reserved):
                break
            workers = self._could_run_on(starving)
            if workers:
                self._kept_free = tuple(WorkerId(worker) for worker in workers)
                self._reserved_for = starving
                scheduler.reserve(starving)
                self._driver.on_room()
                log.info("kept free for %s, which others have overtaken: %s", position.job.job_id, ", ".join(workers))
                break
        self._chooses_at = now + _CHOOSING_COSTS * (self._driver.now() - now)

    def _keep_quotas(self, now: float) -> None:
        """Keep room in quotas for what others of its namespace have overtaken for too long, as they need less of it."""
        scheduler = self.scheduler
        for starving in scheduler.starving(now=now, reserve_after_s=self._reserve_after_s):
            position, need, count = starving.position, starving.need, starving.count
            namespace = position.job.namespace
            kept = scheduler.order.kept_quota(namespace)
            if (
                (kept is None or position < kept)
                and not scheduler.order.has_quota(position, need, count)
                and self.shares.could_fit(namespace, need, count)
                and self._could_run_on(starving)
            ):
                scheduler.order.keep_quota(starving)
                log.info("room in the quota of %s is kept for %s, which others have overtaken", *position.job)

    def _could_run_on(self, starving: Starving) -> tuple[str, ...]:
        rooms = [room for room in self._worker_index.rooms() if room.name not in starving.need.elsewhere]
        return reserved_workers(starving.need, starving.count, rooms)

    # ---- offers -----------------------------------------------------------------------------------------

    def _weigh(self) -> None:
        """What namespaces have is a part of what there is now."""
        if self.scheduler.is_shared:
            self.shares.on_total(self._worker_index.total())

    def take(self, most: int = _OUT_AT_ONCE) -> list[tuple[Position, Capacity]]:
        """What is to be offered now, so many at most: each is out until its `offer` has come to its end, or `on_unanswered`."""
        if self.scheduler.is_shared:
            self._weigh()
        self._reserve()
        taken = self.scheduler.take(min(most, _OUT_AT_ONCE - self._out))
        self._out += len(taken)
        return taken

    def offer(self, position: Position, need: Capacity) -> Asking:
        """Offer a task that was taken: gives what to ask next, and is sent the answer, None when no worker listens."""
        rooms = self._rooms
        entry = self._job_index.get(position.job)
        row = entry.tasks.get(position.task) if entry is not None else None
        if row is None:
            self.scheduler.remove(position.job, position.task)
        else:
            accepted, is_worth_repeating = yield from self._offer_to_workers(row, position, need)
            present = self._need(position.job, row.value)
            if not accepted and present != need:
                # It goes on in the line of those for which these workers are not asked either.
                self.scheduler.remove(position.job, position.task)
                self.scheduler.add(position, present, now=self._driver.now())
            elif accepted:
                # The worker's claim is in the record, which takes the task out of the line when it arrives.
                self.scheduler.on_accepted(need, position, now=self._driver.now())
                self._declined.reset()
            else:
                if is_worth_repeating:
                    self._open_later()  # the line waits as a whole, and so stays in order
                else:
                    self._worker_index.on_no_listener(need, spared={*self.spared(position), *need.elsewhere})
                # Room that came while the offer was out must not be forgotten because of the answer from before.
                self.scheduler.on_declined(position, need, room=rooms != self._rooms)
        self._come_back()

    def on_unanswered(self, position: Position, need: Capacity) -> None:
        """What was asked got no answer: it is perhaps claimed, perhaps not.

        Offering it again does no harm, since only one claim of a revision succeeds.
        """
        self.scheduler.on_declined(position, need, room=True)
        self._come_back()

    def _come_back(self) -> None:
        self._out -= 1
        self._driver.on_dispatchable()

    def _offer_to_workers(
        self, row: Row[TaskRecord], position: Position, need: Capacity
    ) -> Generator[Ask, OfferReply | None, tuple[bool, bool]]:
        """Whether a worker has claimed the task, and if none did, whether another may."""
        spared = self.spared(position)
        offer = Offer.of(row.value, row.revision, spared=spared)
        offered = class_of(need)
        if offered is not None:
            answer = yield Ask(offered.subject, offer)
            for _ in range(_TRIES_BESIDE_SPARED - 1):
                if answer is None or not answer.spared:
                    break
                answer = yield Ask(offered.subject, offer)
            if answer is not None and answer.unfit:
                self.note_unfit(position.job, answer)
                return False, False
            if answer is not None and not answer.spared:
                # A worker that has just become full may still be reached; the next offer goes to another, or to none.
                return answer.accepted, True
            if answer is None and not is_between_levels(need, offered):
                return False, False
        has_declined = False
        for worker_id in self._candidates(position, need, {*spared, *need.elsewhere}):
            answer = yield Ask(subjects.worker_verb(worker_id, "offer"), offer)
            if answer is not None and answer.accepted:
                return True, True
            if answer is not None and answer.unfit:
                self.note_unfit(position.job, answer)
                continue
            has_declined |= answer is not None and fits(need, self._worker_index.said_free(worker_id))
        # One that said it has room may have had another reason, which passes without its having more room.
        return False, has_declined

    def note_unfit(self, key: JobKey, answer: OfferReply) -> None:
        """A worker lacks what the job names: it is not asked again for a while."""
        self._unfit.setdefault(key, {})[answer.worker_id] = answer.reason
        self._driver.call_later(self._unfit_retry_s, partial(self._ask_again, key, answer.worker_id))

    def _ask_again(self, key: JobKey, worker_id: WorkerId) -> None:
        """The worker may have by now what it lacked: what waits of the job is offered to it too."""
        unfit, entry = self._unfit.get(key, {}), self._job_index.get(key)
        if unfit.pop(worker_id, None) is None or entry is None:
            return  # the job has ended
        if not unfit:
            del self._unfit[key]
        for row in list(entry.tasks.values()):
            # One that is out takes its new need when its offer has come to its end.
            if self.scheduler.is_idle(key, row.value.task):
                self.scheduler.remove(key, row.value.task)
                self._add(key, row.value)
        self.on_room()  # for a gang

    def _candidates(self, position: Position, need: Capacity, spared: Collection[WorkerId]) -> Iterator[WorkerId]:
        """The workers that have room by the records."""
        if position == self.scheduler.reserved:
            yield from self._kept_free  # they may have got room since
        found = (worker_id for worker_id, _ in self._worker_index.with_room(need) if worker_id not in spared)
        yield from itertools.islice(found, _NAMED_BESIDE_SPARED if spared else None)
