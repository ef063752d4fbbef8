"""What it costs to take in, dispatch and end one job while so many others wait."""

from __future__ import annotations

import statistics
import time

from benchmarks.simulator import workload
from benchmarks.simulator.workload import Workload
from fluster_bus.messages import JobId, JobRecord, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_bus.storage.tables import Row
from fluster_services import capacity, job_lifecycle, lifecycle
from fluster_services.controller.scheduling.order import Position, position_in_line
from fluster_services.controller.scheduling.scheduler import Scheduler
from fluster_services.controller.state.job_index import JobIndex, JobKey, record_key
from fluster_services.controller.state.reconcile import next_records

FEW, MANY = 100, 100_000
_MEASURED, _ROUNDS = 1_000, 5
_MACHINE = workload.machine(0)
_NAMESPACE, _WORKER = Namespace("default"), WorkerId("worker")


class Backlog:
    """A queue that stays as long as it is: for each job that is dispatched and ends, another one is submitted."""

    def __init__(self, queued: int) -> None:
        self._requests = [
            request for _, request in Workload(workers=1, jobs=1, load=1, tasks_up_to=1).shares if not request.gang
        ]
        self._job_index, self.scheduler = JobIndex(), Scheduler()
        self._submitted = self._revision = 0
        for _ in range(queued):
            self._submit()

    def _apply(self, record: JobRecord | TaskRecord) -> JobKey | None:
        self._revision += 1
        return self._job_index.apply(Row(record_key(record), record, self._revision))

    def _submit(self) -> None:
        self._submitted += 1
        request = self._requests[self._submitted % len(self._requests)]
        job = job_lifecycle.new_job(
            _NAMESPACE, JobId(f"job-{self._submitted}"), request, order=self._submitted, now=0.0
        )
        self._apply(job)
        for task in job_lifecycle.new_tasks(job):
            key = self._apply(task)
            assert key is not None
            position = Position(position_in_line(task.order, task.priority), task.task, key)
            self.scheduler.add(position, capacity.needed(task.resources))

    def pass_one_through(self) -> None:
        """Dispatch the first one, let it end, and submit another."""
        ((position, need),) = self.scheduler.take(1)
        entry = self._job_index.get(position.job)
        assert entry is not None
        assert capacity.fits(need, _MACHINE)
        self.scheduler.on_accepted(need, position)
        claimed = lifecycle.claim(entry.tasks[position.task].value, attempt=1, worker_id=_WORKER, now=1.0)
        assert claimed is not None
        self._apply(claimed)
        self.scheduler.remove(position.job, position.task)
        ended = lifecycle.end(
            claimed, attempt=1, worker_id=_WORKER, now=2.0, state=JobStatus.SUCCEEDED, reason="exit code 0"
        )
        assert ended is not None
        self._apply(ended)
        for record in next_records(entry, now=3.0, parent=None):
            self._apply(record)
        self._submit()


def costs_us() -> tuple[float, float]:
    """CPU time for each job with few and with many queued: the medians of rounds that alternate, so that both meet the same noise."""
    backlogs = [Backlog(FEW), Backlog(MANY)]
    rounds: list[list[float]] = [[], []]
    for _ in range(_ROUNDS):
        for backlog, taken in zip(backlogs, rounds, strict=True):
            started = time.process_time()
            for _ in range(_MEASURED):
                backlog.pass_one_through()
            taken.append((time.process_time() - started) / _MEASURED * 1e6)
    few, many = map(statistics.median, rounds)
    return few, many
