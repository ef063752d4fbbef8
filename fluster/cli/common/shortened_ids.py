"""Jobs and workers by the beginning of their ids, where it fits one only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from fluster.cli.common.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from fluster.cluster import Cluster
    from fluster_bus.messages import JobId, WorkerId

T = TypeVar("T")

NEWEST = "last"  # stands for the job that was submitted last

_SHORTENED = 10_000  # jobs among which a shortened id is looked up
_LIKENED = 1_000  # the newest, among which one is looked for that is like an id that does not exist


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
            known = [job.job_id for job in cluster.list_jobs(limit=_LIKENED)]
            raise JobNotFoundError(f"{error}{_meant(text, known)}") from error
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


def at_worker(cluster: Cluster, text: str, call: Callable[[WorkerId], T], *, in_full: bool = False) -> T:
    """What `call` returns for the worker of that id, or, unless it is to be written in full, for the only one whose id
    begins so.

    Raises WorkerNotFoundError, and CommandError when several ids begin so.
    """
    from fluster.errors import WorkerNotFoundError
    from fluster_bus.messages import WorkerId

    try:
        return call(WorkerId(text))
    except WorkerNotFoundError as error:
        known = [worker.info.worker_id for worker in cluster.list_workers() if worker.info.worker_id != text]
        matching = [worker_id for worker_id in known if worker_id.startswith(text)]
        if in_full or not matching:
            raise WorkerNotFoundError(f"{error}{_meant(text, known)}") from error
    return call(WorkerId(_only("workers", text, matching)))


def unknown_worker(cluster: Cluster, name: str) -> str | None:
    """What is to be said when no worker of that name is known; None when one is."""
    from fluster_bus.core.names import no_worker_named

    known = [worker.info.worker_id for worker in cluster.list_workers()]
    return None if name in known else no_worker_named(name, known)


def _meant(text: str, known: Sequence[str]) -> str:
    """Which of `known`, the newest first, are like `text` or begin with something like it."""
    from fluster_bus.core.names import did_you_mean, near_names

    by_beginning = {each[: len(text)]: each for each in reversed(known)}
    return did_you_mean(by_beginning[beginning] for beginning in near_names(text, by_beginning))


def _only(kind: str, text: str, matching: Sequence[str]) -> str:
    if len(matching) > 1:
        shown = ", ".join(matching[:5]) + (" …" if len(matching) > 5 else "")
        raise CommandError(f"{len(matching)} {kind} begin with {text!r}: {shown}; write more of it", ExitCode.NOT_FOUND)
    return matching[0]
