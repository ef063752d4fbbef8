"""Which workers are kept free for a task, or for a gang, that has been overtaken for too long."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from fluster_bus.messages import Capacity
from fluster_services import capacity
from fluster_services.controller.state.worker_index import WorkerView


def choose(need: Capacity, count: int, workers: Iterable[WorkerView]) -> tuple[str, ...]:
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
