"""Jobs that the tests launch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fluster.cluster import Cluster
from fluster_bus.messages import Entrypoint, EnvironmentConfig, JobId, JobRequest, JobStatus, LogLine
from tests.waiting import wait_until

READY = "ready"


def call(function: Callable[..., Any], *args: Any, name: str = "call", **fields: Any) -> JobRequest:
    """A job that calls `function`; local functions travel with it, so it need not import the tests."""
    return JobRequest(name=name, entrypoint=Entrypoint(callable=function, args=args), **fields)


def command(*words: str, name: str = "command", env: Mapping[str, str] | None = None, **fields: Any) -> JobRequest:
    """A job that runs a command."""
    environment = EnvironmentConfig(env_vars=env or {})
    return JobRequest(name=name, entrypoint=Entrypoint(command=words), environment=environment, **fields)


def sleeper(**fields: Any) -> JobRequest:
    """A job that says READY and then does nothing until it is stopped."""
    return command("sh", "-c", f"echo {READY}; exec sleep 600", **{"name": "sleeper", **fields})


def wait_ready(cluster: Cluster, job_id: JobId, lines: int = 1) -> None:
    """Return when the job has written `lines` lines to stdout and is known to run, which is reported a moment later.

    On stderr a line may come before the job has begun: what runs in a container reads that its folder is empty.
    """
    with followed(cluster, job_id) as following:
        written = (line for line in following if line.stream == "stdout")
        for _ in range(lines):
            next(written)
    wait_until(lambda: cluster.poll(job_id).status is not JobStatus.BUILDING)


@contextmanager
def followed(cluster: Cluster, job_id: JobId) -> Iterator[Iterator[LogLine]]:
    """The job's log as it comes."""
    lines = cluster.logs(job_id, follow=True)
    try:
        yield lines
    finally:
        lines.close()  # type: ignore[attr-defined]  # it is a generator


def texts(cluster: Cluster, job_id: JobId, stream: str = "stdout") -> list[str]:
    """What the job wrote to one of its streams."""
    return [line.text for line in cluster.logs(job_id) if line.stream == stream]
