"""Why nobody serves a pool, for the errors of calls that found nobody."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable

from fluster.actors.membership.census import is_coming_back, why_nobody_serves
from fluster.actors.membership.rosters import Rosters
from fluster.actors.protocol.calls import Done
from fluster.errors import ActorDiedError, ActorNotFoundError
from fluster_bus.connection.carrier import Carrier
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError
from fluster_bus.core.names import near
from fluster_bus.messages import JobId, JobInfo, StatusReply, StatusRequest
from fluster_bus.storage.registry import Registry

log = logging.getLogger(__name__)

_JOBS_TIMEOUT_S = 2.0


class Explanations:
    """They come of the registry, and of what the controller tells of the jobs of actors."""

    def __init__(self, bus: Carrier, registry: Registry, namespace: str, rosters: Rosters) -> None:
        self._bus = bus
        self._registry = registry
        self._namespace = namespace
        self._rosters = rosters

    async def jobs(self, job_ids: Iterable[JobId]) -> list[JobInfo]:
        """Those of the jobs of which the controller tells; none when it does not answer at once."""
        request = StatusRequest(job_ids=tuple(sorted(job_ids)))
        if not request.job_ids:
            return []
        try:
            subject = subjects.jobs_verb(self._namespace, "status")
            answer = await self._bus.request(subject, request.to_json(), timeout_s=_JOBS_TIMEOUT_S)
            return list(StatusReply.from_json(answer.data).jobs)
        except BusError as error:
            log.info("the state of the jobs of actors cannot be read: %s", error)
            return []

    async def errors(self, done: Iterable[Done]) -> AsyncIterator[tuple[Done, Exception]]:
        """For each of these calls an error with names that are near, and with what to do."""
        try:
            names = {endpoint.name for endpoint in await self._registry.list()}
        except BusError as error:
            log.info("the registry could not be read: %s", error)
            names = set()
        for each in done:
            name = each.call.pool
            roster = self._rosters.get(name)
            jobs = await self.jobs(roster.jobs) if roster is not None else []
            died = why_nobody_serves(name, jobs)
            if died is not None:
                yield each, ActorDiedError(f"{each.error}: {died}")
                continue
            hint = near(name, names) if name not in names and not is_coming_back(name, jobs) else ""
            yield each, ActorNotFoundError(f"{each.error}{hint or '; pool.wait_for_size(1) waits for one'}")
