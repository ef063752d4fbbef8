"""Answers what clients ask the controller, and itself what they ask about endpoints."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import aclosing
from typing import TYPE_CHECKING

from fluster_bus.connection.bus import Bus, Request
from fluster_bus.connection.services_api import Announcement, ServedEndpoint
from fluster_bus.connection.serving import Answer
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusyError, MessageTooLargeError, ServiceError, WireVersionError
from fluster_bus.core.stream_bounds import object_limits
from fluster_bus.core.version import VERSION
from fluster_bus.messages import (
    Done,
    Endpoint,
    EndpointList,
    EndpointQuery,
    ExplainRequest,
    FlushRequest,
    ListRequest,
    Namespace,
    NamespaceReply,
    NamespaceRequest,
    OwnerRequest,
    StatusRequest,
    TerminateRequest,
    TrimCalls,
    UnregisterRequest,
    WorkerList,
    WorkerStatus,
)
from fluster_bus.messages.namespaces import NAMESPACE_UNKNOWN
from fluster_bus.messages.nodes import WorkerQuery
from fluster_bus.messages.parts.wire_range import SPOKEN, why_apart
from fluster_bus.messages.stacks import TaskStackRequest
from fluster_bus.messages.workers import JoinRequest
from fluster_bus.storage.objects import MAX_OBJECT_BYTES
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.stored_messages import drop_calls
from fluster_services.controller.answers.joining import join_line
from fluster_services.controller.answers.requests import Requests, present_pace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fluster_services.config import Timing
    from fluster_services.controller.answers.explain_requests import ExplainRequests
    from fluster_services.controller.answers.job_requests import JobRequests
    from fluster_services.controller.answers.joining import Joining
    from fluster_services.controller.answers.namespace_requests import NamespaceRequests
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.namespaces import NamespaceSet
    from fluster_services.controller.scheduling.worker_monitor import WorkerMonitor
    from fluster_services.controller.store_room import StoreSetup
    from fluster_services.controller.sweeps.owners import Owners

# What one answer has of a registry, and how many such answers of a namespace are made at once: an endpoint in memory takes
# some ten times as much as its JSON.
_MAX_ENDPOINTS_BYTES, _READ_AT_ONCE = 4 << 20, 2


class ControllerService:
    """The controller's services, in every namespace.

    They have a connection of their own: what tenants send, however much it is, comes before nothing that the controller needs.
    """

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        controller_id: str,
        timing: Timing,
        namespaces: NamespaceSet,
        store: StoreSetup,
        owners: Owners,
        monitor: WorkerMonitor,
        jobs: JobRequests,
        explanations: ExplainRequests,
        operators: NamespaceRequests,
        joining: Joining,
    ) -> None:
        self._shared_bus = bus  # what everything else of the controller uses
        self._seat = seat
        self._controller_id = controller_id
        self._timing = timing
        self._namespaces = namespaces
        self._store = store
        self._owners = owners
        self._monitor = monitor
        self._jobs = jobs
        self._explanations = explanations
        self._operators = operators
        self._joining = joining
        self._requests = Requests()
        self._bus: Bus

    async def run(self, serving: asyncio.Event) -> None:
        """Answer, until cancelled; `serving` is set once requests are heard."""
        self._bus = await self._shared_bus.connect_beside(f"{self._shared_bus.name}-requests")
        try:
            await self._listen()
            await self._bus.flush()
            serving.set()
            await self._requests.run()
        finally:
            await self._bus.close()

    async def _listen(self) -> None:
        every, jobs, endpoints = subjects.ANY_TOKEN, self._jobs, EndpointRequests(self._bus)
        await self._serve(subjects.jobs_verb(every, "status"), StatusRequest, jobs.status)
        await self._serve(subjects.jobs_verb(every, "list"), ListRequest, jobs.list)
        await self._serve(subjects.jobs_verb(every, "terminate"), TerminateRequest, jobs.terminate)
        await self._serve(subjects.jobs_verb(every, "explain"), ExplainRequest, self._explanations.explain)
        await self._serve(subjects.jobs_verb(every, "stack"), TaskStackRequest, jobs.stack)
        await self._serve(subjects.jobs_verb(every, "flush"), FlushRequest, jobs.flush)
        await self._serve(subjects.jobs_verb(every, "own"), OwnerRequest, self._owners.on_told)
        await self._serve(subjects.ensure_namespace(every), NamespaceRequest, self._ensure)
        await self._serve(subjects.workers_list(every), WorkerQuery, self._workers)
        await self._serve(subjects.trim_calls(every), TrimCalls, self._trim_calls)
        await self._serve(subjects.endpoints_verb(every, "register"), Endpoint, endpoints.register)
        await self._serve(subjects.endpoints_verb(every, "unregister"), UnregisterRequest, endpoints.unregister)
        await self._serve(subjects.endpoints_verb(every, "lookup"), EndpointQuery, endpoints.lookup)
        await self._serve(subjects.endpoints_verb(every, "list"), EndpointQuery, endpoints.lookup)
        # Joining is the cluster's own, and of no namespace.
        queue = self._requests.queue(join_line)
        await self._bus.serve(subjects.join(every), JoinRequest, self._joining.answer, request_queue=queue)
        await self._operators.serve(self._bus, self._requests)
        await self._announce()

    async def _serve(
        self,
        subject: str,
        request: type[Request],
        answer: Callable[[Namespace, Request], Awaitable[Answer]],
    ) -> None:
        async def handler(message: Request, asked: str) -> Answer:
            await self._seat.wait_sure()  # else the one that leads answers
            namespace = Namespace(subjects.namespace_of(asked))
            if not self._namespaces.is_acted_on(namespace):
                why = self._namespaces.why_closed(namespace)
                if why is None:
                    raise BusyError(f"namespace {namespace!r} is being added: ask again in a moment")
                raise ServiceError(NAMESPACE_UNKNOWN, why)
            return await answer(namespace, message)

        # In no queue group: only the leader listens, and one that was stopped must not be handed what is asked.
        await self._bus.serve(subject, request, handler, request_queue=self._requests.of_namespaces)

    async def _announce(self) -> None:
        every = subjects.ANY_TOKEN
        endpoints = [ServedEndpoint(f"jobs-{verb}", subjects.jobs_verb(every, verb)) for verb in subjects.JOB_VERBS]
        endpoints += [
            ServedEndpoint(f"endpoints-{verb}", subjects.endpoints_verb(every, verb))
            for verb in subjects.ENDPOINT_VERBS
        ]
        announcement = Announcement(
            "fluster-controller",
            self._controller_id,
            VERSION,
            description="Jobs and endpoints of a Fluster cluster",
            endpoints=endpoints,
        )
        await announcement.serve(self._bus)

    # ---- the cluster --------------------------------------------------------------------------------------

    async def _ensure(self, _namespace: Namespace, request: NamespaceRequest) -> NamespaceReply:
        here = f"the cluster's controller (fluster {VERSION})"
        if (apart := why_apart(request.wire, "the program that asks", here=here)) is not None:
            raise WireVersionError(apart)
        # Every namespace that is known has its buckets and streams.
        timing = self._timing
        return NamespaceReply(
            wire=SPOKEN,
            version=VERSION,
            endpoint_lease_s=timing.endpoint_lease_s,
            seat_lease_s=timing.seat_lease_s,
            object_bytes=object_limits(self._store.shares, MAX_OBJECT_BYTES),
        )

    async def _trim_calls(self, namespace: Namespace, request: TrimCalls) -> Done:
        await drop_calls(self._shared_bus, namespace, request.name, request.before)
        return Done()

    async def _workers(self, _namespace: Namespace, request: WorkerQuery) -> WorkerList:
        pace = present_pace()
        workers: list[WorkerStatus] = []
        for status in self._monitor.statuses():
            if request.after is not None and status.info.worker_id <= request.after:
                continue
            if len(workers) == request.limit:
                return WorkerList(workers=tuple(workers), more=True)
            workers.append(status if request.nodes else status.without_node())
            await pace.step()
        return WorkerList(workers=tuple(workers))


class EndpointRequests:
    """Registers, removes and finds endpoints, on the connection of the requests."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._readers: defaultdict[Namespace, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_READ_AT_ONCE))

    async def register(self, namespace: Namespace, endpoint: Endpoint) -> Endpoint:
        if endpoint.namespace != namespace:
            raise ServiceError(
                "WrongNamespace", f"endpoint of namespace {endpoint.namespace!r}, sent to {namespace!r}: send it there"
            )
        return await Registry(self._bus, namespace).register(endpoint)

    async def unregister(self, namespace: Namespace, request: UnregisterRequest) -> Done:
        registry = Registry(self._bus, namespace)
        endpoint = await registry.find(request.endpoint_id)
        if endpoint is not None:
            await registry.unregister(endpoint)
        return Done()

    async def lookup(self, namespace: Namespace, query: EndpointQuery) -> EndpointList:
        registry, pace = Registry(self._bus, namespace), present_pace()
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
