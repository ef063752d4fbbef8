"""The order in which what waits is offered: by priority and submission, then by what its namespace has, and by its quota.

Within a namespace the order is strict. Of several namespaces whose tasks wait, that one goes first which has least of the cluster for its
weight (see shares.py), among tasks of equal priority; one above the most that its namespace may have counts as that here. So
a task is overtaken by what starts after its own turn: tasks of a lower priority, or of a namespace that has more.

A namespace's quota keeps its own tasks waiting, and no one else's. A task, or gang, that others of its namespace have overtaken
for too long as they need less of the quota has the room in it to itself: whatever is behind it goes on only with what it leaves.

Beside it: which tasks of a job may be offered when only so many of them may run at once, and which workers are kept free for a task, or
for a gang, that has been overtaken for too long.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fluster_bus.messages import Capacity, JobRecord, Namespace
from fluster_services import capacity
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.shares import NOTHING, Amount, Shares
from fluster_services.controller.state.worker_index import WorkerView

_ORDERS = 1 << 53  # beyond any order of submission


def position_in_line(order: int, priority: int) -> int:
    """Where a task stands: before all of a lower priority, and in the order of submission within its own."""
    return order - priority * _ORDERS


def priority_of(order: int) -> int:
    """The priority with which a position was made."""
    return -(order // _ORDERS)


class Position(NamedTuple):
    """A task in the order in which tasks are offered, as `position_in_line` gives it."""

    order: int
    task: int
    job: JobKey


def position_of(job: JobRecord) -> Position:
    """Where the job's first task stands."""
    return Position(position_in_line(job.order, job.request.priority), 0, JobKey(job.namespace, job.job_id))


@dataclass(frozen=True)
class Starving:
    """A task that has been overtaken for too long, or a gang of `count` tasks, by the position of its first."""

    position: Position
    need: Capacity  # of each task
    count: int = 1


class _Kept(NamedTuple):
    """What is left of a namespace's quota for one that others of it have overtaken for too long."""

    position: Position
    amount: Amount


class FairOrder:
    """Orders what waits in several namespaces, and keeps room in quotas for what has been overtaken within its namespace."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.kept: dict[Namespace, _Kept] = {}

    def rank(self, position: Position) -> tuple[int, float, Position]:
        """A sort key, the least first: the priority, the weighted share of the namespace, then the position in the namespace."""
        namespace = position.job.namespace
        return self.band(position), self._shares.weighed(namespace), position

    def band(self, position: Position) -> int:
        """Lower for a higher priority, as far as it counts beside other namespaces."""
        return -min(priority_of(position.order), self._shares.max_priority(position.job.namespace))

    def goes_before(self, one: Position, other: Position) -> bool:
        """True when it is before the other whatever their namespaces have."""
        if one.job.namespace == other.job.namespace:
            return one < other
        return self.band(one) < self.band(other)

    def was_before(self, one: Position, placed: Position) -> bool:
        """True when `one` ranked before what was placed, which counts for its namespace already."""
        if one.job.namespace == placed.job.namespace:
            return one < placed
        return self.rank(one)[:2] < self.rank(placed)[:2]

    # ---- quotas -----------------------------------------------------------------------------------------

    def has_quota(self, position: Position, need: Capacity, count: int = 1) -> bool:
        """True when the namespace's quota has room for what stands there, beside what others are to have first."""
        namespace = position.job.namespace
        kept = self.kept.get(namespace)
        beside = kept.amount if kept is not None and position > kept.position else NOTHING
        return self._shares.fits(namespace, need, count, beside=beside)

    def kept_quota(self, namespace: Namespace) -> Position | None:
        """The position for which room in the namespace's quota is kept."""
        kept = self.kept.get(namespace)
        return kept.position if kept is not None else None

    def keep_quota(self, starving: Starving) -> None:
        """What is behind it in its namespace leaves it room in the quota from now on, as long as it waits."""
        namespace = starving.position.job.namespace
        kept = self.kept.get(namespace)
        if namespace in self._shares.bounded and (kept is None or starving.position < kept.position):
            self.kept[namespace] = _Kept(starving.position, Amount.of(starving.need, starving.count))

    def on_quota(self, namespace: Namespace) -> None:
        """The namespace has another quota: what was kept of the one before is not."""
        self.kept.pop(namespace, None)

    def forget_kept(self, job: JobKey, task: int) -> None:
        """What stands there needs no room in the quota any longer."""
        kept = self.kept.get(job.namespace)
        if kept is not None and (kept.position.job, kept.position.task) == (job, task):
            del self.kept[job.namespace]
            self._shares.on_freed()


