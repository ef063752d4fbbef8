"""Gathers gangs, one at a time, by the rules of fluster_services.gangs.

The way in which it is done is not the controller's own (controller/scheduling/gangs.py is one with its messages), but what it does: plan
for the first in the order that fits, offer each task by name, and leave the rest to the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.messages import Capacity, JobRecord, Offer, OfferReply, TaskRecord, WorkerId
from fluster_bus.storage.tables import Row
from fluster_services import capacity, gangs
from fluster_services.controller.scheduling.order import Position, position_in_line
from fluster_services.controller.state.job_index import JobKey

if TYPE_CHECKING:
    from benchmarks.simulator.simulation import Simulation

_PLANNED_EVERY_S = 1.0  # a controller plans more often, as room becomes free
_MOMENT_S = 0.001


@dataclass(frozen=True)
class _Waiting:
    position: Position
    need: Capacity
    count: int


@dataclass
class _Gathered:
    key: JobKey
    unanswered: int
    held: list[bool] = field(default_factory=list)


class Gathering:
    """The gangs that wait."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._waiting: dict[JobKey, _Waiting] = {}
        self._gathered: _Gathered | None = None
        self._is_planning = False

    def __len__(self) -> int:
        return len(self._waiting)

    def is_gathering(self, key: JobKey) -> bool:
        return self._gathered is not None and self._gathered.key == key

    def on_job_changed(self, key: JobKey) -> None:
        """Records of a gang have changed."""
        entry, dispatch = self._simulation.job_index.get(key), self._simulation.dispatch
        if entry is None or entry.job is None:
            return
        job, tasks = entry.job.value, entry.task_records()
        is_over = job.state.finished() or job.kill_requested is not None
        if not gangs.is_waiting(job, tasks):
            self._waiting.pop(key, None)
        elif key not in self._waiting:
            self._wait(key, job, tasks)
        if is_over or gangs.has_started(job, tasks):
            dispatch.remove_gang(key)  # one that is only held keeps its position

    def _wait(self, key: JobKey, job: JobRecord, tasks: Sequence[TaskRecord]) -> None:
        waits, now = self._simulation.wait_times, self._simulation.clock.now
        pause_s = max(waits.pause_s(key, task, now=now) for task in tasks)
        if pause_s:
            # Not sooner than a moment: the rest of a pause may be too small for the time to change by it.
            self._simulation.clock.after(max(pause_s, _MOMENT_S), partial(self.on_job_changed, key))
            return
        position = Position(position_in_line(job.order, job.request.priority), 0, key)
        gang = self._waiting[key] = _Waiting(
            position, capacity.needed(job.request.resources, job.namespace), job.request.replicas
        )
        self._simulation.dispatch.add_gang(position, gang.need, gang.count)
        self.on_room()

    def on_room(self) -> None:
        """Some worker has room again."""
        if self._waiting and not self._is_planning:
            self._is_planning = True
            self._simulation.clock.after(_PLANNED_EVERY_S, self._plan_first)

    def _plan_first(self) -> None:
        self._is_planning = False
        if self._gathered is not None:
            return
        refused: dict[tuple[Capacity, tuple[WorkerId, ...]], int] = {}  # {need beside those: so many could not be had}
        for key, gang in sorted(self._waiting.items(), key=lambda each: each[1].position):
            spared = self._simulation.dispatch.spared(gang.position)
            if gang.count >= refused.get((gang.need, spared), gang.count + 1):
                continue
            room = self._simulation.worker_index.with_room(gang.need)
            workers = gangs.assign(gang.need, gang.count, (each for each in room if each[0] not in spared))
            if len(workers) == gang.count:
                self._gather(key, workers)
                return
            refused[gang.need, spared] = gang.count

    def _gather(self, key: JobKey, workers: list[WorkerId]) -> None:
        entry = self._simulation.job_index.get(key)
        assert entry is not None
        assert entry.job is not None
        epoch = max(entry.job.value.epoch, *(row.value.epoch for row in entry.tasks.values())) + 1
        self._gathered = _Gathered(key, len(workers))
        for task, worker_id in enumerate(workers):
            offer = _offer(entry.tasks[task], epoch)
            subject = subjects.worker_verb(worker_id, "offer")
            self._simulation.ask(subject, offer, partial(self._on_answer, self._gathered))

    def _on_answer(self, gathered: _Gathered, answer: OfferReply | None) -> None:
        gathered.unanswered -= 1
        gathered.held.append(answer is not None and answer.accepted)
        if not gathered.unanswered:
            # From here on the records decide: go when all are held, and else off.
            self._gathered = None
            if all(gathered.held):
                self._simulation.dispatch.on_gathered(gathered.key)
            self.on_job_changed(gathered.key)
            self._simulation.mark(gathered.key)
            self.on_room()


def _offer(row: Row[TaskRecord], epoch: int) -> Offer:
    task = row.value
    return Offer(
        namespace=task.namespace,
        job_id=task.job_id,
        task=task.task,
        attempt=task.attempt,
        revision=row.revision,
        epoch=epoch,
    )
