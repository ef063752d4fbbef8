"""A cluster in one process: the controller's own decisions, without a bus, by a clock that jumps.

The same code as in a controller decides which task is offered next, to whom, what follows from each answer and what is
kept free for whom (Dispatch, Scheduler, WorkerIndex), what becomes of records (lifecycle, reconcile, dependencies, the rules of
gangs), and who is lost (Liveness). Workers answer by their own Ledger and listen by their own rule.

What is simulated is what lies between them: messages that take their time, attempts that run and end or fail, machines
that die and come back. Left out are: writes that another writer beats or that get lost, several controllers, fences,
draining, the record of a start, the word of room that workers send beside records, and how long finished jobs are kept (here
they are forgotten at once). Gangs are gathered one at a time as in a controller, but by the simulation's own hands. What
choosing workers to keep free costs is not waited for, as a controller does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from benchmarks.simulator.clock import Clock
from benchmarks.simulator.figures import Figures
from benchmarks.simulator.fleet import Fleet
from benchmarks.simulator.gathering import Gathering
from benchmarks.simulator.workload import NAMESPACE, Workload
from fluster_bus.messages import JobId, JobRecord, JobRequest, JobStatus, Offer, OfferReply, TaskRecord
from fluster_bus.storage.tables import Row
from fluster_services import job_lifecycle, lifecycle
from fluster_services.config import Timing
from fluster_services.controller.scheduling.dispatch import Asking, Dispatch
from fluster_services.controller.scheduling.wait_times import WaitTimes
from fluster_services.controller.state.job_index import JobEntry, JobIndex, JobKey, record_key
from fluster_services.controller.state.liveness import Liveness
from fluster_services.controller.state.reconcile import missing_tasks, next_records
from fluster_services.controller.state.worker_index import WorkerIndex

_MESSAGE_S = 0.001  # there, the claim's write, and back
# Slower than the default, as a beat costs the simulation what it costs a controller.
TIMING = Timing(heartbeat_s=120.0, fence_after_s=240.0, worker_timeout_s=480.0)


class Simulation:
    """One run of a workload; `run` it once, then read how it went."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.timing = TIMING
        self.clock = Clock()
        self.job_index = JobIndex()
        beats = int(TIMING.worker_timeout_s / TIMING.heartbeat_s)
        self.worker_index = WorkerIndex(self.job_index, Liveness(TIMING.worker_timeout_s, beats=beats))
        self.wait_times = WaitTimes()
        self.dispatch = Dispatch(self.job_index, self.worker_index, self, reserve_after_s=TIMING.reserve_after_s)
        self.gathering = Gathering(self)
        self.fleet = Fleet(self)
        self.figures = Figures(sum(machine.info.total.cpu for machine in self.fleet.machines))
        self._revision = 0
        self._marked: deque[JobKey] = deque()
        self._is_settling = False
        self._is_taking = False
        self._waiting_since: dict[tuple[JobKey, int], float] = {}
        self._arrivals = workload.arrivals()
        self._submitted = 0

    def run(self) -> None:
        """Until the last job has ended."""
        self.fleet.start()
        self._submit_next()
        self.clock.run(lambda: self.figures.finished == self.workload.jobs)

    def check(self) -> None:
        """Raise AssertionError when what is known does not fit together."""
        self.job_index.sanity_check()
        self.dispatch.scheduler.sanity_check()
        for machine in self.fleet.machines:
            machine.check()

    # ---- jobs -------------------------------------------------------------------------------------------

    def _submit_next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is None:
            self.figures.on_last_submitted(self.clock.now)
            return
        time, job_id, request = arrival
        self.clock.at(time, partial(self._submit, job_id, request))

    def _submit(self, job_id: JobId, request: JobRequest) -> None:
        self._submitted += 1
        job = job_lifecycle.new_job(NAMESPACE, job_id, request, order=self._submitted, now=self.clock.now)
        self.write(job)
        for task in job_lifecycle.new_tasks(job):
            self.write(task)
        waiting = len(self.dispatch.scheduler) + len(self.gathering)
        self.figures.longest_queue = max(self.figures.longest_queue, waiting)
        self._submit_next()

    def write(self, record: JobRecord | TaskRecord) -> None:
        """As the controller takes in a record, with all that follows from it."""
        self._revision += 1
        key = self.job_index.apply(Row(record_key(record), record, self._revision))
        assert key is not None
        if isinstance(record, TaskRecord):
            self._apply_task(key, record)
        elif record.state.finished():
            self._marked += self.job_index.dependents(key)
        self.mark(key)

    def _apply_task(self, key: JobKey, task: TaskRecord) -> None:
        self.wait_times.on_task(key, task, since=self.clock.now)
        if task.state is JobStatus.PENDING:
            self._waiting_since.setdefault((key, task.task), self.clock.now + task.backoff_s)
        elif task.state.finished():
            self._waiting_since.pop((key, task.task), None)
        self.dispatch.on_task(key, task, pause_s=self.wait_times.pause_s(key, task, now=self.clock.now))
        if lifecycle.is_to_be_stopped(task):
            self.clock.after(_MESSAGE_S, partial(self.fleet.stop, task))

    def mark(self, key: JobKey) -> None:
        """Have a job looked at: what follows from its records is written."""
        self._marked.append(key)
        if not self._is_settling:
            self._is_settling = True
            while self._marked:
                self._settle(self._marked.popleft())
            self._is_settling = False

    def _settle(self, key: JobKey) -> None:
        entry = self.job_index.get(key)
        if entry is None or entry.job is None:
            return
        job = entry.job.value
        if job.request.gang:
            self.gathering.on_job_changed(key)
            self.fleet.look(entry)
        if job.state.finished():
            if not self.job_index.dependents(key):
                self.figures.on_ended(job.state)
                self.job_index.discard(key)
                self.wait_times.forget(key)
                self.dispatch.remove_gang(key)
            return
        self._write_what_follows(key, entry, job)

    def _write_what_follows(self, key: JobKey, entry: JobEntry, job: JobRecord) -> None:
        after = self.job_index.dependencies(key) if job_lifecycle.awaits_others(job) else None
        is_gathering = job.request.gang and self.gathering.is_gathering(key)
        wanted = next_records(entry, now=self.clock.now, parent=None, after=after, is_gathering=is_gathering)
        for record in wanted:
            self.write(record)
        if after is not None and wanted:
            self._marked += [JobKey(key.namespace, job_id) for job_id in after]  # they may be forgotten now
        missing = missing_tasks(entry)
        self.figures.released += bool(missing)
        for task in missing:
            self.write(task)

    def on_placed(self, key: JobKey, task: TaskRecord) -> None:
        """A worker runs it now."""
        waited_s = self.clock.now - self._waiting_since.pop((key, task.task))
        (self.figures.gang_placement_s if task.gang else self.figures.placement_s).append(waited_s)
        self.figures.retried += task.attempt > 1
        self.figures.gangs_started += task.gang and task.task == 0

    # ---- the dispatch's surroundings --------------------------------------------------------------------

    def now(self) -> float:
        return self.clock.now

    def call_later(self, delay_s: float, action: Callable[[], None], /) -> None:
        self.clock.after(delay_s, action)

    def on_dispatchable(self) -> None:
        if not self._is_taking:
            self._is_taking = True
            self.clock.after(0.0, self._take)

    def on_room(self) -> None:
        self.gathering.on_room()

    def _take(self) -> None:
        self._is_taking = False
        for position, need in self.dispatch.take():
            self._continue(self.dispatch.offer(position, need), None)

    def _continue(self, asking: Asking, answer: OfferReply | None) -> None:
        try:
            subject, offer = asking.send(answer)
        except StopIteration:
            return
        self.ask(subject, offer, partial(self._continue, asking))

    def ask(self, subject: str, offer: Offer, on_answer: Callable[[OfferReply | None], None]) -> None:
        """Send an offer, and have the answer told when it is back."""
        self.clock.after(_MESSAGE_S, partial(self._deliver, subject, offer, on_answer))

    def _deliver(self, subject: str, offer: Offer, on_answer: Callable[[OfferReply | None], None]) -> None:
        on_answer(self.fleet.answer(subject, offer))

    # ---- judging ----------------------------------------------------------------------------------------

    def judge(self) -> None:
        """As a controller judges its workers at each beat's interval."""
        now = self.clock.now
        self.worker_index.take_lost(now=now)
        for worker_id in self.worker_index.dead():
            for record, _revision in self.worker_index.lost_tasks(worker_id, now=now, reason="not heard"):
                self.write(record)
            if worker_id in self.worker_index.workers:
                self.worker_index.on_left(worker_id)
        self.worker_index.note_misfits(self.dispatch.scheduler.needs(), now=now)
