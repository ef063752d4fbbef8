"""Gathers gangs, one at a time: offers each task to a worker by name, until all are held or one is not to be had."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, NoRespondersError
from fluster_bus.messages import Capacity, Offer, OfferReply, TaskRecord, WorkerId
from fluster_bus.running.coroutines import TimeSlices
from fluster_bus.storage.tables import Row
from fluster_services import capacity, gangs, lifecycle
from fluster_services.controller.scheduling.order import Position, position_in_line
from fluster_services.controller.state.job_index import JobEntry, JobKey

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.config import Timing
    from fluster_services.controller.leading.record_writer import RecordWriter
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.scheduling.dispatch import Dispatch
    from fluster_services.controller.scheduling.wait_times import WaitTimes
    from fluster_services.controller.state.dirty_jobs import DirtyJobs
    from fluster_services.controller.state.job_index import JobIndex
    from fluster_services.controller.state.worker_index import WorkerIndex

log = logging.getLogger(__name__)

_OUT_AT_ONCE = 256
_OFFER_TIMEOUT_S = 2.0
_RECORDED_TIMEOUT_S = 5.0  # accepted claims are in the bucket already, and on their way here
# A worker that declined believes other than the index: that is right soon. Where it is not, it is left out for longer
# each time, since all others hold their tasks in vain meanwhile.
_LEFT_OUT_S, _LONGEST_LEFT_OUT_S = 1.0, 16.0
_PLANNED_EVERY_S = 0.05  # at most so often, however much room is reported
_PLANNING_COSTS = 10  # and so seldom that it takes one part in so many of the time


@dataclass(frozen=True)
class WaitingGang:
    """A gang that waits, as far as planning room for it needs to know it."""

    order: int  # its position, as `position_in_line` gives it
    key: JobKey
    need: Capacity  # of each task
    count: int

    @property
    def position(self) -> Position:
        """Where it stands among all that waits."""
        return Position(self.order, 0, self.key)


class Gangs:
    """The gangs that wait. What follows from their holds is decided from the records alone, see fluster_services.gangs."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        job_index: JobIndex,
        worker_index: WorkerIndex,
        wait_times: WaitTimes,
        dispatch: Dispatch,
        writer: RecordWriter,
        dirty: DirtyJobs,
        timing: Timing,
    ) -> None:
        self._bus = bus
        self._seat = seat
        self._job_index = job_index
        self._worker_index = worker_index
        self._wait_times = wait_times
        self._dispatch = dispatch
        self._writer = writer
        self._dirty = dirty
        self._timing = timing
        self._waiting: dict[JobKey, WaitingGang] = {}
        self._pausing: dict[JobKey, asyncio.TimerHandle] = {}  # {gang with a task whose backoff is not over: its end}
        self._gathering: tuple[JobKey, int] | None = None  # (gang, epoch)
        self._out_since: dict[
            JobKey, int
        ] = {}  # {gang with tasks that are offered, or claimed by no record yet: the epoch}
        self._recorded = asyncio.Event()  # all tasks of what is gathered are known to be held, or to be lost for it
        self._left_out: dict[WorkerId, asyncio.TimerHandle] = {}  # {worker: when it is offered something again}
        self._left_out_s: dict[
            WorkerId, float
        ] = {}  # {worker: for how long the last time, as it has declined ever since}
        self._misfit_since: dict[JobKey, float] = {}
        self._wake = asyncio.Event()

    def waiting(self) -> list[WaitingGang]:
        """The gangs that wait, also the one that is gathered at the moment, in the order in which they are gathered."""
        return sorted(self._waiting.values(), key=lambda gang: (gang.order, gang.key))

    def is_gathering(self, key: JobKey) -> bool:
        """True while offers of the gang are out."""
        return self._gathering is not None and self._gathering[0] == key

    # ---- events -----------------------------------------------------------------------------------------

    def on_job_changed(self, key: JobKey) -> None:
        """Records of a job have changed."""
        entry = self._job_index.get(key)
        if entry is None or entry.job is None or not entry.job.value.request.gang:
            self._waiting.pop(key, None)
            self._dispatch.remove_gang(key)
            return
        job, tasks = entry.job.value, entry.task_records()
        if self._gathering is not None and self._gathering[0] == key:
            self._note_recorded(tasks, self._gathering[1])
        self._note_held(key, tasks)
        is_over = job.state.finished() or job.kill_requested is not None
        if gangs.is_waiting(job, tasks):
            need = capacity.needed(job.request.resources, job.namespace)
            gang = self._waiting[key] = WaitingGang(
                position_in_line(job.order, job.request.priority), key, need, job.request.replicas
            )
            self._pause(key, tasks)
            if key not in self._pausing:
                self._dispatch.add_gang(gang.position, need, gang.count)
                self._wake.set()
        elif is_over or not self.is_gathering(key):
            self._waiting.pop(key, None)
        if is_over or gangs.has_started(job, tasks):
            self._dispatch.remove_gang(key)  # one that is only held keeps its position

    def on_room(self) -> None:
        """Some worker has room again."""
        if self._waiting:
            self._wake.set()

    def _pause(self, key: JobKey, tasks: list[TaskRecord]) -> None:
        timer = self._pausing.pop(key, None)
        if timer is not None:
            timer.cancel()
        wait_times, now = self._wait_times, time.monotonic()
        pause_s = max(wait_times.pause_s(key, task, now=now) for task in tasks)
        if pause_s:
            self._pausing[key] = asyncio.get_running_loop().call_later(pause_s, self._resume, key)

    def _resume(self, key: JobKey) -> None:
        del self._pausing[key]
        self.on_job_changed(key)

    def _note_held(self, key: JobKey, tasks: list[TaskRecord]) -> None:
        """What is known to be held, or to have been, is not counted as offered too."""
        epoch = self._out_since.get(key)
        if epoch is None:
            return
        for task in tasks:
            if task.epoch >= epoch or task.state.finished():
                self._dispatch.on_no_offer(key, task.task)
        if not self._dispatch.is_offered(key):
            del self._out_since[key]

    def _note_recorded(self, tasks: list[TaskRecord], epoch: int) -> None:
        if all(task.epoch >= epoch or task.state.finished() for task in tasks):
            self._recorded.set()

    # ---- gathering --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Gather what waits, until cancelled."""
        planned_at, cost_s = -math.inf, 0.0
        while True:
            await self._wake.wait()
            pause_s = max(_PLANNED_EVERY_S, _PLANNING_COSTS * cost_s)
            await asyncio.sleep(max(0.0, planned_at + pause_s - time.monotonic()))
            self._wake.clear()
            planned_at = time.monotonic()
            found = await self._find()
            cost_s = time.monotonic() - planned_at
            if found is not None:
                await self._gather(*found)
                self._wake.set()  # the others may still fit

    async def _find(self) -> tuple[WaitingGang, list[WorkerId]] | None:
        """The first gang for which there is room, and a worker for each of its tasks. There may be thousands of gangs."""
        slices, workers_free = TimeSlices(), None
        for gang in sorted(self._waiting.values(), key=lambda gang: self._dispatch.rank(gang.position)):
            if await slices.step():
                workers_free = None
            if workers_free is None:
                # Before it is planned: what was planned holds only as long as no record changes.
                await self._seat.wait_sure()
                workers_free = self._workers_free()
            workers = self._plan(gang, workers_free)
            if workers is not None:
                return gang, workers
        return None

    def _workers_free(self) -> list[tuple[WorkerId, Capacity]]:
        views = [(WorkerId(view.name), view.free) for view in self._worker_index.views()]
        return [each for each in views if each[0] not in self._left_out]

    def _plan(self, gang: WaitingGang, workers_free: list[tuple[WorkerId, Capacity]]) -> list[WorkerId] | None:
        """A worker for each task; None when the gang has to wait."""
        entry = self._job_index.get(gang.key)
        if entry is None or entry.job is None or not gangs.is_waiting(entry.job.value, entry.task_records()):
            return None
        if gang.key in self._pausing:
            return None
        dispatch = self._dispatch
        if not dispatch.has_quota(gang.position, gang.need, gang.count):
            return None
        spared = {*dispatch.spared(gang.position), *dispatch.unfit(gang.key)}
        workers_free = [each for each in workers_free if each[0] not in spared]
        workers = gangs.assign(gang.need, gang.count, workers_free)
        return workers if len(workers) == gang.count else None

    async def _gather(self, gang: WaitingGang, workers: list[WorkerId]) -> None:
        entry = self._job_index.get(gang.key)
        if entry is None or entry.job is None:
            return
        epoch = max(entry.job.value.epoch, *(row.value.epoch for row in entry.tasks.values())) + 1
        self._gathering = (gang.key, epoch)
        self._out_since[gang.key] = epoch
        self._dispatch.on_gathering(gang.key)
        self._recorded.clear()
        try:
            if await self._offer_all(entry, epoch, workers):
                self._dispatch.on_gathered(gang.key)
                for worker_id in workers:
                    self._left_out_s.pop(worker_id, None)
                async with asyncio.timeout(_RECORDED_TIMEOUT_S):
                    await self._recorded.wait()
        except TimeoutError:
            log.warning("the claims of gang %s have not arrived in the records", gang.key.job_id)
        finally:
            self._end_gathering(gang.key)

    def _end_gathering(self, key: JobKey) -> None:
        """From here on the records decide: go when all are held, and else off, which lets the workers release."""
        self._gathering = None
        self.on_job_changed(key)
        self._dirty.mark(key)

    async def _offer_all(self, entry: JobEntry, epoch: int, workers: list[WorkerId]) -> bool:
        """Whether every task was claimed. At the first that was not, no more are offered."""
        assert entry.job is not None  # noqa: S101
        key = JobKey(entry.job.value.namespace, entry.job.value.job_id)
        room = asyncio.Semaphore(_OUT_AT_ONCE)
        refused = False

        async def offer(row: Row[TaskRecord], worker_id: WorkerId) -> None:
            nonlocal refused
            async with room:
                is_offered = not refused
                if is_offered and await self._claimed(row, epoch, worker_id):
                    return
                self._dispatch.on_no_offer(key, row.value.task)
                if is_offered:
                    refused = True
                    if worker_id not in self._dispatch.unfit(key):
                        self._leave_out(worker_id)
                    self._end_gathering(key)  # at once, though others may not have answered yet

        async with asyncio.TaskGroup() as offers:
            for task, worker_id in enumerate(workers):
                offers.create_task(offer(entry.tasks[task], worker_id))
        return not refused

    async def _claimed(self, row: Row[TaskRecord], epoch: int, worker_id: WorkerId) -> bool:
        task = row.value
        offer = Offer.of(task, row.revision, epoch=epoch)
        subject = subjects.worker_verb(worker_id, "offer")
        try:
            answer = await self._bus.request(subject, offer.to_json(), timeout_s=_OFFER_TIMEOUT_S)
            reply = OfferReply.from_json(answer.data)
            if reply.unfit:
                self._dispatch.note_unfit(JobKey(task.namespace, task.job_id), reply)
            return reply.accepted
        except NoRespondersError:
            return False
        except BusError as error:
            log.info("%s did not answer the offer of %s.%d: %s", worker_id, task.job_id, task.task, error)
            return False

    def _leave_out(self, worker_id: WorkerId) -> None:
        earlier = self._left_out.pop(worker_id, None)
        if earlier is not None:
            earlier.cancel()
        registered = self._worker_index.workers
        self._left_out_s = {each: before for each, before in self._left_out_s.items() if each in registered}
        pause_s = min(2 * self._left_out_s.get(worker_id, _LEFT_OUT_S / 2), _LONGEST_LEFT_OUT_S)
        self._left_out_s[worker_id] = pause_s
        self._left_out[worker_id] = asyncio.get_running_loop().call_later(pause_s, self._take_back, worker_id)

    def _take_back(self, worker_id: WorkerId) -> None:
        del self._left_out[worker_id]
        self._wake.set()

    # ---- gangs that never fit ---------------------------------------------------------------------------

    async def give_up_misfits(self) -> None:
        """Write the end of gangs that all registered workers together have had no room for, empty, for long enough."""
        totals, dispatch, slices = self._worker_index.totals(), self._dispatch, TimeSlices()
        now, misfits = time.monotonic(), dict[JobKey, int]()
        for waiting in list(self._waiting.values()) if totals else []:
            await slices.step()
            fitting = len(gangs.assign(waiting.need, waiting.count, _without(totals, dispatch.unfit(waiting.key))))
            if fitting < waiting.count:
                misfits[waiting.key] = fitting
        self._misfit_since = {key: self._misfit_since.get(key, now) for key in misfits}
        for key, since in self._misfit_since.items():
            entry = self._job_index.get(key)
            row = entry.tasks.get(0) if entry is not None else None
            gang = self._waiting.get(key)
            if row is None or gang is None:
                continue
            unfit, need = dispatch.unfit(key), gangs.describe_need(gang.need, gang.count)
            # That workers lack what a job names does not change by waiting.
            if unfit and len(gangs.assign(gang.need, gang.count, totals)) == gang.count:
                reason = dispatch.why_unfit(key)
                given_up = lifecycle.refuse(row.value, now=time.time(), reason=reason)
            elif now - since < self._timing.unschedulable_after_s:
                continue
            else:
                reason = f"{need}; all {len(totals)} workers together, empty, fit {misfits[key]}"
                given_up = lifecycle.give_up(row.value, now=time.time(), reason=reason)
            if given_up is not None:  # the end of one is the end of all
                await self._writer.write_verdicts([(given_up, row.revision)])


def _without(totals: list[tuple[WorkerId, Capacity]], left_out: Container[WorkerId]) -> list[tuple[WorkerId, Capacity]]:
    return [each for each in totals if each[0] not in left_out]
