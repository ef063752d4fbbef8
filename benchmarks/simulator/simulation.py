"""A cluster in one process: the controller's own scheduler, books, lifecycle, retries and liveness, without a bus.

What is simulated is what lies between them: messages that take their time, attempts that run and end or fail, machines
that die and come back. Records are written the moment they are decided: nobody else writes them here.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

from benchmarks.simulator.clock import Clock
from benchmarks.simulator.machines import Machine, QueueGroups
from benchmarks.simulator.workload import MACHINE, Workload
from fluster_bus import subjects
from fluster_bus.messages import Capacity, JobId, JobRecord, JobRequest, JobStatus, Namespace, TaskRecord
from fluster_bus.tables import Row
from fluster_services import capacity, lifecycle
from fluster_services.config import Timing
from fluster_services.controller import offers
from fluster_services.controller.books import Books, JobKey, record_key
from fluster_services.controller.liveness import Liveness
from fluster_services.controller.reconcile import next_records
from fluster_services.controller.scheduler import Place, Scheduler
from fluster_services.worker.ledger import Ledger

_NAMESPACE = Namespace("default")
_OFFER_S = 0.001  # there, the claim's write, and back
_START_S = 0.05
_BEATS = 10  # groups of workers that beat at the same time
# Slower than the default, as a beat costs the simulation what it costs a controller.
TIMING = Timing(heartbeat_s=60.0, fence_after_s=180.0, worker_timeout_s=240.0)


class Simulation:
    """One run of a workload; `run` it once, then read how it went."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.clock = Clock()
        self.books = Books()
        self.scheduler = Scheduler()
        self.liveness = Liveness(TIMING.worker_timeout_s)
        self.machines = [Machine(number) for number in range(workload.workers)]
        self.ended: dict[JobStatus, int] = {}  # {state: jobs that ended so}
        self.retried = 0  # attempts after the first
        self.lost_workers = 0
        self.longest_queue = 0
        self.placement_s = array("d")  # of each attempt: from when it may be offered to its claim
        self._dice = random.Random(workload.seed + 1)
        self._by_id = {machine.worker_id: machine for machine in self.machines}
        needs = [capacity.needed(request.resources) for request in workload.requests()]
        self._groups = QueueGroups(needs, self._dice)
        self._revision = 0
        self._applied: deque[JobKey] = deque()
        self._is_settling = False
        self._waiting_since: dict[tuple[JobKey, int], float] = {}
        self._arrivals = workload.arrivals()
        self._submitted = 0
        # As in controller/offers.py
        self._out = 0
        self._rooms = 0
        self._is_opening = False
        self._decline_pause_s = offers._FIRST_PAUSE_AFTER_DECLINE_S  # noqa: SLF001
        # CPU seconds, given away and there, up to the last submission
        self._busy_cpu, self._up_cpu = 0.0, MACHINE.cpu * workload.workers
        self._busy_cpu_s = self._up_cpu_s = self._counted_until = 0.0

    def run(self) -> None:
        """Until the last job has ended."""
        for machine in self.machines:
            self._register(machine)
            self._lose_later(machine)
        for group in range(_BEATS):
            self.clock.after(group * TIMING.heartbeat_s / _BEATS, partial(self._beat, group))
        self._submit_next()
        self.clock.run(lambda: sum(self.ended.values()) == self.workload.jobs)

    @property
    def utilisation(self) -> float:
        """CPUs given away of those that were up, from the first submission to the last."""
        return self._busy_cpu_s / self._up_cpu_s if self._up_cpu_s else 0.0

    def check(self) -> None:
        """Raise AssertionError when what is known does not fit together."""
        self.books.sanity_check()
        self.scheduler.sanity_check()
        for machine in self.machines:
            machine.check()

    # ---- jobs -------------------------------------------------------------------------------------------

    def _submit_next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self.clock.at(arrival[0], partial(self._submit, arrival[1]))

    def _submit(self, request: JobRequest) -> None:
        self._count(0.0, 0.0)
        self._submitted += 1
        job = lifecycle.new_job(
            _NAMESPACE, JobId(f"job-{self._submitted}"), request, order=self._submitted, now=self.clock.now
        )
        self._write(job)
        for task in lifecycle.new_tasks(job):
            self._write(task)
        self._submit_next()

    def _write(self, record: JobRecord | TaskRecord) -> None:
        """As the controller takes in a record, with all that follows from it."""
        self._revision += 1
        key = self.books.apply(Row(record_key(record), record, self._revision))
        assert key is not None
        if isinstance(record, TaskRecord):
            self._apply_task(key, record)
        self._applied.append(key)
        if not self._is_settling:
            self._is_settling = True
            while self._applied:
                self._settle(self._applied.popleft())
            self._is_settling = False
            self._offer_waiting()

    def _settle(self, key: JobKey) -> None:
        entry = self.books.get(key)
        if entry is None or entry.job is None:
            return
        for record in next_records(entry, now=self.clock.now, parent=None):
            self._write(record)
        if entry.job.value.state.finished():
            state = entry.job.value.state
            self.ended[state] = self.ended.get(state, 0) + 1
            del self.books._jobs[key]  # noqa: SLF001 - a million of them have no room in memory

    def _apply_task(self, key: JobKey, task: TaskRecord) -> None:
        if task.state.finished():
            self._on_room()
        if task.state is not JobStatus.PENDING or task.kill_requested is not None:
            self.scheduler.remove(key, task.task)
            self._waiting_since.pop((key, task.task), None)
        elif task.backoff_s:
            self.clock.after(task.backoff_s, partial(self._wait_for_worker, key, task))
        else:
            self._wait_for_worker(key, task)

    def _wait_for_worker(self, key: JobKey, task: TaskRecord) -> None:
        entry = self.books.get(key)
        if entry is None or entry.tasks[task.task].value != task:
            return
        self.scheduler.add(Place(task.order, task.task, key), capacity.needed(task.resources))
        self._waiting_since[key, task.task] = self.clock.now
        self.longest_queue = max(self.longest_queue, len(self.scheduler))
        if not self._is_settling:
            self._offer_waiting()

    # ---- offers: what controller/offers.py does ---------------------------------------------------------

    def _offer_waiting(self) -> None:
        for place, need in self.scheduler.take(offers._OUT_AT_ONCE - self._out):  # noqa: SLF001
            self._out += 1
            machine = self._groups.any_of(need)
            answer = partial(self._on_answer, place, need, machine, self._rooms)
            self.clock.after(_OFFER_S, answer)

    def _on_answer(self, place: Place, need: Capacity, machine: Machine | None, rooms: int) -> None:
        self._out -= 1
        entry = self.books.get(place.job)
        if entry is None:
            self.scheduler.remove(place.job, place.task)
        elif machine is not None and self._claim(entry.tasks[place.task].value, need, machine):
            self.scheduler.on_accepted(need)
            self._decline_pause_s = offers._FIRST_PAUSE_AFTER_DECLINE_S  # noqa: SLF001
        else:
            if machine is not None and not self._is_opening:
                self._is_opening = True
                self.clock.after(self._decline_pause_s, self._open)
                self._decline_pause_s = min(2 * self._decline_pause_s, offers._LAST_PAUSE_AFTER_DECLINE_S)  # noqa: SLF001
            self.scheduler.on_declined(place, need, room=rooms != self._rooms)
        self._offer_waiting()

    def _open(self) -> None:
        self._is_opening = False
        self._on_room()
        self._offer_waiting()

    def _on_room(self) -> None:
        self._rooms += 1
        self.scheduler.on_room()

    # ---- workers ----------------------------------------------------------------------------------------

    def _claim(self, task: TaskRecord, need: Capacity, machine: Machine) -> bool:
        """What a worker does with an offer."""
        key = subjects.attempt_key(task.namespace, task.job_id, task.task, task.attempt)
        if not machine.is_up or not machine.ledger.reserve(key, need):
            return False
        claimed = lifecycle.claim(task, attempt=task.attempt, worker_id=machine.worker_id, now=self.clock.now)
        if claimed is None:
            machine.ledger.release(key)
            return False
        machine.attempts[key] = need
        self._groups.cover(machine)
        self._count(need.cpu, 0.0)
        self.retried += task.attempt > 1
        since = self._waiting_since.get((JobKey(task.namespace, task.job_id), task.task), self.clock.now)
        self.placement_s.append(self.clock.now - since)
        ends = partial(self._on_end, machine, machine.ledger, claimed, key, need)
        self.clock.after(_START_S + self.workload.duration_s(self._dice), ends)
        self._write(claimed)
        return True

    def _on_end(self, machine: Machine, ledger: Ledger, task: TaskRecord, key: str, need: Capacity) -> None:
        """The attempt's process ends, unless its machine died before."""
        if machine.ledger is not ledger or not machine.is_up:
            return
        ledger.release(key)
        del machine.attempts[key]
        self._groups.cover(machine)
        self._count(-need.cpu, 0.0)
        entry = self.books.get(JobKey(task.namespace, task.job_id))
        if entry is None:
            return
        current = entry.tasks[task.task].value
        started_at = (task.started_at or 0.0) + _START_S
        current = lifecycle.run(current, attempt=task.attempt, worker_id=machine.worker_id, now=started_at) or current
        is_failing = self._dice.random() < self.workload.failing
        state = JobStatus.FAILED if is_failing else JobStatus.SUCCEEDED
        if current.kill_requested is not None:
            state = JobStatus.KILLED
        ended = lifecycle.end(
            current,
            attempt=task.attempt,
            worker_id=machine.worker_id,
            now=self.clock.now,
            state=state,
            reason="its process ended",
        )
        if ended is not None:
            self._write(ended)

    def _register(self, machine: Machine) -> None:
        self.liveness.forget(machine.worker_id)
        self.liveness.expect(machine.worker_id, now=self.clock.now)
        self._groups.cover(machine)

    def _beat(self, group: int) -> None:
        """A part of the workers is heard; once in each interval all are judged, as the controller does it."""
        has_room = False
        for machine in self.machines[group::_BEATS]:
            if machine.is_up:
                has_room |= self.liveness.on_beat(machine.worker_id, now=self.clock.now, free=machine.ledger.free)
        for worker_id in self.liveness.take_lost(now=self.clock.now) if group == 0 else ():
            for _key, row in self.books.held_by(worker_id):
                lost = lifecycle.lose_worker(row.value, worker_id=worker_id, now=self.clock.now, reason="not heard")
                if lost is not None:
                    self._write(lost)
        if has_room:
            self._on_room()
            self._offer_waiting()
        self.clock.after(TIMING.heartbeat_s, partial(self._beat, group))

    def _lose_later(self, machine: Machine) -> None:
        self._later(self.workload.days_between_losses * 86_400, partial(self._lose, machine))

    def _later(self, mean_s: float, action: Callable[[], None]) -> None:
        self.clock.after(self._dice.expovariate(1 / mean_s), action)

    def _lose(self, machine: Machine) -> None:
        """The machine dies with all that runs on it; the server drops its subscriptions at once."""
        self.lost_workers += 1
        self._count(-sum(need.cpu for need in machine.attempts.values()), -MACHINE.cpu)
        machine.is_up = False
        machine.attempts.clear()
        self._groups.cover(machine)
        self._later(self.workload.repair_s, partial(self._come_back, machine))

    def _come_back(self, machine: Machine) -> None:
        machine.start()
        self._count(0.0, MACHINE.cpu)
        self._register(machine)
        for _key, row in self.books.held_by(machine.worker_id):  # it was away for less than the timeout
            task = row.value
            ended = lifecycle.end(
                task,
                attempt=task.attempt,
                worker_id=machine.worker_id,
                now=self.clock.now,
                state=JobStatus.WORKER_FAILED,
                reason="its worker was restarted",
            )
            if ended is not None:
                self._write(ended)
        self._lose_later(machine)

    def _count(self, busy_cpu: float, up_cpu: float) -> None:
        """Note how much is given away from now on."""
        if self._submitted < self.workload.jobs:
            passed_s, self._counted_until = self.clock.now - self._counted_until, self.clock.now
            self._busy_cpu_s += passed_s * self._busy_cpu
            self._up_cpu_s += passed_s * self._up_cpu
        self._busy_cpu += busy_cpu
        self._up_cpu += up_cpu
