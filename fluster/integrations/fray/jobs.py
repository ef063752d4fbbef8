"""Jobs that fray launched, and the client that this process, or this thread, works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, overload

from fray.client import JobFailed
from fray.current_client import (
    _current_client_var,  # its public reader makes a LocalClient where there is none
    set_current_client,
)
from fray.types import JobStatus as FrayJobStatus

from fluster.cluster import current_cluster
from fluster.errors import JobFailedError
from fluster_bus.messages import EnvironmentConfig, JobId, JobStatus

if TYPE_CHECKING:
    from fluster.integrations.fray.client import FlusterClient

_STATUS = {
    JobStatus.PENDING: FrayJobStatus.PENDING,
    JobStatus.BUILDING: FrayJobStatus.PENDING,
    JobStatus.RUNNING: FrayJobStatus.RUNNING,
    JobStatus.SUCCEEDED: FrayJobStatus.SUCCEEDED,
    JobStatus.KILLED: FrayJobStatus.STOPPED,
}  # the other ends are failures


@overload
def client_here(*, only_if_set: Literal[True]) -> FlusterClient | None: ...
@overload
def client_here() -> FlusterClient: ...
def client_here(*, only_if_set: bool = False) -> FlusterClient | None:
    """The client that is set for fray where it is Fluster's; else one of the process's own cluster, unless it has to be
    set.
    """
    from fluster.integrations.fray.client import FlusterClient

    found = _current_client_var.get()
    if isinstance(found, FlusterClient):
        return found
    return None if only_if_set else FlusterClient()


def run(
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    environment: EnvironmentConfig,
) -> None:
    """What a job's task runs. Fray is not asked for what it returns."""
    from fluster.integrations.fray.client import FlusterClient

    with set_current_client(FlusterClient(current_cluster(), environment=environment)):
        function(*args, **kwargs)


class FlusterJobHandle:
    """A job. It can be pickled; in another process it works over that one's cluster."""

    def __init__(self, job_id: JobId, client: FlusterClient | None = None) -> None:
        self._job_id = job_id
        self._client = client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._job_id}>"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _job_handle, (self._job_id,)

    @property
    def job_id(self) -> str:
        return self._job_id

    def status(self) -> FrayJobStatus:
        """How it stands now. Raises JobNotFoundError."""
        return _STATUS.get(self._here.cluster.poll(self._job_id).status, FrayJobStatus.FAILED)

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> FrayJobStatus:
        """How it ended.

        Raises what its callable raised, or JobFailed when it ended badly in another way, and TimeoutError after
        `timeout` seconds; with `raise_on_failure=False` neither: then it tells how the job stands.
        """
        cluster = self._here.cluster
        try:
            cluster.wait(self._job_id, timeout=timeout)
            if raise_on_failure:
                cluster.result(self._job_id)
        except JobFailedError as error:
            raise JobFailed(self._job_id, self.status()) from error
        except TimeoutError:
            if raise_on_failure:
                raise
        return self.status()

    def logs(self, max_lines: int = 0) -> tuple[str, ...]:
        """The last lines that its tasks wrote, all unless `max_lines` is given."""
        lines = self._here.cluster.logs(self._job_id, tail=max_lines or None)
        return tuple(line.text for line in lines)

    def terminate(self) -> None:
        """Have it stopped, with what it launched; a finished one stays as it is."""
        self._here.cluster.terminate(self._job_id, reason="terminated by its fray client")

    @property
    def _here(self) -> FlusterClient:
        if self._client is None:
            self._client = client_here()
        return self._client


def _job_handle(job_id: JobId) -> FlusterJobHandle:
    return FlusterJobHandle(job_id, client_here(only_if_set=True))
