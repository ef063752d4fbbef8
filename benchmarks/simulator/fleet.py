"""The machines at work: they claim what is offered, end it, beat, die and come back."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.simulator.machines import Attempt, Listeners, Machine
from benchmarks.simulator.workload import NAMESPACE
from fluster_bus.core import buckets
from fluster_bus.messages import JobStatus, Offer, OfferReply, TaskRecord
from fluster_services import capacity, gangs, lifecycle
from fluster_services.controller.state.job_index import JobEntry, JobKey
from fluster_services.gangs import EpochDecision

if TYPE_CHECKING:
    from benchmarks.simulator.simulation import Simulation

_START_S = 0.05
_BEATS = 10  # groups of workers that beat at the same time


class Fleet:
    """The workers' side of a simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        workload = simulation.workload
        self._workload = workload
        self._dice = random.Random(workload.seed + 1)
        self.machines = [Machine(number) for number in range(workload.workers)]
        self._by_id = {machine.worker_id: machine for machine in self.machines}
        needs = {capacity.needed(request.resources, NAMESPACE) for _, request in workload.shares if not request.gang}
        self.listeners = Listeners(self.machines, needs, self._dice)

    def start(self) -> None:
        """Have all machines register and beat."""
        for machine in self.machines:
            self._register(machine)
            self._lose_later(machine)
        beats_s = self._simulation.timing.heartbeat_s
        for group in range(_BEATS):
            self._simulation.clock.after(group * beats_s / _BEATS, partial(self._beat, group))

    # ---- attempts ---------------------------------------------------------------------------------------

    def answer(self, subject: str, offer: Offer) -> OfferReply | None:
        """What a worker says to an offer; None when no worker listens."""
        machine = self.listeners.any_of(subject)
        if machine is None:
            return None
        if machine.worker_id in offer.spared:
            return OfferReply(worker_id=machine.worker_id, accepted=False, spared=True)
        return OfferReply(worker_id=machine.worker_id, accepted=self._claim(machine, offer))

    def _claim(self, machine: Machine, offer: Offer) -> bool:
        simulation, job = self._simulation, JobKey(offer.namespace, offer.job_id)
        entry = simulation.job_index.get(job)
        row = entry.tasks.get(offer.task) if entry is not None else None
        if row is None or row.revision != offer.revision:
            return False
        need, now = capacity.needed(row.value.resources), simulation.clock.now
        name = buckets.attempt_key(offer.namespace, offer.job_id, offer.task, offer.attempt)
        if not machine.ledger.reserve(name, need):
            return False
        claimed = lifecycle.claim(
            row.value, attempt=offer.attempt, worker_id=machine.worker_id, now=now, epoch=offer.epoch
        )
        if claimed is None:
            machine.ledger.release(name)
            return False
        attempt = machine.attempts[name] = Attempt(machine, job, claimed, need, name)
        self.listeners.cover(machine)
        simulation.figures.on_cpu(now, busy=need.cpu)
        if claimed.gang:
            simulation.clock.after(_START_S, partial(self._make_ready, attempt))
        else:
            self._start(attempt)
        simulation.write(claimed)
        return True

    def _start(self, attempt: Attempt) -> None:
        attempt.runs = True
        duration_s = _START_S + self._workload.duration_s(self._dice)
        self._simulation.clock.after(duration_s, partial(self._on_end, attempt))
        self._simulation.on_placed(attempt.job, attempt.record)

    def _present(self, attempt: Attempt) -> TaskRecord | None:
        """The attempt's record, as long as the machine has it."""
        if attempt.machine.attempts.get(attempt.name) is not attempt:
            return None
        entry = self._simulation.job_index.get(attempt.job)
        return entry.tasks[attempt.record.task].value if entry is not None else None

    def _give_back(self, attempt: Attempt) -> None:
        machine = attempt.machine
        del machine.attempts[attempt.name]
        machine.ledger.release(attempt.name)
        self.listeners.cover(machine)
        self._simulation.figures.on_cpu(self._simulation.clock.now, busy=-attempt.need.cpu)

    def _on_end(self, attempt: Attempt) -> None:
        """The attempt's process ends, unless it was stopped or its machine died before."""
        present = self._present(attempt)
        if present is None:
            return
        is_failing = self._dice.random() < self._workload.failing
        self._end(attempt, present, JobStatus.FAILED if is_failing else JobStatus.SUCCEEDED, "its process ended")

    def _end(self, attempt: Attempt, present: TaskRecord, state: JobStatus, reason: str) -> None:
        number, worker_id = attempt.record.attempt, attempt.machine.worker_id
        self._give_back(attempt)
        now = self._simulation.clock.now
        ended = lifecycle.end(present, attempt=number, worker_id=worker_id, now=now, state=state, reason=reason)
        if ended is not None:
            self._simulation.write(ended)

    def _attempt(self, task: TaskRecord) -> Attempt | None:
        machine = self._by_id[task.worker_id] if task.worker_id is not None else None
        if machine is None:
            return None
        name = buckets.attempt_key(task.namespace, task.job_id, task.task, task.attempt)
        return machine.attempts.get(name)

    def stop(self, task: TaskRecord) -> None:
        """Its record asks for it."""
        attempt = self._attempt(task)
        present = self._present(attempt) if attempt is not None else None
        if attempt is not None and present is not None and lifecycle.is_to_be_stopped(present):
            self._end(attempt, present, JobStatus.KILLED, present.kill_requested or present.restart_requested or "")

    # ---- holds of gangs ---------------------------------------------------------------------------------

    def _make_ready(self, attempt: Attempt) -> None:
        present, worker_id = self._present(attempt), attempt.machine.worker_id
        if present is None:
            return
        address = f"{worker_id}:1" if present.task == 0 else None
        ready = lifecycle.make_ready(present, attempt=present.attempt, worker_id=worker_id, gang_address=address)
        if ready is not None:
            self._simulation.write(ready)

    def look(self, entry: JobEntry) -> None:
        """A gang's record may have decided what becomes of its holds."""
        assert entry.job is not None
        for task in entry.task_records():
            attempt = self._attempt(task) if lifecycle.is_held(task) else None
            decided = gangs.decision(entry.job.value, task.epoch)
            if attempt is None or attempt.runs or decided is None or self._present(attempt) is None:
                continue
            if decided is EpochDecision.GO:
                self._start(attempt)
            else:
                self._release(attempt, task)

    def _release(self, attempt: Attempt, task: TaskRecord) -> None:
        self._give_back(attempt)
        self._simulation.figures.holds_released += 1
        released = lifecycle.release(
            task,
            attempt=task.attempt,
            worker_id=attempt.machine.worker_id,
            epoch=task.epoch,
            now=self._simulation.clock.now,
            reason="released",
        )
        if released is not None:
            self._simulation.write(released)

    # ---- life and death ---------------------------------------------------------------------------------

    def _register(self, machine: Machine) -> None:
        self._simulation.worker_index.on_registered(machine.info, now=self._simulation.clock.now)
        self.listeners.cover(machine)

    def _beat(self, group: int) -> None:
        """A part of the workers is heard; once in each interval the controller judges."""
        simulation, worker_index = self._simulation, self._simulation.worker_index
        now, has_room = simulation.clock.now, False
        for machine in self.machines[group::_BEATS]:
            if machine.is_up:
                has_room |= worker_index.on_beat(machine.worker_id, now=now, free=machine.ledger.free)
        if group == 0:
            simulation.judge()
        if has_room:
            simulation.dispatch.on_room()
        simulation.clock.after(simulation.timing.heartbeat_s, partial(self._beat, group))

    def _lose_later(self, machine: Machine) -> None:
        self._later(self._workload.days_between_losses * 86_400, partial(self._lose, machine))

    def _later(self, mean_s: float, action: Callable[[], None]) -> None:
        self._simulation.clock.after(self._dice.expovariate(1 / mean_s), action)

    def _lose(self, machine: Machine) -> None:
        """The machine dies with all that runs on it; the server drops its subscriptions at once."""
        figures = self._simulation.figures
        figures.lost_workers += 1
        figures.on_cpu(self._simulation.clock.now, busy=-machine.busy_cpu, up=-machine.info.total.cpu)
        machine.is_up = False
        machine.attempts.clear()
        self.listeners.cover(machine)
        self._later(self._workload.repair_s, partial(self._come_back, machine))

    def _come_back(self, machine: Machine) -> None:
        machine.start()
        simulation = self._simulation
        simulation.figures.on_cpu(simulation.clock.now, up=machine.info.total.cpu)
        self._register(machine)
        for _, row in simulation.job_index.held_by(machine.worker_id):  # it was away for less than the timeout
            lost = lifecycle.lose_worker(
                row.value, worker_id=machine.worker_id, now=simulation.clock.now, reason="its worker was restarted"
            )
            if lost is not None:
                simulation.write(lost)
        self._lose_later(machine)
