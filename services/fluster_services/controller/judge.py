"""Judges workers by their heartbeats, and tasks that no worker could ever run."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from fluster_bus import subjects
from fluster_bus.errors import BusError
from fluster_bus.messages import Capacity, Heartbeat, HeartbeatReply, WorkerId, WorkerInfo, WorkerStatus
from fluster_services import capacity, lifecycle
from fluster_services.controller.explain import WorkerView
from fluster_services.controller.liveness import Liveness

if TYPE_CHECKING:
    from fluster_services.controller.controller import Controller

log = logging.getLogger(__name__)


class Judge:
    """Whom the controller believes to live."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._timing = controller.config.timing
        self._liveness = Liveness(
            self._timing.worker_timeout_s, beats=int(self._timing.worker_timeout_s / self._timing.heartbeat_s)
        )
        self._misfit_since: dict[Capacity, float] = {}  # {need: since when no worker could ever cover it}

    async def run(self) -> None:
        """Judge at each beat's interval, until cancelled."""
        bus = self._controller.bus
        bus.on_reconnect(lambda: self._liveness.on_interruption(now=time.monotonic()))
        # Nobody was heard by this controller while another led, or none did.
        self._liveness.on_interruption(now=time.monotonic())
        await bus.serve(subjects.heartbeats(), Heartbeat, self._on_heartbeat, concurrency=256)
        await bus.subscribe(subjects.capacity(), lambda _delivery: self._controller.offers.on_room())
        while True:
            started = time.monotonic()
            await asyncio.sleep(self._timing.heartbeat_s)
            if time.monotonic() - started > self._timing.heartbeat_s + self._timing.fence_after_s / 2:
                # This process itself was stopped, or the machine slept: it heard nobody, and may judge nobody for it.
                self._liveness.on_interruption(now=time.monotonic())
            if bus.connected:
                await self._controller.seat.wait_sure()
                await self._judge_workers()
                await self._give_up_misfits()
                await self._controller.gangs.give_up_misfits()

    # ---- workers ----------------------------------------------------------------------------------------

    async def _on_heartbeat(self, beat: Heartbeat, _subject: str) -> HeartbeatReply:
        await self._controller.seat.wait_sure()  # a beat that only a deposed leader heard was not heard
        if self._liveness.on_beat(beat.worker_id, now=time.monotonic(), free=beat.free):
            self._controller.offers.on_room()
        return HeartbeatReply(registered=beat.worker_id in self._controller.workers)

    def on_registered(self, info: WorkerInfo) -> None:
        """A worker is in the table: a sign of life, also from one that was given up."""
        self._liveness.forget(info.worker_id)
        self._liveness.expect(info.worker_id, now=time.monotonic())

    def on_held(self, worker_id: WorkerId) -> None:
        """A record says that the worker holds a task."""
        self._liveness.expect(worker_id, now=time.monotonic())

    async def _judge_workers(self) -> None:
        books, workers = self._controller.books, self._controller.workers
        for worker_id in self._liveness.take_lost(now=time.monotonic()):
            log.warning("worker %s is lost, with %d tasks", worker_id, len(books.held_by(worker_id)))
        # Each time anew, not once: a write may fail, because another was first or the bus was away.
        for worker_id in {*books.holders(), *workers}:
            if self._liveness.is_alive(worker_id):
                continue
            reason = f"worker {worker_id} was not heard for {self._timing.worker_timeout_s:g} s"
            held = [row for _, row in books.held_by(worker_id)]
            lost = [
                (lifecycle.lose_worker(row.value, worker_id=worker_id, now=time.time(), reason=reason), row.revision)
                for row in held
            ]
            await self._controller.write_verdicts([(record, revision) for record, revision in lost if record])
            if worker_id in workers and not self._liveness.is_alive(worker_id):
                try:
                    await self._controller.workers_table.delete(worker_id)
                except BusError as error:
                    log.info("the lost worker %s is taken from the table later: %s", worker_id, error)

    def on_left(self, worker_id: WorkerId) -> None:
        """A worker is not in the table any more: it will not be heard, and nobody need wait for it."""
        if self._liveness.is_alive(worker_id):  # it left by itself; one that was lost stays lost
            self._liveness.forget(worker_id)

    def alive(self) -> list[WorkerId]:
        """The workers that may be given something."""
        return [worker_id for worker_id in self._liveness.alive() if not self._is_draining(worker_id)]

    def _is_draining(self, worker_id: WorkerId) -> bool:
        info = self._controller.workers.get(worker_id)
        return info is not None and info.draining

    def takes_work(self, worker_id: WorkerId) -> bool:
        """True while the worker lives and is not about to leave."""
        info = self._controller.workers.get(worker_id)
        return info is not None and not info.draining and self._liveness.is_alive(worker_id)

    def free(self, worker_id: WorkerId) -> Capacity:
        return self._liveness.free(worker_id)

    def statuses(self) -> list[WorkerStatus]:
        """The registered workers, by name."""
        now = time.monotonic()
        return [
            WorkerStatus(
                info=info,
                free=self._liveness.free(worker_id),
                alive=self._liveness.is_alive(worker_id),
                silent_for_s=round(self._liveness.silent_for_s(worker_id, now=now), 3),
                running=len(self._controller.books.held_by(worker_id)),
            )
            for worker_id, info in sorted(self._controller.workers.items())
        ]

    def views(self) -> list[WorkerView]:
        """The workers that live and take work, as far as it matters to whoever waits for them."""
        books = self._controller.books
        found = []
        for worker_id, info in sorted(self._controller.workers.items()):
            if self._liveness.is_alive(worker_id) and not info.draining:
                held = books.held_by(worker_id)
                # By the records, which are newer than what the worker's last beat said it had left.
                free = info.total
                for _, row in held:
                    free = capacity.minus(free, capacity.needed(row.value.resources))
                jobs = tuple(sorted({key.job_id for key, _ in held}))
                found.append(WorkerView(name=worker_id, total=info.total, free=free, jobs=jobs))
        return found

    # ---- tasks that never fit ---------------------------------------------------------------------------

    async def _give_up_misfits(self) -> None:
        scheduler = self._controller.offers.scheduler
        workers = sorted(self._controller.workers.items())
        totals = [(worker_id, info.total) for worker_id, info in workers if not info.draining]
        now = time.monotonic()
        misfits = [
            need for need in scheduler.needs() if totals and not any(capacity.fits(need, total) for _, total in totals)
        ]
        self._misfit_since = {need: self._misfit_since.get(need, now) for need in misfits}
        for need, since in self._misfit_since.items():
            if now - since < self._timing.unschedulable_after_s:
                continue
            reason = capacity.misfit(need, [(str(worker_id), total) for worker_id, total in totals])
            misfit = []
            for key, task in scheduler.waiting_for(need):
                entry = self._controller.books.get(key)
                row = entry.tasks.get(task) if entry is not None else None
                if row is None:
                    continue
                given_up = lifecycle.give_up(row.value, now=time.time(), reason=reason)
                if given_up is not None:
                    misfit.append((given_up, row.revision))
            await self._controller.write_verdicts(misfit)
