"""A client of the cluster: jobs, their logs, and the endpoint registry, awaited."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from fluster.cluster.jobs.arguments import (
    check_count,
    check_job_id,
    check_job_ids,
    check_number,
    check_reason,
    check_requests,
    check_states,
    check_timeout,
)
from fluster.cluster.task.task_context import NAMESPACE, TaskIdentity
from fluster.errors import JobFailedError
from fluster_bus.access.address import ADDRESS_VARIABLE, BusAddress
from fluster_bus.core.errors import CredentialsError
from fluster_bus.core.lazy_imports import import_later
from fluster_bus.core.names import JobId, Namespace, check_namespace

if TYPE_CHECKING:
    from fluster.cluster.jobs.batched_logs import Batched
    from fluster.cluster.jobs.job_logs import LogQuery
    from fluster.cluster.jobs.log_chunks import LogChunk
    from fluster.cluster.jobs.submissions import Submissions
    from fluster.cluster.refs import Ref, Refs
    from fluster_bus.connection.bus import Bus
    from fluster_bus.messages import (
        DrainReply,
        Endpoint,
        EndpointId,
        JobInfo,
        JobRequest,
        JobStatus,
        LogLine,
        WorkerHealth,
        WorkerId,
        WorkerStatus,
    )
    from fluster_bus.messages.nodes import NodeStatus
    from fluster_bus.messages.stacks import JobStack

import_later(
    "fluster_bus.connection.bus",
    "fluster_bus.messages.requests",
    "fluster_bus.storage.registry",
    "fluster.cluster.jobs.job_states",
    "fluster.cluster.jobs.job_wait",
    "fluster.cluster.jobs.submissions",
    "fluster.cluster.outages",
    "fluster.cluster.jobs.shown_output",
)

DEFAULT_NAMESPACE = "default"

T = TypeVar("T")


class AsyncCluster:
    """A connection to a cluster, in one namespace; make one with `AsyncCluster.connect`."""

    def __init__(self, bus: Bus, namespace: Namespace, patience: float | None = None) -> None:
        from fluster.cluster.jobs.job_states import JobStates
        from fluster.cluster.jobs.job_wait import JobWaits
        from fluster.cluster.jobs.shown_output import ShownOutput
        from fluster.cluster.outages import Outages
        from fluster_bus.storage.registry import Registry

        self.bus = bus
        self.namespace = namespace
        self.registry: Registry = Registry(bus, namespace)
        self._identity = TaskIdentity.at(bus.address)
        self._states = JobStates(bus, namespace)
        self.outages: Outages = Outages(bus, patience)
        self._waits = JobWaits(bus, namespace, self._states, self.outages)
        self.shown: ShownOutput = ShownOutput(bus, namespace, self._states)  # what its pools and deployments write

    @classmethod
    async def connect(
        cls, address: str | BusAddress | None = None, namespace: str | None = None, *, patience: float | None = None
    ) -> Self:
        """A cluster at `address` (a URL with credentials, or a file of them), else at FLUSTER_CLUSTER_ADDRESS, else the
        one `fluster up` of this user that runs on this machine, which is then said on stderr.

        The namespace is FLUSTER_NAMESPACE or "default" unless given. While the connection is lost, what waits for jobs
        says so in the log and waits on; after `patience` seconds, or when the cluster has ended, it raises
        ConnectionLostError. Raises ConnectError, CredentialsError, also when these credentials are for another
        namespace, and ServiceError when the cluster does not have the namespace.
        """
        from fluster.cluster.jobs.job_states import UNANSWERED
        from fluster_bus.connection.bus import Bus

        if address is None and os.environ.get(ADDRESS_VARIABLE):  # as in every task, which needs no more modules for it
            address = BusAddress.from_environment()
        elif address is None:
            from fluster.cluster.up_clusters import find_address

            address = find_address()
        elif isinstance(address, str):
            address = BusAddress.parse(address)
        chosen = Namespace(check_namespace(namespace or os.environ.get(NAMESPACE) or DEFAULT_NAMESPACE))
        bus = await Bus.connect(address, name=f"client-{os.getpid()}")
        cluster = cls(bus, chosen, check_timeout(patience))
        if cluster._identity is None or cluster._identity.namespace != chosen:  # a job's own is there: it runs in it
            try:
                await cluster.registry.learn_leases()
            except CredentialsError as error:
                await bus.close()
                raise CredentialsError(
                    f"{address.url} cannot be used in namespace {chosen!r} with these credentials: {error}"
                ) from error
            except UNANSWERED:
                pass  # no controller at the moment: the stream takes submits all the same, if the namespace exists
            except BaseException:
                await bus.close()
                raise
        return cluster

    async def close(self) -> None:
        """Leave the cluster; jobs go on."""
        await self.shown.close()
        await self.bus.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server!r}, namespace={self.namespace!r})"

    def _repr_html_(self) -> str:
        """What notebooks show, which cannot await it."""
        from fluster.cluster.cluster_view import still_view

        return still_view(type(self).__name__, self)

    @property
    def server(self) -> str:
        """Where it is; unlike `address` without credentials."""
        return self.bus.address.url

    @property
    def address(self) -> str:
        """The URL with credentials that FLUSTER_CLUSTER_ADDRESS takes."""
        return self.bus.address.to_url()

    # ---- objects ----------------------------------------------------------------------------------------

    async def put(self, value: T) -> Ref[T]:
        """A Ref to a copy of `value`: what many calls or jobs use is sent once to each process, not with each call.

        It is freed when the Ref is gone, or by `ref.free()`. Raises TypeError when it cannot be pickled.
        """
        return await self._refs.put(value)

    async def get(self, ref: Ref[T]) -> T:
        """The object of a Ref. Raises PayloadLostError when it was freed, or the process that put it has ended."""
        return await self._refs.get(ref)

    @functools.cached_property
    def _refs(self) -> Refs:
        from fluster.cluster.refs import Refs

        return Refs(self.bus, self.namespace)

    # ---- jobs -------------------------------------------------------------------------------------------

    async def launch(self, request: JobRequest) -> JobId:
        """The id of the job, once the cluster has recorded it.

        When no controller answers it returns after the stream has stored it: it will be recorded, and until then
        `poll` says PENDING. Raises JobRefusedError, WorkspaceError when its workspace cannot be packed,
        StorageError when something could not be stored, and TypeError for what is not a JobRequest.
        """
        return (await self.launch_many([request]))[0]

    async def launch_many(self, requests: Sequence[JobRequest]) -> list[JobId]:
        """The ids of many jobs, in order; quicker than one `launch` after the other.

        One may run `after` those that are before it here. Raises as `launch` does: JobRefusedError names those that
        were accepted nevertheless, and nothing is sent when two have the same id. A note of other errors names those
        that were stored.
        """
        return await self._submissions.launch(check_requests(requests))

    async def run_on_worker(self, worker_id: WorkerId, request: JobRequest) -> JobId:
        """The id of a job that the worker runs now, before all that waits; it stays on that worker, also when it is
        retried.

        For operators. It returns also when no controller answers: the worker keeps the room for some seconds, then the
        job waits like others. Raises JobRefusedError when the worker cannot run it now, WorkerNotFoundError,
        CredentialsError to those who are not operators, and what `launch` raises.
        """
        return await self._submissions.run_on_worker(worker_id, *check_requests([request]))

    def parent_of(self, request: JobRequest) -> dict[str, object]:
        """What a request says of the task that launches it; nothing outside of a job."""
        return self._submissions.parent_of(request)

    @functools.cached_property
    def _submissions(self) -> Submissions:
        from fluster.cluster.jobs.submissions import Submissions

        return Submissions(self.bus, self.namespace, self._states, self._identity)

    async def poll(self, job_id: JobId, *, details: bool = False) -> JobInfo:
        """How the job stands now; with `details` also what it was asked to run. Raises JobNotFoundError,
        InvalidNameError.
        """
        return (await self._states.get([check_job_id(job_id)], details=details))[0]

    @overload
    async def wait(  # type: ignore[overload-overlap]  # a JobId is a str, thus a sequence of them: the first counts
        self, job: JobId, *, timeout: float | None = None, raise_on_failure: bool = False
    ) -> JobInfo: ...
    @overload
    async def wait(
        self, job: Sequence[JobId], *, timeout: float | None = None, raise_on_failure: bool = False
    ) -> list[JobInfo]: ...
    async def wait(
        self,
        job: JobId | Sequence[JobId],
        *,
        timeout: float | None = None,
        raise_on_failure: bool = False,
    ) -> JobInfo | list[JobInfo]:
        """The job, or the jobs in order, once finished.

        Raises JobTimeoutError (a TimeoutError) after `timeout` seconds, ConnectionLostError as the cluster's `patience`
        has it, JobNotFoundError, InvalidNameError, and with `raise_on_failure` JobFailedError for the first that did
        not succeed.
        """
        from fluster_bus.messages import JobStatus

        infos = await self._waits.wait_all(check_job_ids(job), timeout)
        if raise_on_failure:
            for info in infos:
                if info.status is not JobStatus.SUCCEEDED:
                    raise JobFailedError(info)
        return infos[0] if isinstance(job, str) else infos

    async def wait_first(self, jobs: Sequence[JobId], *, timeout: float | None = None) -> JobInfo:
        """The first of several jobs that has finished; of those that have already, the first in the order given.

        Take it out and call again for the next. Raises ValueError for no jobs, and what `wait` raises.
        """
        return await self._waits.wait_first(check_job_ids(jobs), timeout)

    async def watch(self, job_id: JobId) -> AsyncGenerator[JobInfo]:
        """The job as it stands, and again whenever its state or its progress has changed, until it has finished.

        Changes that follow each other quickly may be given as one. Raises JobNotFoundError, InvalidNameError.
        """
        infos = self._waits.watch(check_job_id(job_id))
        async with aclosing(infos):
            async for info in infos:
                yield info

    async def result(self, job_id: JobId, *, task: int | None = None, timeout: float | None = None) -> Any:
        """What the job's callable returned, once the job has finished; of a job of several tasks a list, by their
        ranks.

        It is unpickled, which runs code of the job's choice in this program: of jobs of this namespace, so of all who
        may submit there. `task` asks for one of them, which may have succeeded though the job did not. Raises what the
        callable raised, with its traceback as a note; JobFailedError when the job ended badly in another way;
        JobResultError when it succeeded and its result was too large, could not be pickled, or is not kept any more;
        JobTimeoutError after `timeout` seconds, JobNotFoundError, InvalidNameError, and ValueError for a task that the
        job does not have.
        """
        from fluster.cluster.jobs.job_results import results_of

        check_number("task", task, 0)
        return await results_of(self.bus, await self.wait(check_job_id(job_id), timeout=timeout), task)

    async def terminate(self, job_id: JobId, *, reason: str = "terminated by request") -> None:
        """Have the job stopped, with what it launched; a finished one stays as it is.

        Raises JobNotFoundError, InvalidNameError, and ValueError and TypeError for what cannot be a reason.
        """
        from fluster.cluster.jobs.job_requests import terminate

        check_reason(reason)
        await self._states.ask_about(check_job_id(job_id), lambda: terminate(self.bus, self.namespace, job_id, reason))

    async def explain(self, job_id: JobId) -> str:
        """Why the job is not running, in one sentence. Raises JobNotFoundError, InvalidNameError."""
        from fluster.cluster.jobs.job_requests import explain

        return await self._states.ask_about(check_job_id(job_id), lambda: explain(self.bus, self.namespace, job_id))

    async def stack(self, job_id: JobId, *, task: int | None = None) -> JobStack:
        """In which Python functions the job's tasks are, so where they hang; `task` asks for one, else 16 that run are
        told at most.

        They are read from outside, by the tasks' workers, and nothing is stopped. A process that could not be read has
        a `problem`. Raises StackError when no task of those runs, or none can be read, JobNotFoundError,
        InvalidNameError, and ValueError for a task that the job does not have.
        """
        from fluster.cluster.jobs.job_requests import job_stack

        check_number("task", task, 0)
        return await job_stack(self.bus, self.namespace, await self.poll(job_id), task)

    async def list_jobs(
        self, *, limit: int = 1_000, states: Sequence[JobStatus] = (), details: bool = False
    ) -> list[JobInfo]:
        """The namespace's jobs, the newest first; with `states`, those that stand so, with `details` also what they
        run.
        """
        from fluster.cluster.jobs.job_requests import list_jobs

        check_count("limit", limit, 0, "how many jobs to list")
        return await list_jobs(self.bus, self.namespace, limit=limit, states=check_states(states), details=details)

    def logs(
        self,
        job_id: JobId,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | timedelta | None = None,
        grep: str | None = None,
        task: int | None = None,
        attempt: int | None = None,
    ) -> Batched[LogLine]:
        """The lines that the job's tasks wrote; with `follow`, also those to come, until it has finished.

        `tail` keeps the last lines of those that there are, `since` those written from a time on (or in the last so
        much), `grep` those in which a regular expression is found. They are there also when the worker is gone. What
        jobs wrote that had the id before is found by the number of its `attempt`. Without `follow` all is there that
        the tasks had written when this was called, as far as their workers can be asked within 5 s.

        Raises JobNotFoundError, InvalidNameError, and ValueError for a `grep` that is not a regular expression, a `since`
        without a time zone or a negative `tail`.

        Each stream of a task is in the order in which it wrote, and so are both together, but that what it writes to
        both within a moment (longer on a busy machine) may come one stream after the other. A line of more than 64 KiB
        comes in pieces, and so does one that is written over itself, as progress bars are: all of them but the last
        have `goes_on`.
        """
        from fluster.cluster.jobs.batched_logs import Batched
        from fluster.cluster.jobs.job_logs import LogQuery
        from fluster.cluster.jobs.log_chunks import messages_of

        query = LogQuery(job_id, follow, tail, since, grep, task, attempt)
        return Batched(messages_of(self.log_chunks(query)))

    def log_chunks(self, query: LogQuery) -> AsyncGenerator[list[LogChunk]]:
        """What `logs` gives, in lists of chunks, for programs that show a great deal. Raises as that does."""
        from fluster.cluster.jobs.job_logs import read_logs

        return self.outages.bounded_each(read_logs(self.bus, self.namespace, self._states, query))

    async def list_workers(self) -> list[WorkerStatus]:
        """The workers that have registered, and how they are."""
        from fluster.cluster.workers import list_workers

        return await list_workers(self.bus, self.namespace)

    async def list_nodes(self) -> list[NodeStatus]:
        """The machines that workers are on, by host: what each has, and when one of its workers was last heard."""
        from fluster.cluster.workers import list_nodes

        return await list_nodes(self.bus, self.namespace)

    async def drain_worker(
        self, worker_id: WorkerId, *, timeout: float | None = None, wait: bool = False
    ) -> DrainReply:
        """Have a worker take nothing new, wait for what runs, and leave; with `wait`, return when it has left.

        After `timeout` seconds it hands back what still runs: stopped, and tried elsewhere at the cost of the
        preemption budget. For operators. Raises WorkerNotFoundError, and CredentialsError for other users.
        """
        from fluster.cluster.workers import drain_worker

        return await drain_worker(self.bus, worker_id, timeout_s=check_timeout(timeout), wait=wait)

    async def worker_health(self, worker_id: WorkerId) -> WorkerHealth:
        """How a worker is, by its own word. For operators. Raises as `drain_worker` does."""
        from fluster.cluster.workers import ask_worker
        from fluster_bus.messages import Done, WorkerHealth

        return await ask_worker(self.bus, worker_id, "health", Done(), WorkerHealth)

    # ---- endpoints --------------------------------------------------------------------------------------

    async def register_endpoint(
        self, name: str, address: str, *, metadata: Mapping[str, str] | None = None
    ) -> Endpoint:
        """Make `address` known under `name`. From within a job it is removed when the job ends; else it has a
        lease, of 10 s unless the cluster has another, that `registry.register` renews.
        """
        endpoint = self.new_endpoint(name, address, metadata=metadata)
        return await _once_back(lambda: self.registry.register(endpoint))

    def new_endpoint(
        self,
        name: str,
        address: str,
        *,
        endpoint_id: EndpointId | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Endpoint:
        """An endpoint of this process's job, or of none, ready to be registered."""
        identity = self._identity
        if identity is None or identity.namespace != self.namespace:
            return self.registry.endpoint(name, address, endpoint_id=endpoint_id, metadata=metadata)
        return self.registry.endpoint(
            name,
            address,
            job_id=identity.job_id,
            task=identity.task,
            attempt=identity.attempt,
            worker_id=identity.worker_id,
            endpoint_id=endpoint_id,
            metadata=metadata,
        )

    async def unregister_endpoint(self, endpoint_id: EndpointId) -> None:
        """Take the endpoint away, if it is there."""
        endpoint = await _once_back(lambda: self.registry.find(endpoint_id))
        if endpoint is not None:
            await _once_back(lambda: self.registry.unregister(endpoint))

    async def lookup_endpoints(self, name: str) -> list[Endpoint]:
        """Everyone registered under `name`."""
        return await _once_back(lambda: self.registry.lookup(name))

    async def list_endpoints(self, prefix: str = "") -> list[Endpoint]:
        """Everyone whose name begins with `prefix`."""
        return await _once_back(lambda: self.registry.list(prefix))


async def _once_back(attempt: Callable[[], Awaitable[T]]) -> T:
    from fluster.cluster.jobs.job_states import once_back

    return await once_back(attempt)
