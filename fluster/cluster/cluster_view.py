"""What notebooks show of a cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from fluster_bus.core.errors import FlusterError
from fluster_bus.messages.notebook import table, view

if TYPE_CHECKING:
    from fluster_bus.messages import JobInfo, WorkerStatus

_PATIENCE_S = 2.0  # a notebook does not wait long for a cluster that does not answer
_JOBS = 10
_GIB = 1 << 30


class Viewed(Protocol):
    """A cluster as the view needs it."""

    @property
    def server(self) -> str: ...

    @property
    def namespace(self) -> str: ...

    async def list_workers(self) -> list[WorkerStatus]: ...

    async def list_jobs(self, *, limit: int) -> list[JobInfo]: ...


def still_view(kind: str, cluster: Viewed, **facts: object) -> str:
    """HTML of where a cluster is, without asking it."""
    return view(kind, {"server": cluster.server, "namespace": cluster.namespace, **facts})


async def live_view(kind: str, cluster: Viewed) -> str:
    """The same with its workers, and the newest jobs of its namespace, if it answers soon."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            workers, jobs = await asyncio.gather(cluster.list_workers(), cluster.list_jobs(limit=_JOBS))
    except (FlusterError, TimeoutError) as error:
        return still_view(kind, cluster, state=f"does not answer: {str(error) or f'nothing came in {_PATIENCE_S:g} s'}")
    return view(
        kind,
        {"server": cluster.server, "namespace": cluster.namespace},
        table(("worker", "host", "state", "tasks", "free CPUs", "free memory"), [*map(_worker_row, workers)]),
        table(("newest jobs", "name", "status", "tasks", "error"), [*map(_job_row, jobs)]),
    )


def _worker_row(worker: WorkerStatus) -> tuple[object, ...]:
    state = "ready"
    if not worker.alive:
        state = "lost"
    elif worker.info.draining or worker.info.trouble:
        state = "draining" if worker.info.draining else f"unwell: {worker.info.trouble}"
    free, total = worker.free, worker.info.total
    return (
        worker.info.worker_id,
        worker.info.host,
        state,
        worker.running,
        f"{free.cpu:g} of {total.cpu:g}",
        f"{free.memory / _GIB:.1f} of {total.memory / _GIB:.1f} GiB",
    )


def _job_row(job: JobInfo) -> tuple[object, ...]:
    return job.job_id, job.name, job.status, len(job.tasks), job.error_message
