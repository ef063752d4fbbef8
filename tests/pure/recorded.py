"""Jobs and workers as the controller knows them, for tests of what it decides."""

from __future__ import annotations

from typing import Any

from fluster_bus.messages import (
    Capacity,
    Entrypoint,
    JobId,
    JobRecord,
    JobRequest,
    Namespace,
    ResourceConfig,
    WorkerId,
    WorkerInfo,
)
from fluster_services import job_lifecycle


def recorded_job(
    name: str = "job", *, cpu: float = 1, memory: int = 0, order: int = 1, namespace: str = "default", **fields: Any
) -> JobRecord:
    """The record of a job of that name and id; `fields` are of its request."""
    resources = ResourceConfig.with_cpu(cpu, memory=memory)
    request = JobRequest(name=name, entrypoint=Entrypoint(command=("true",)), resources=resources, **fields)
    return job_lifecycle.new_job(Namespace(namespace), JobId(name), request, order=order, now=0.0)


def registered_worker(worker_id: WorkerId, total: Capacity, **fields: Any) -> WorkerInfo:
    """What a worker of that capacity reports about itself."""
    told = WorkerInfo(worker_id=worker_id, host="", pid=1, total=total, version="", python="", started_at=0.0)
    return told.model_copy(update=fields)
