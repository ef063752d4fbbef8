"""Answers what clients ask about endpoints."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import aclosing

from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import MessageTooLargeError, ServiceError
from fluster_bus.messages import Done, Endpoint, EndpointList, EndpointQuery, Namespace, UnregisterRequest
from fluster_bus.storage.registry import Registry
from fluster_services.controller.answers.requests import present_pace

# What one answer has of a registry, and how many such answers of a namespace are made at once: an endpoint in memory takes
# some ten times as much as its JSON.
_MAX_ENDPOINTS_BYTES, _READ_AT_ONCE = 4 << 20, 2


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
