"""The endpoint registry: which programs serve a name, written by those and watched by callers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    CredentialsError,
    DisconnectedError,
    NoRespondersError,
    RequestTimeoutError,
    StreamNotFoundError,
    WireVersionError,
)
from fluster_bus.core.names import EndpointId, JobId, Namespace, WorkerId
from fluster_bus.core.version import VERSION
from fluster_bus.messages.endpoints import Endpoint
from fluster_bus.messages.parts.wire_range import SPOKEN, why_apart
from fluster_bus.messages.requests import NamespaceReply, NamespaceRequest
from fluster_bus.storage.streams import endpoint_key, endpoints_table, seats_table

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

log = logging.getLogger(__name__)

# A server outside of any job keeps its endpoint alive by writing it again; the controller removes it otherwise.
LEASE_S = 10.0


def new_endpoint_id() -> EndpointId:
    """An id that no other endpoint has."""
    return EndpointId(secrets.token_hex(8))


class Registry:
    """The endpoints of one namespace."""

    lease_s = LEASE_S  # of those that belong to no job; a cluster may tell another
    told_seat_lease_s: float | None = None  # of actors that have one instance; None: the cluster was not asked yet

    def __init__(self, bus: Bus, namespace: str) -> None:
        self._bus = bus
        self._namespace = namespace
        self.table = endpoints_table(bus, namespace)
        self.seats = seats_table(bus, namespace)

    async def learn_leases(self) -> None:
        """Ask the cluster how long leases are, and whether it has the namespace. Raises ServiceError, BusError.

        A WireVersionError when the cluster and this program have no version of the wire in common.
        """
        asked = NamespaceRequest(wire=SPOKEN)
        told = await self._bus.ask(subjects.ensure_namespace(self._namespace), asked, NamespaceReply)
        there = f"the cluster's controller (fluster {told.version or 'of an older version'})"
        if (apart := why_apart(told.wire, there, here=f"this program (fluster {VERSION})")) is not None:
            raise WireVersionError(apart)
        self.lease_s = told.endpoint_lease_s or LEASE_S
        self.told_seat_lease_s = told.seat_lease_s or LEASE_S

    async def seat_lease_s(self) -> float:
        """For how long an actor that has one instance may be silent. Ten seconds where no controller answers now."""
        if self.told_seat_lease_s is None:  # jobs do not ask when they connect
            try:
                await self.learn_leases()
            except (NoRespondersError, RequestTimeoutError, DisconnectedError) as error:
                log.info("no controller says how long the leases of actors are: %s", error)
        return self.told_seat_lease_s or LEASE_S

    def endpoint(
        self,
        name: str,
        address: str,
        *,
        job_id: JobId | None = None,
        task: int = 0,
        attempt: int = 0,
        worker_id: WorkerId | None = None,
        metadata: Mapping[str, str] | None = None,
        endpoint_id: EndpointId | None = None,
    ) -> Endpoint:
        """An endpoint to register; one that belongs to no job gets a lease."""
        return Endpoint(
            endpoint_id=endpoint_id or new_endpoint_id(),
            name=name,
            address=address,
            namespace=Namespace(self._namespace),
            job_id=job_id,
            task=task,
            attempt=attempt,
            worker_id=worker_id,
            metadata=metadata or {},
            lease_s=None if job_id else self.lease_s,
        )

    async def register(self, endpoint: Endpoint) -> Endpoint:
        """Make it known, or renew its lease."""
        await self.table.put(endpoint_key(endpoint), endpoint)
        return endpoint

    async def unregister(self, endpoint: Endpoint) -> None:
        """Take it away."""
        await self.table.delete(endpoint_key(endpoint))

    async def lookup(self, name: str) -> list[Endpoint]:
        """Everyone registered under `name`, the oldest first."""
        async with aclosing(self.found(name)) as endpoints:
            return [each async for each in endpoints]

    async def is_durable(self, name: str) -> bool:
        """Whether calls to `name` are stored, also while no actor serves it."""
        try:
            row = await self.seats.get(buckets.seat_key(name))
        except (StreamNotFoundError, CredentialsError):  # a cluster from before there were any
            return False
        return row is not None and row.value.is_durable

    async def list(self, prefix: str = "") -> list[Endpoint]:
        """Everyone whose name begins with `prefix`."""
        async with aclosing(self.found(prefix=prefix)) as endpoints:
            return [each async for each in endpoints]

    async def found(self, name: str | None = None, *, prefix: str = "") -> AsyncGenerator[Endpoint]:
        """Everyone of that name, or else whose name begins with `prefix`, one after the other."""
        keys = subjects.ANY_TAIL if name is None else buckets.endpoints_named(name)
        async with aclosing(self.table.each(keys)) as rows:
            async for row in rows:
                if name is not None or row.value.name.startswith(prefix):
                    yield row.value

    async def find(self, endpoint_id: str) -> Endpoint | None:
        """The endpoint with this id."""
        async with aclosing(self.table.each(buckets.endpoints_with_id(endpoint_id))) as rows:
            async for row in rows:
                return row.value
        return None
