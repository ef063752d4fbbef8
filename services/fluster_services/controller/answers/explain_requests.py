"""Answers why a job does not run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fluster_bus.messages import ExplainReply, ExplainRequest, JobRecord, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_services.controller.answers.job_requests import known_job
from fluster_services.controller.answers.requests import present_pace
from fluster_services.controller.scheduling.explain import explain
from fluster_services.controller.scheduling.order import position_of
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.reconcile import waits_for
from fluster_services.job_lifecycle import job_status

if TYPE_CHECKING:
    from fluster_services.controller.scheduling.dispatch import Dispatch
    from fluster_services.controller.scheduling.gangs import Gangs
    from fluster_services.controller.scheduling.wait_times import WaitTimes
    from fluster_services.controller.state.job_index import JobIndex
    from fluster_services.controller.state.reports import ProgressBoard, VMTroubles
    from fluster_services.controller.state.worker_index import WorkerIndex


class ExplainRequests:
    """Gathers what is known about a job that waits, and has it put into a sentence."""

    def __init__(
        self,
        *,
        job_index: JobIndex,
        worker_index: WorkerIndex,
        wait_times: WaitTimes,
        dispatch: Dispatch,
        gangs: Gangs,
        progress: ProgressBoard,
        vm_troubles: VMTroubles,
    ) -> None:
        self._job_index = job_index
        self._worker_index = worker_index
        self._wait_times = wait_times
        self._dispatch = dispatch
        self._gangs = gangs
        self._progress = progress
        self._vm_troubles = vm_troubles

    async def explain(self, namespace: Namespace, request: ExplainRequest) -> ExplainReply:
        job, tasks = known_job(self._job_index, JobKey(namespace, request.job_id))
        ahead = await self._ahead(job)
        reason = explain(
            job,
            tasks,
            self._worker_index.views(),
            ahead=ahead,
            now=time.time(),
            waits_for=self._waits_for(job),
            reservation=self._reservation(job),
            pauses_s=self._pauses_s(job, tasks),
            children=self._job_index.unfinished_children(JobKey(namespace, request.job_id), tasks),
            troubles=self._troubles(),
            withheld=self._worker_index.withheld(),
            unfit=self._dispatch.unfit(JobKey(namespace, request.job_id)),
            preparing=self._progress.preparing(JobKey(namespace, request.job_id)),
            short_of_quota=self._dispatch.why_short(job),
            goes_first=self._dispatch.who_goes_first(job),
            registered=self._worker_index.workers.keys(),
        )
        return ExplainReply(job_id=request.job_id, reason=reason)

    def _troubles(self) -> list[tuple[WorkerId, str]]:
        worker_index = self._worker_index
        troubles = dict(worker_index.troubles())
        working = {worker_id for worker_id in worker_index.workers if worker_index.takes_work(worker_id)}
        return sorted((dict(self._vm_troubles.told(working)) | troubles).items())

    async def _ahead(self, job: JobRecord) -> int:
        """How many tasks are before its own in the line, those of gangs among them.

        Of other namespaces only those of a higher priority are: with all others it takes turns.
        """
        pace, dispatch = present_pace(), self._dispatch
        position = position_of(job)
        ahead = sum(gang.count for gang in self._gangs.waiting() if dispatch.goes_before(gang.position, position))
        for key, _task in dispatch.scheduler.waiting():
            await pace.step()
            entry = self._job_index.get(key)
            ahead += (
                entry is not None
                and entry.job is not None
                and dispatch.goes_before(position_of(entry.job.value), position)
            )
        return ahead

    def _pauses_s(self, job: JobRecord, tasks: Sequence[TaskRecord]) -> dict[int, float]:
        key, now = JobKey(job.namespace, job.job_id), time.monotonic()
        pauses = {task.task: self._wait_times.pause_s(key, task, now=now) for task in tasks}
        return {task: pause_s for task, pause_s in pauses.items() if pause_s}

    def _reservation(self, job: JobRecord) -> tuple[str, tuple[str, ...]] | None:
        reservation = self._dispatch.reservation
        if reservation is None:
            return None
        key, workers = reservation
        holder = self._job_index.get(key)
        if key.namespace != job.namespace or holder is None or holder.job is None:
            return None  # a tenant is not told about another's jobs
        is_concerned = key.job_id == job.job_id or position_of(holder.job.value) < position_of(job)
        return (key.job_id, workers) if is_concerned else None

    def _waits_for(self, job: JobRecord) -> list[tuple[str, JobStatus]]:
        """The jobs that it waits for, and how they stand."""
        job_index = self._job_index
        found: list[tuple[str, JobStatus]] = []
        for each in waits_for(job, job_index.dependencies(JobKey(job.namespace, job.job_id))):
            entry = job_index.get(JobKey(each.namespace, each.job_id))
            tasks = entry.task_records() if entry is not None else []
            found.append((each.job_id, job_status(each, tasks)))
        return found