@dataclass
class _Job:
    limit: int
    inside: set[int] = field(default_factory=set)  # offered, or held by a worker
    outside: set[int] = field(default_factory=set)
    line: list[int] = field(default_factory=list)  # heap of those outside; those that are gone stay until they come up


class TaskSlots:
    """The tasks of each job that have one of its slots, and those that wait for one, the lowest number first."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, _Job] = {}

    def enter(self, key: JobKey, task: int, limit: int, held: Iterable[int]) -> bool:
        """True when a task that waits may be offered now; else it is given out later by `leave`.

        `held` are the tasks that workers hold, asked once for each job.
        """
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(limit, set(held))
        if task in job.inside:
            return True
        if len(job.inside) < job.limit:
            job.inside.add(task)
            job.outside.discard(task)
            return True
        if task not in job.outside:
            job.outside.add(task)
            heapq.heappush(job.line, task)
        return False

    def leave(self, key: JobKey, task: int) -> int | None:
        """A task neither waits nor runs: its slot is given to the task that is returned, if one waits."""
        job = self._jobs.get(key)
        if job is None:
            return None
        job.outside.discard(task)
        job.inside.discard(task)
        next_task = None
        while job.line and next_task is None and len(job.inside) < job.limit:
            first = heapq.heappop(job.line)
            if first in job.outside:
                next_task = first
        if next_task is not None:
            job.outside.discard(next_task)
            job.inside.add(next_task)
        elif not job.inside:
            del self._jobs[key]
        return next_task

    def waits(self, key: JobKey, task: int) -> bool:
        """True for a task that waits for a slot."""
        job = self._jobs.get(key)
        return job is not None and task in job.outside

    def __len__(self) -> int:
        return len(self._jobs)


def reserved_workers(need: Capacity, count: int, workers: Iterable[WorkerView]) -> tuple[str, ...]:
    """The workers that could hold `count` such tasks at once, those that lack least of what these need, by name.

    Empty when all together could not.
    """
    # {what the worker lacks for one task more, its name}, with what it would then have in all, and free
    offered = [
        (_lacking(need, worker.free, worker.total), worker.name, worker, worker.total, worker.free)
        for worker in workers
        if capacity.fits(need, worker.total)
    ]
    heapq.heapify(offered)
    chosen: set[str] = set()
    for _ in range(count):
        if not offered:
            return ()
        _, name, worker, total, free = heapq.heappop(offered)
        chosen.add(name)
        total, free = capacity.minus(total, need), capacity.minus(free, need)
        if capacity.fits(need, total):
            heapq.heappush(offered, (_lacking(need, free, worker.total), name, worker, total, free))
    return tuple(sorted(chosen))


def _devices(need: Capacity, has: Capacity) -> int:
    """How many devices are there that the task could be given together."""
    known = capacity.models(has)
    return known[need.variant] if need.variant in known else capacity.most_of_a_model(has)


def _lacking(need: Capacity, free: Capacity, total: Capacity) -> float:
    """The part of the worker that has to become free, of whatever is scarcest."""
    left, of = dict(free.resources), dict(total.resources)
    kinds = (
        (need.cpu, free.cpu, total.cpu),
        (need.memory, free.memory, total.memory),
        (need.disk, free.disk, total.disk),
        (need.devices, _devices(need, free), _devices(need, total)),
        (need.tasks, free.tasks or 0, total.tasks),
        *((count, left.get(name, 0), of[name]) for name, count in need.resources),
    )
    return max(((wanted - left) / of for wanted, left, of in kinds if of and wanted), default=0.0)
