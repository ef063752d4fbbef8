"""A client of the cluster: jobs, their logs, and the endpoint registry, awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Self, overload

from fluster.cluster.identity import NAMESPACE, TaskIdentity
from fluster.cluster.job_logs import job_logs
from fluster.cluster.job_wait import wait_finished
from fluster.errors import JobFailedError, JobNotFoundError, JobRefusedError, JobTimeoutError
from fluster_bus import subjects
from fluster_bus.address import BusAddress
from fluster_bus.bus import Bus
from fluster_bus.errors import DisconnectedError, NoRespondersError, RequestTimeoutError, ServiceError
from fluster_bus.messages import (
    Done,
    Endpoint,
    EndpointId,
    JobId,
    JobInfo,
    JobRequest,
    JobStatus,
    ListReply,
    ListRequest,
    LogLine,
    Namespace,
    StatusReply,
    StatusRequest,
    TerminateReply,
    TerminateRequest,
    WorkerList,
    WorkerStatus,
)
from fluster_bus.messages.requests import MAX_JOBS_A_REQUEST
from fluster_bus.names import check_namespace, unique_name
from fluster_bus.registry import Registry
from fluster_bus.streams import append

DEFAULT_NAMESPACE = "default"
_UNANSWERED = (NoRespondersError, RequestTimeoutError, DisconnectedError)
_RECORD_TIMEOUT_S = 5.0
_SUBMITS_AT_ONCE = 128


class AsyncCluster:
    """A connection to a cluster, in one namespace; make one with `AsyncCluster.connect`."""

    def __init__(self, bus: Bus, namespace: Namespace) -> None:
        self.bus = bus
        self.namespace = namespace
        self.registry = Registry(bus, namespace)
        self._identity = TaskIdentity.from_environment()
        self._unconfirmed: set[JobId] = set()  # acknowledged by the stream, not yet seen recorded

    @classmethod
    async def connect(cls, address: str | BusAddress | None = None, namespace: str | None = None) -> Self:
        """A cluster at `address` (a URL with credentials, or a file of them), else at FLUSTER_CLUSTER_ADDRESS.

        The namespace is FLUSTER_NAMESPACE or "default" unless given. Raises ConnectError, CredentialsError, and
        ServiceError when the cluster does not have the namespace.
        """
        if address is None:
            address = BusAddress.from_environment()
        elif isinstance(address, str):
            address = BusAddress.parse(address)
        chosen = Namespace(check_namespace(namespace or os.environ.get(NAMESPACE) or DEFAULT_NAMESPACE))
        bus = await Bus.connect(address, name=f"client-{os.getpid()}")
        cluster = cls(bus, chosen)
        if cluster._identity is None:  # a job's namespace is there, since the job runs in it
            try:
                await bus.ask(subjects.ensure_namespace(chosen), Done(), Done)
            except NoRespondersError:
                pass  # no controller at the moment: the stream takes submits all the same, if the namespace exists
            except BaseException:
                await bus.close()
                raise
        return cluster

    async def close(self) -> None:
        """Leave the cluster; jobs go on."""
        await self.bus.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """The URL with credentials that FLUSTER_CLUSTER_ADDRESS takes."""
        return self.bus.address.to_url()

    # ---- jobs -------------------------------------------------------------------------------------------

    async def launch(self, request: JobRequest) -> JobId:
        """The id of the job, once the cluster has recorded it.

        When no controller answers it returns after the stream has stored it: it will be recorded, and until then
        `poll` says PENDING. Raises JobRefusedError, and StorageError when it could not be stored.
        """
        return (await self.launch_many([request]))[0]

    async def launch_many(self, requests: Sequence[JobRequest]) -> list[JobId]:
        """The ids of many jobs, in order; quicker than one `launch` after the other. Raises as `launch` does."""
        room = asyncio.Semaphore(_SUBMITS_AT_ONCE)

        async def submit(request: JobRequest) -> tuple[JobId, int]:
            async with room:
                job_id = request.job_id or JobId(unique_name(request.name))
                identity = self._identity
                parent = identity.job_id if identity and identity.namespace == self.namespace else None
                stamped = request.model_copy(update={"job_id": job_id, "parent": request.parent or parent})
                subject = subjects.jobs_submit(self.namespace)
                return job_id, await append(self.bus, subject, stamped, message_id=f"{self.namespace}.{job_id}")

        submitted = await asyncio.gather(*(submit(request) for request in requests))
        job_ids = [job_id for job_id, _ in submitted]
        for start in range(0, len(submitted), MAX_JOBS_A_REQUEST):
            part = slice(start, start + MAX_JOBS_A_REQUEST)
            await self._confirm(job_ids[part], [sequence for _, sequence in submitted[part]])
        return job_ids

    async def _confirm(self, job_ids: list[JobId], submissions: list[int]) -> None:
        question = StatusRequest(job_ids=tuple(job_ids), submissions=tuple(submissions))
        try:
            answer = await self.bus.request(
                subjects.jobs_verb(self.namespace, "status"), question.to_json(), timeout_s=_RECORD_TIMEOUT_S
            )
        except _UNANSWERED:
            self._unconfirmed.update(job_ids)
            return
        reply = StatusReply.from_json(answer.data)
        if reply.refused:
            raise JobRefusedError("; ".join(f"{each.job_id or 'a job'}: {each.reason}" for each in reply.refused))
        self._unconfirmed.update(reply.unknown)

    async def poll(self, job_id: JobId) -> JobInfo:
        """How the job stands now. Raises JobNotFoundError."""
        return (await self._statuses([job_id]))[0]

    async def _statuses(self, job_ids: Sequence[JobId]) -> list[JobInfo]:
        """The jobs in the order asked for; one that is stored and not yet recorded is PENDING."""
        try:
            reply = await self.bus.ask(
                subjects.jobs_verb(self.namespace, "status"), StatusRequest(job_ids=tuple(job_ids)), StatusReply
            )
        except NoRespondersError:
            if not self._unconfirmed.issuperset(job_ids):
                raise
            reply = StatusReply(unknown=tuple(job_ids))
        found = {info.job_id: info for info in reply.jobs}
        self._unconfirmed.difference_update(found)
        for job_id in reply.unknown:
            if job_id not in self._unconfirmed:
                raise JobNotFoundError(
                    f"no job {job_id!r} in namespace {self.namespace!r}: list_jobs() or `fluster ps` shows those there are"
                )
            found[job_id] = JobInfo(job_id=job_id, name=job_id, namespace=self.namespace, status=JobStatus.PENDING)
        return [found[job_id] for job_id in job_ids]

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

        Raises JobTimeoutError (a TimeoutError) after `timeout` seconds, JobNotFoundError, and with
        `raise_on_failure` JobFailedError for the first that did not succeed.
        """
        job_ids = [job] if isinstance(job, str) else list(job)
        unfinished = set(job_ids)
        try:
            async with asyncio.timeout(timeout):
                await wait_finished(self.bus, self.namespace, unfinished, self._statuses)
                infos = await self._statuses(job_ids) if job_ids else []
        except TimeoutError as error:
            shown = ", ".join(sorted(unfinished)[:5]) + (" …" if len(unfinished) > 5 else "")
            raise JobTimeoutError(f"after {timeout:g} s not finished: {shown}; they go on") from error
        if raise_on_failure:
            for info in infos:
                if info.status is not JobStatus.SUCCEEDED:
                    raise JobFailedError(info)
        return infos[0] if isinstance(job, str) else infos

    async def terminate(self, job_id: JobId, *, reason: str = "terminated by request") -> None:
        """Have the job stopped, with what it launched; a finished one stays as it is. Raises JobNotFoundError."""
        if job_id in self._unconfirmed:
            await self._statuses([job_id])
        try:
            await self.bus.ask(
                subjects.jobs_verb(self.namespace, "terminate"),
                TerminateRequest(job_id=job_id, reason=reason),
                TerminateReply,
            )
        except ServiceError as error:
            if error.code == JobNotFoundError.__name__:
                raise JobNotFoundError(str(error)) from error
            raise

    async def list_jobs(self, *, limit: int = 1_000, states: Sequence[JobStatus] = ()) -> list[JobInfo]:
        """The namespace's jobs, the newest first; with `states`, those that stand so."""
        request = ListRequest(limit=limit, states=tuple(states))
        reply = await self.bus.ask(subjects.jobs_verb(self.namespace, "list"), request, ListReply)
        return list(reply.jobs)

    async def logs(self, job_id: JobId, *, follow: bool = False, task: int | None = None) -> AsyncGenerator[LogLine]:
        """The lines that the job's tasks wrote; with `follow`, also those to come, until it has finished.

        Raises JobNotFoundError.
        """
        await self.poll(job_id)
        finished = wait_finished(self.bus, self.namespace, {job_id}, self._statuses) if follow else None
        async with aclosing(job_logs(self.bus, self.namespace, job_id, until=finished)) as lines:
            async for line in lines:
                if task is None or line.task == task:
                    yield line

    async def list_workers(self) -> list[WorkerStatus]:
        """The workers that have registered, and how they are."""
        return list((await self.bus.ask(subjects.workers_list(self.namespace), Done(), WorkerList)).workers)

    # ---- endpoints --------------------------------------------------------------------------------------

    async def register_endpoint(
        self, name: str, address: str, *, metadata: Mapping[str, str] | None = None
    ) -> Endpoint:
        """Make `address` known under `name`. From within a job it is removed when the job ends; else it has a
        lease of 10 s that `registry.register` renews.
        """
        return await self.registry.register(self.new_endpoint(name, address, metadata=metadata))

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
        endpoint = await self.registry.find(endpoint_id)
        if endpoint is not None:
            await self.registry.unregister(endpoint)

    async def lookup_endpoints(self, name: str) -> list[Endpoint]:
        """Everyone registered under `name`."""
        return await self.registry.lookup(name)

    async def list_endpoints(self, prefix: str = "") -> list[Endpoint]:
        """Everyone whose name begins with `prefix`."""
        return await self.registry.list(prefix)
