"""Which worker is kept free for a task that has been overtaken for too long."""

from __future__ import annotations

from collections.abc import Sequence

from fluster_bus.messages import Capacity
from fluster_services import capacity
from fluster_services.controller.explain import WorkerView


def choose(need: Capacity, workers: Sequence[WorkerView]) -> str | None:
    """The worker that could hold the task and lacks least of what it needs; None when no worker could."""
    fitting = [worker for worker in workers if capacity.fits(need, worker.total)]
    return min(fitting, key=lambda worker: (_lacking(need, worker), worker.name)).name if fitting else None


def _lacking(need: Capacity, worker: WorkerView) -> float:
    """The part of the worker that has to become free, of whatever is scarcest."""
    kinds = (
        (need.cpu, worker.free.cpu, worker.total.cpu),
        (need.memory, worker.free.memory, worker.total.memory),
        (need.disk, worker.free.disk, worker.total.disk),
        (need.devices, worker.free.devices, worker.total.devices),
    )
    return max((wanted - free) / total for wanted, free, total in kinds if total and wanted)
