"""Answers what clients ask the controller."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from fluster_bus.connection.bus import Bus, Request
from fluster_bus.connection.services_api import Announcement, ServedEndpoint
from fluster_bus.connection.serving import Answer
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusyError, ConnectError, MessageTooLargeError, ServiceError, WireVersionError
from fluster_bus.core.stream_bounds import object_limits
from fluster_bus.core.version import VERSION
from fluster_bus.messages import (
    Done,
    Endpoint,
    EndpointList,
    EndpointQuery,
    ExplainReply,
    ExplainRequest,
    FlushRequest,
    JobDetails,
    JobInfo,
    JobRecord,
    JobStatus,
    ListReply,
    ListRequest,
    Namespace,
    NamespaceReply,
    NamespaceRequest,
    OwnerRequest,
    RefusedJob,
    StatusReply,
    StatusRequest,
    TaskRecord,
    TerminateRequest,
    TrimCalls,
    UnregisterRequest,
    WorkerId,
    WorkerList,
    WorkerStatus,
)
from fluster_bus.messages.namespaces import NAMESPACE_UNKNOWN
from fluster_bus.messages.nodes import WorkerQuery
from fluster_bus.messages.parts.wire_range import SPOKEN, why_apart
from fluster_bus.messages.stacks import TaskStack, TaskStackRequest
from fluster_bus.messages.workers import JoinRequest
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.objects import MAX_OBJECT_BYTES
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.stored_calls import drop_calls
from fluster_services import lifecycle
from fluster_services.controller.answers.flushing import flush_job
from fluster_services.controller.answers.job_pages import JobPage, Json, terminated, written_job
from fluster_services.controller.answers.joining import Joining, join_line
from fluster_services.controller.answers.namespace_requests import NamespaceRequests
from fluster_services.controller.answers.requests import Pace, Requests
from fluster_services.controller.answers.stacks import stack_of
from fluster_services.controller.rules.dependencies import waits_for
from fluster_services.controller.scheduling.dispatch import place_of
from fluster_services.controller.scheduling.explain import explain
from fluster_services.controller.state.books import JobKey
from fluster_services.controller.state.slim_records import is_left, is_slim_end, is_slim_error
from fluster_services.job_info import job_status, job_summary

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fluster_services.controller.controller import Controller

# What one answer has of a registry, and how many such answers of a namespace are made at once: an endpoint in memory takes
# some ten times as much as its JSON.
_MAX_ENDPOINTS_BYTES, _READ_AT_ONCE = 4 << 20, 2
_RECORDED_TIMEOUT_S = 4.0  # below the client's own, so that it hears which jobs are not recorded yet


class ControllerService:
    """The controller's services, in every namespace.

    They have a connection of their own: what tenants send, however much it is, comes before nothing that the controller needs.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._requests = Requests()
        self._joining = Joining(controller)
        self._readers: defaultdict[Namespace, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_READ_AT_ONCE))
        self._bus: Bus

    async def run(self, serving: asyncio.Event) -> None:
        """Answer, until cancelled; `serving` is set once requests are heard."""
        address, name = self._controller.bus.address, f"{self._controller.bus.name}-requests"
        self._bus = await retried(
            lambda _left_s: Bus.connect(address, name=name), on=(ConnectError,), timeout_s=math.inf
        )
        try:
            await self._listen()
            await self._bus.flush()
            serving.set()
            await self._requests.run()
        finally:
            await self._bus.close()

    async def _listen(self) -> None:
        every = subjects.ANY_TOKEN
        await self._serve(subjects.jobs_verb(every, "status"), StatusRequest, self._status)
        await self._serve(subjects.jobs_verb(every, "list"), ListRequest, self._list)
        await self._serve(subjects.jobs_verb(every, "terminate"), TerminateRequest, self._terminate)
        await self._serve(subjects.jobs_verb(every, "explain"), ExplainRequest, self._explain)
        await self._serve(subjects.jobs_verb(every, "stack"), TaskStackRequest, self._stack)
        await self._serve(subjects.jobs_verb(every, "flush"), FlushRequest, self._flush)
        await self._serve(subjects.jobs_verb(every, "own"), OwnerRequest, self._controller.owners.on_told)
        await self._serve(subjects.ensure_namespace(every), NamespaceRequest, self._ensure)
        await self._serve(subjects.workers_list(every), WorkerQuery, self._workers)
        await self._serve(subjects.trim_calls(every), TrimCalls, self._trim_calls)
        await self._serve(subjects.endpoints_verb(every, "register"), Endpoint, self._register)
        await self._serve(subjects.endpoints_verb(every, "unregister"), UnregisterRequest, self._unregister)
        await self._serve(subjects.endpoints_verb(every, "lookup"), EndpointQuery, self._lookup)
        await self._serve(subjects.endpoints_verb(every, "list"), EndpointQuery, self._lookup)
        # Joining is the cluster's own, and of no namespace.
        line = self._requests.line(join_line)
        await self._bus.serve(subjects.join(every), JoinRequest, self._joining.answer, entrance=line)
        await NamespaceRequests(self._controller, self._requests).serve(self._bus)
        await self._announce()

    async def _serve(
        self,
        subject: str,
        request: type[Request],
        answer: Callable[[Namespace, Request], Awaitable[Answer]],
    ) -> None:
        async def handler(message: Request, asked: str) -> Answer:
            await self._controller.seat.wait_sure()  # else whoever leads answers
            namespace = Namespace(subjects.namespace_of(asked))
            if not self._controller.namespaces.is_acted_on(namespace):
                why = self._controller.namespaces.why_closed(namespace)
                if why is None:
                    raise BusyError(f"namespace {namespace!r} is being added: ask again in a moment")
                raise ServiceError(NAMESPACE_UNKNOWN, why)
            return await answer(namespace, message)

        # In no queue group: only the leader listens, and one that was stopped must not be handed what is asked.
        await self._bus.serve(subject, request, handler, entrance=self._requests.of_namespaces)

    async def _announce(self) -> None:
        every = subjects.ANY_TOKEN
        endpoints = [ServedEndpoint(f"jobs-{verb}", subjects.jobs_verb(every, verb)) for verb in subjects.JOB_VERBS]
        endpoints += [
            ServedEndpoint(f"endpoints-{verb}", subjects.endpoints_verb(every, verb))
            for verb in subjects.ENDPOINT_VERBS
        ]
        announcement = Announcement(
            "fluster-controller",
            self._controller.config.controller_id,
            VERSION,
            description="Jobs and endpoints of a Fluster cluster",
            endpoints=endpoints,
        )
        await announcement.serve(self._bus)

    # ---- jobs -------------------------------------------------------------------------------------------

    async def _status(self, namespace: Namespace, request: StatusRequest) -> Json:
        pace = self._requests.pace()
        keys = dict.fromkeys(JobKey(namespace, job_id) for job_id in request.job_ids)
        until = asyncio.get_running_loop().time() + _RECORDED_TIMEOUT_S
        refused, unrecorded = await self._looked_at(list(keys), request.submissions, pace, until)
        try:
            # A client that began to watch just after a job's end was published learns of it here alone.
            await self._controller.pending_writes.wait_settled(keys, until=until)
        except TimeoutError as error:
            raise BusyError("records of these jobs are being written: ask again in a moment") from error
        # The id of one that is not recorded yet may be another's, which it is to replace.
        known = {key for key in keys if key not in unrecorded and self._controller.books.get(key) is not None}
        page = JobPage()
        for key in (key for key in keys if key in known):
            await pace.step()
            told = await self._told(key, pace, details=request.details, error=True)
            if told is not None and not page.add(told):
                break
        unknown = tuple(key.job_id for key in keys if key not in known)
        return page.reply(StatusReply(unknown=unknown, refused=refused))

    async def _looked_at(
        self, keys: list[JobKey], submissions: tuple[int, ...], pace: Pace, until: float
    ) -> tuple[tuple[RefusedJob, ...], set[JobKey]]:
        """Which of the submissions were refused, and which could not be waited for until that time of the loop's clock."""
        refused: list[RefusedJob] = []
        unrecorded: set[JobKey] = set()
        for key, sequence in zip(keys, submissions, strict=False):
            await pace.step()
            try:
                async with asyncio.timeout_at(until):
                    why = await self._controller.intake.wait_looked_at(key, sequence)
            except TimeoutError:
                unrecorded.add(key)
            else:
                refused += [why] if why is not None else []
        return tuple(refused), unrecorded

    async def _told(self, key: JobKey, pace: Pace, *, details: bool = False, error: bool = False) -> bytes | None:
        """The JSON of what is told of a job, `error` being the exception that it failed with; None when it is gone."""
        entry = self._controller.books.get(key)
        if entry is None or entry.job is None:
            return None
        job, tasks = entry.job.value, entry.task_records()
        progress = self._controller.progress.of(key)
        info = job_summary(job, tasks)
        info = await self._whole(info) if error else info.model_copy(update={"error": None})
        if details:
            info = info.model_copy(update={"details": await self._details(info)})
        return await written_job(info, job, tasks, progress, pace)

    async def _whole(self, info: JobInfo) -> JobInfo:
        if not is_slim_error(info.error):
            return info
        row = await self._controller.records[info.namespace].get(info.job_id)
        return info.model_copy(update={"error": row.value.error if row is not None else None})

    async def _details(self, info: JobInfo) -> JobDetails | None:
        entry = self._controller.books.get(JobKey(info.namespace, info.job_id))
        job = entry.job.value if entry is not None and entry.job is not None else None
        if job is None or is_slim_end(job) or is_left(job.request):
            row = await self._controller.records[info.namespace].get(info.job_id)
            job = row.value if row is not None and isinstance(row.value, JobRecord) else None
        return JobDetails.of(job.request) if job is not None else None

    async def _list(self, namespace: Namespace, request: ListRequest) -> Json:
        books, pace, page = self._controller.books, self._requests.pace(), JobPage(request.limit)
        skip, cursor, more = request.skip, request.after, False
        for key in books.newest(namespace, request.after):
            await pace.step()
            entry = books.get(key)
            if entry is None or entry.job is None:
                continue
            order = entry.job.value.order
            if request.states and job_status(entry.job.value, entry.task_records()) not in request.states:
                continue
            if skip:
                skip -= 1
                continue
            if page.is_full:
                more = len(page) < request.limit
                break
            told = await self._told(key, pace, details=request.details)
            if told is not None and not page.add(told):
                more = True
                break
            cursor = order
        return page.reply(ListReply(more=more, cursor=cursor))

    async def _terminate(self, namespace: Namespace, request: TerminateRequest) -> Json:
        key = JobKey(namespace, request.job_id)
        while True:
            entry = self._controller.books.get(key)
            if entry is None or entry.job is None:
                raise ServiceError(
                    "JobNotFoundError", f"no job {request.job_id!r} in namespace {namespace!r}: `fluster ps` lists them"
                )
            wanted = lifecycle.request_job_kill(entry.job.value, reason=request.reason)
            job, tasks = entry.job.value, entry.task_records()
            if wanted is None or await self._controller.write(wanted, entry.job.revision):
                return terminated(await written_job(job_summary(job, tasks), job, tasks, {}, self._requests.pace()))
            newer = await self._controller.records[namespace].get(request.job_id)
            if newer is not None:
                self._controller.apply(newer)

    async def _explain(self, namespace: Namespace, request: ExplainRequest) -> ExplainReply:
        job, tasks = self._known(JobKey(namespace, request.job_id))
        ahead = await self._ahead(job)
        reason = explain(
            job,
            tasks,
            self._controller.roster.views(),
            ahead=ahead,
            now=time.time(),
            waits_for=self._waits_for(job),
            reservation=self._reservation(job),
            pauses_s=self._pauses_s(job, tasks),
            children=self._controller.books.unfinished_children(JobKey(namespace, request.job_id), tasks),
            troubles=self._troubles(),
            unfit=self._controller.dispatch.unfit(JobKey(namespace, request.job_id)),
            preparing=self._controller.progress.preparing(JobKey(namespace, request.job_id)),
            short_of_quota=self._controller.dispatch.why_short(job),
            goes_first=self._controller.dispatch.who_goes_first(job),
            registered=self._controller.roster.workers.keys(),
        )
        return ExplainReply(job_id=request.job_id, reason=reason)

    def _troubles(self) -> list[tuple[WorkerId, str]]:
        roster = self._controller.roster
        troubles = dict(roster.troubles())
        working = {worker_id for worker_id in roster.workers if roster.takes_work(worker_id)}
        return sorted((dict(self._controller.vm_troubles.told(working)) | troubles).items())

    async def _stack(self, namespace: Namespace, request: TaskStackRequest) -> TaskStack:
        job, tasks = self._known(JobKey(namespace, request.job_id))
        return await stack_of(self._controller.bus, job, tasks, request)

    async def _flush(self, namespace: Namespace, request: FlushRequest) -> Done:
        _, tasks = self._known(JobKey(namespace, request.job_id))
        await flush_job(self._controller.bus, namespace, request.job_id, tasks)
        return Done()

    async def _ahead(self, job: JobRecord) -> int:
        """How many tasks are before its own in the line, those of gangs among them.

        Of other namespaces only those of a higher priority are: with all others it takes turns.
        """
        pace, dispatch = self._requests.pace(), self._controller.dispatch
        place = place_of(job)
        ahead = sum(gang.count for gang in self._controller.gangs.waiting() if dispatch.goes_before(gang.place, place))
        for key, _task in dispatch.scheduler.waiting():
            await pace.step()
            entry = self._controller.books.get(key)
            ahead += (
                entry is not None and entry.job is not None and dispatch.goes_before(place_of(entry.job.value), place)
            )
        return ahead

    def _pauses_s(self, job: JobRecord, tasks: Sequence[TaskRecord]) -> dict[int, float]:
        key, now = JobKey(job.namespace, job.job_id), time.monotonic()
        pauses = {task.task: self._controller.waits.pause_s(key, task, now=now) for task in tasks}
        return {task: pause_s for task, pause_s in pauses.items() if pause_s}

    def _reservation(self, job: JobRecord) -> tuple[str, tuple[str, ...]] | None:
        reservation = self._controller.dispatch.reservation
        if reservation is None:
            return None
        key, workers = reservation
        holder = self._controller.books.get(key)
        if key.namespace != job.namespace or holder is None or holder.job is None:
            return None  # a tenant is not told about another's jobs
        is_concerned = key.job_id == job.job_id or place_of(holder.job.value) < place_of(job)
        return (key.job_id, workers) if is_concerned else None

    def _waits_for(self, job: JobRecord) -> list[tuple[str, JobStatus]]:
        """The jobs that it waits for, and how they stand."""
        books = self._controller.books
        found: list[tuple[str, JobStatus]] = []
        for each in waits_for(job, books.dependencies(JobKey(job.namespace, job.job_id))):
            entry = books.get(JobKey(each.namespace, each.job_id))
            tasks = entry.task_records() if entry is not None else []
            found.append((each.job_id, job_status(each, tasks)))
        return found

    def _known(self, key: JobKey) -> tuple[JobRecord, list[TaskRecord]]:
        entry = self._controller.books.get(key)
        if entry is None or entry.job is None:
            raise ServiceError(
                "JobNotFoundError", f"no job {key.job_id!r} in namespace {key.namespace!r}: `fluster ps` lists them"
            )
        return entry.job.value, entry.task_records()

    # ---- the rest ---------------------------------------------------------------------------------------

    async def _ensure(self, _namespace: Namespace, request: NamespaceRequest) -> NamespaceReply:
        here = f"the cluster's controller (fluster {VERSION})"
        if (apart := why_apart(request.wire, "the program that asks", here=here)) is not None:
            raise WireVersionError(apart)
        # Every namespace that is known has its buckets and streams.
        timing = self._controller.config.timing
        return NamespaceReply(
            wire=SPOKEN,
            version=VERSION,
            endpoint_lease_s=timing.endpoint_lease_s,
            seat_lease_s=timing.seat_lease_s,
            object_bytes=object_limits(self._controller.store.shares, MAX_OBJECT_BYTES),
        )

    async def _trim_calls(self, namespace: Namespace, request: TrimCalls) -> Done:
        await drop_calls(self._controller.bus, namespace, request.name, request.before)
        return Done()

    async def _workers(self, _namespace: Namespace, request: WorkerQuery) -> WorkerList:
        pace = self._requests.pace()
        workers: list[WorkerStatus] = []
        for status in self._controller.judge.statuses():
            if request.after is not None and status.info.worker_id <= request.after:
                continue
            if len(workers) == request.limit:
                return WorkerList(workers=tuple(workers), more=True)
            workers.append(status if request.nodes else status.without_node())
            await pace.step()
        return WorkerList(workers=tuple(workers))

    async def _register(self, namespace: Namespace, endpoint: Endpoint) -> Endpoint:
        if endpoint.namespace != namespace:
            raise ServiceError(
                "WrongNamespace", f"endpoint of namespace {endpoint.namespace!r}, sent to {namespace!r}: send it there"
            )
        return await Registry(self._bus, namespace).register(endpoint)

    async def _unregister(self, namespace: Namespace, request: UnregisterRequest) -> Done:
        registry = Registry(self._bus, namespace)
        endpoint = await registry.find(request.endpoint_id)
        if endpoint is not None:
            await registry.unregister(endpoint)
        return Done()

    async def _lookup(self, namespace: Namespace, query: EndpointQuery) -> EndpointList:
        registry, pace = Registry(self._bus, namespace), self._requests.pace()
        found: list[Endpoint] = []
        size = 0
        async with self._readers[namespace], aclosing(registry.found(query.name, prefix=query.prefix)) as endpoints:
            async for endpoint in endpoints:
                await pace.step()
                found.append(endpoint)
                size += len(endpoint.to_json())
                if size > _MAX_ENDPOINTS_BYTES:
                    raise MessageTooLargeError(
                        f"namespace {namespace!r} has more endpoints than an answer holds ({_MAX_ENDPOINTS_BYTES >> 20} MiB): "
                        "ask for those of one name"
                    )
        return EndpointList(endpoints=tuple(found))
