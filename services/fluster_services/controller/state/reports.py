"""What workers and backends of VMs report now and then. It is kept in memory only: they report it again, and the record of a task's end
has the last of its progress.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import FaultLog, InvalidMessageError
from fluster_bus.messages import JobStatus, Namespace, Progress, ProgressReport, TaskRecord, VMTrouble, WorkerId
from fluster_services import lifecycle
from fluster_services.controller.state.job_index import JobIndex, JobKey

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus, Subscription
    from fluster_bus.core.delivery import Delivery

log = logging.getLogger(__name__)

_MAX_VMS = 10_000


class ProgressBoard:
    """The newest word of each task that a worker holds."""

    def __init__(self, bus: Bus, job_index: JobIndex) -> None:
        self._bus = bus
        self._job_index = job_index
        self._faults = FaultLog(log)
        self._told: dict[JobKey, dict[int, ProgressReport]] = {}
        self._heard: dict[Namespace, Subscription] = {}

    async def listen(self, namespace: Namespace) -> None:
        """Hear what workers report about a namespace's tasks from now on."""
        heard = await self._bus.subscribe(subjects.watch_progress(namespace), self._on_report)
        self._heard[namespace] = heard

    def forget(self, namespace: Namespace) -> None:
        """The namespace is gone."""
        heard = self._heard.pop(namespace, None)
        if heard is not None:
            self._bus.spawn(heard.unsubscribe(), f"end of the progress of namespace {namespace}")
        for key in [key for key in self._told if key.namespace == namespace]:
            del self._told[key]

    def _on_report(self, delivery: Delivery) -> None:
        with self._faults.contained("a word on %s is passed over", delivery.subject):
            report = ProgressReport.from_json(delivery.data)
            if subjects.watch_progress(report.namespace, report.job_id, str(report.task)) != delivery.subject:
                raise InvalidMessageError(f"it is of another task, {report.job_id}.{report.task} of {report.namespace}")
            self._take(report)

    def _take(self, report: ProgressReport) -> None:
        key = JobKey(report.namespace, report.job_id)
        entry = self._job_index.get(key)
        row = entry.tasks.get(report.task) if entry is not None else None
        # Those alone that a record says are held, so that there are never more than what runs.
        if row is not None and _is_about(report, row.value):
            self._told.setdefault(key, {})[report.task] = report

    def on_task_changed(self, key: JobKey, task: TaskRecord) -> None:
        """A task's record changed: what an earlier attempt said no longer counts."""
        told = self._told.get(key)
        known = told.get(task.task) if told is not None else None
        if told is None or known is None or _is_about(known, task):
            return
        del told[task.task]
        if not told:
            del self._told[key]

    def of(self, key: JobKey) -> dict[int, Progress]:
        """{task: how far it is}, for those of the job that have said so."""
        return {task: report.progress for task, report in self._told.get(key, {}).items()}

    def preparing(self, key: JobKey) -> dict[int, str]:
        """{task: what is being done before it can start}, for those of the job of which that is known."""
        told = self._told.get(key, {})
        return {task: report.progress.message for task, report in told.items() if report.is_preparing}


def _is_about(report: ProgressReport, task: TaskRecord) -> bool:
    """Whether it still tells how the task stands."""
    if task.attempt != report.attempt or not lifecycle.is_held(task):
        return False
    return task.state is JobStatus.BUILDING or not report.is_preparing


class VMTroubles:
    """What was said last about each. Nothing is kept of it: it is said again for as long as it is so."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._faults = FaultLog(log)
        self._known: dict[WorkerId, tuple[str, float]] = {}  # {VM: (why it is not there, until when that counts)}

    async def listen(self, bus: Bus) -> None:
        """Hear what is said from now on."""
        await bus.subscribe(subjects.vm_trouble(), self._on_message)

    def _on_message(self, delivery: Delivery) -> None:
        with self._faults.contained("what is said of a VM cannot be used"):
            self.hear(VMTrouble.from_json(delivery.data))

    def hear(self, told: VMTrouble) -> None:
        """A VM is in trouble, or no longer."""
        self._known.pop(told.vm_id, None)
        if told.trouble and len(self._known) < _MAX_VMS:
            self._known[told.vm_id] = (told.trouble, self._now() + told.counts_for_s)

    def told(self, working: Collection[WorkerId]) -> list[tuple[WorkerId, str]]:
        """Those that are in trouble by name, and why, but for the ones whose workers are at work."""
        now = self._now()
        self._known = {vm_id: (why, until) for vm_id, (why, until) in self._known.items() if until > now}
        return [(vm_id, why) for vm_id, (why, _until) in sorted(self._known.items()) if vm_id not in working]
