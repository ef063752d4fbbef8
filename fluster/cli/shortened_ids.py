"""Jobs and workers by the beginning of their ids, where it fits one only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from fluster.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from fluster.cluster import Cluster
    from fluster_bus.messages import JobId, WorkerId

T = TypeVar("T")

_SHORTENED = 10_000  # jobs among which a shortened id is looked up


def find_job(cluster: Cluster, text: str) -> JobId:
    """The job with that id, or the only one whose id begins so. Raises JobNotFoundError."""
    from fluster.errors import JobNotFoundError
    from fluster_bus.messages import JobId

    try:
        return cluster.poll(JobId(text)).job_id
    except JobNotFoundError:
        matching = [job.job_id for job in cluster.list_jobs(limit=_SHORTENED) if job.job_id.startswith(text)]
        if not matching:
            raise
    return JobId(_only("jobs", text, matching))


def at_worker(cluster: Cluster, text: str, call: Callable[[WorkerId], T]) -> T:
    """What `call` returns for the worker of that id, or for the only one whose id begins so. Raises WorkerNotFoundError."""
    from fluster.errors import WorkerNotFoundError
    from fluster_bus.messages import WorkerId

    try:
        return call(WorkerId(text))
    except WorkerNotFoundError:
        known = [worker.info.worker_id for worker in cluster.list_workers()]
        matching = [worker_id for worker_id in known if worker_id.startswith(text) and worker_id != text]
        if not matching:
            raise
    return call(WorkerId(_only("workers", text, matching)))


def _only(kind: str, text: str, matching: Sequence[str]) -> str:
    if len(matching) > 1:
        shown = ", ".join(matching[:5]) + (" …" if len(matching) > 5 else "")
        raise CommandError(f"{len(matching)} {kind} begin with {text!r}: {shown}; write more of it", ExitCode.NOT_FOUND)
    return matching[0]
