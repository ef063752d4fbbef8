"""Jobs and workers by the beginning of their ids, where it fits one only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from fluster.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from fluster.cluster import Cluster
    from fluster_bus.messages import JobId, WorkerId

T = TypeVar("T")

NEWEST = "last"  # stands for the job that was submitted last

_SHORTENED = 10_000  # jobs among which a shortened id is looked up


def find_job(cluster: Cluster, text: str) -> JobId:
    """The job with that id, else the newest for `last`, else the only one whose id begins so, unfinished ones first.

    Raises JobNotFoundError, and CommandError when several ids begin so.
    """
    from fluster.errors import JobNotFoundError
    from fluster_bus.messages import JobId

    try:
        return cluster.poll(JobId(text)).job_id
    except JobNotFoundError as error:
        found = _newest(cluster) if text == NEWEST else _beginning(cluster, text)
        if found is None:
            if text == NEWEST:
                raise JobNotFoundError(f"namespace {cluster.namespace!r} has no job yet") from error
            raise
    return found


def _newest(cluster: Cluster) -> JobId | None:
    return next((job.job_id for job in cluster.list_jobs(limit=1)), None)


def _beginning(cluster: Cluster, text: str) -> JobId | None:
    from fluster_bus.messages import JobId, JobStatus

    unfinished = [state for state in JobStatus if not state.finished()]
    for states in (unfinished, []):
        matching = [job.job_id for job in cluster.list_jobs(limit=_SHORTENED, states=states)]
        matching = [job_id for job_id in matching if job_id.startswith(text)]
        if matching:
            return JobId(_only("jobs", text, matching))
    return None


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
