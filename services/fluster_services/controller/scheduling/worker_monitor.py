"""Tells lost workers by their heartbeats, and gives up tasks that no worker could ever run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError
from fluster_bus.messages import Heartbeat, HeartbeatReply, WorkerId, WorkerStatus
from fluster_bus.messages.parts.wire_range import SPOKEN
from fluster_services import capacity, lifecycle

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_bus.messages import WorkerInfo
    from fluster_bus.storage.tables import Table
    from fluster_services.config import Timing
    from fluster_services.controller.leading.record_writer import RecordWriter
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.scheduling.dispatch import Dispatch
    from fluster_services.controller.scheduling.gangs import Gangs
    from fluster_services.controller.state.job_index import JobIndex
    from fluster_services.controller.state.reports import VMTroubles
    from fluster_services.controller.state.worker_index import WorkerIndex

log = logging.getLogger(__name__)


class WorkerMonitor:
    """Tracks which workers live, and writes the end of what the others held."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        job_index: JobIndex,
        worker_index: WorkerIndex,
        workers: Table[WorkerInfo],
        vm_troubles: VMTroubles,
        dispatch: Dispatch,
        gangs: Gangs,
        writer: RecordWriter,
        timing: Timing,
    ) -> None:
        self._bus = bus
        self._seat = seat
        self._job_index = job_index
        self._worker_index = worker_index
        self._workers = workers  # the table in which they are registered
        self._vm_troubles = vm_troubles
        self._dispatch = dispatch
        self._gangs = gangs
        self._writer = writer
        self._timing = timing

    async def run(self) -> None:
        """Look at each beat's interval, until cancelled."""
        bus = self._bus
        bus.on_reconnect(lambda: self._worker_index.liveness.on_interruption(now=time.monotonic()))
        # No worker was heard by this controller while another led, or none did.
        self._worker_index.liveness.on_interruption(now=time.monotonic())
        await bus.serve(subjects.heartbeats(), Heartbeat, self.on_heartbeat, concurrency=256)
        await self._vm_troubles.listen(bus)
        await bus.subscribe(subjects.capacity(), lambda _delivery: self._dispatch.on_room())
        while True:
            started = time.monotonic()
            await asyncio.sleep(self._timing.heartbeat_s)
            if time.monotonic() - started > self._timing.heartbeat_s + self._timing.fence_after_s / 2:
                # This process itself was stopped, or the machine slept: it heard no worker, and may give none up for that.
                self._worker_index.liveness.on_interruption(now=time.monotonic())
            if bus.connected:
                await self._seat.wait_sure()
                await self._end_lost()
                await self._give_up_misfits()
                await self._gangs.give_up_misfits()

    # ---- workers ----------------------------------------------------------------------------------------

    async def on_heartbeat(self, beat: Heartbeat, _subject: str) -> HeartbeatReply:
        await self._seat.wait_led_since()  # a beat that only a deposed leader heard was not heard
        if self._worker_index.on_beat(beat.worker_id, now=time.monotonic(), free=beat.free):
            self._dispatch.on_room()
        return HeartbeatReply(registered=beat.worker_id in self._worker_index.workers, wire=SPOKEN)

    def on_held(self, worker_id: WorkerId) -> None:
        """A record says that the worker holds a task."""
        self._worker_index.liveness.expect(worker_id, now=time.monotonic())

    async def _end_lost(self) -> None:
        job_index, workers = self._job_index, self._worker_index.workers
        for worker_id in self._worker_index.take_lost(now=time.monotonic()):
            log.warning("worker %s is lost, with %d tasks", worker_id, len(job_index.held_by(worker_id)))
        # Each time anew, not once: a write may fail, because another was first or the bus was away.
        for worker_id in self._worker_index.dead():
            reason = f"worker {worker_id} was not heard for {self._worker_index.liveness.timeout_s(worker_id):g} s"
            await self._writer.write_verdicts(self._worker_index.lost_tasks(worker_id, now=time.time(), reason=reason))
            if worker_id in workers and not self._worker_index.liveness.is_alive(worker_id):
                try:
                    await self._workers.delete(worker_id)
                except BusError as error:
                    log.info("the lost worker %s is taken from the table later: %s", worker_id, error)

    def statuses(self) -> Iterator[WorkerStatus]:
        """The registered workers, by name."""
        now = time.monotonic()
        for worker_id, info in sorted(self._worker_index.workers.items()):
            yield WorkerStatus(
                info=info,
                free=self._worker_index.liveness.free(worker_id),
                alive=self._worker_index.liveness.is_alive(worker_id),
                silent_for_s=round(self._worker_index.liveness.silent_for_s(worker_id, now=now), 3),
                running=len(self._job_index.held_by(worker_id)),
            )

    # ---- tasks that never fit ---------------------------------------------------------------------------

    async def _give_up_misfits(self) -> None:
        scheduler = self._dispatch.scheduler
        now = time.monotonic()
        self._worker_index.note_misfits(scheduler.needs(), now=now)
        totals = [(str(worker_id), total) for worker_id, total in self._worker_index.totals()]
        for need, since in self._worker_index.misfits.items():
            # That workers lack what a job names does not change by waiting; which others there will be may.
            is_unfit = any(capacity.fits(need, total) for _, total in totals)
            if now - since < self._timing.unschedulable_after_s and not is_unfit:
                continue
            reason = capacity.misfit(need, totals)
            misfit = []
            for key, task in scheduler.waiting_for(need):
                entry = self._job_index.get(key)
                row = entry.tasks.get(task) if entry is not None else None
                if row is None:
                    continue
                if is_unfit:
                    why = self._dispatch.why_unfit(key)
                    given_up = lifecycle.refuse(row.value, now=time.time(), reason=why)
                else:
                    given_up = lifecycle.give_up(row.value, now=time.time(), reason=reason)
                if given_up is not None:
                    misfit.append((given_up, row.revision))
            await self._writer.write_verdicts(misfit)
