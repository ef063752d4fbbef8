"""The actors and pool workers that jobs deploy, found by what they register: a job's record would be many times as much to read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from fluster.cluster.jobs.job_states import JobStates
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import FlusterError
from fluster_bus.core.fault_log import FaultLog
from fluster_bus.messages import Endpoint, JobId, Namespace

log = logging.getLogger(__name__)

_MAX_SEEN = 10_000  # jobs; one that was forgotten is only looked at again
_MAX_WAITING = 1_000  # jobs that are still to be looked at
_MAX_GENERATIONS = 16

Found = Callable[[JobId, str, Sequence[JobId]], None]


class DeployedByJobs:
    """Calls `found` with a job, the name that its tasks serve, and the jobs above it, the nearest first. Lives on the bus's loop."""

    def __init__(self, bus: Bus, namespace: Namespace, states: JobStates, found: Found) -> None:
        self._bus = bus
        self._namespace = namespace
        self._states = states
        self._found = found
        self._faults = FaultLog(log)
        self._seen: OrderedDict[JobId, None] = OrderedDict()
        self._new: asyncio.Queue[tuple[JobId, str]] = asyncio.Queue(_MAX_WAITING)
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Find what registers from now on; to be called as often as wanted."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="look for what jobs deploy")

    async def settle(self) -> None:
        """Return when all that has registered is looked at, or cannot be."""
        if self._looking is not None and self._bus.connected:
            settled = asyncio.ensure_future(self._new.join())
            try:
                await asyncio.wait([settled, self._looking], return_when=asyncio.FIRST_COMPLETED)
            finally:
                settled.cancel()

    def close(self) -> None:
        """Find nothing more."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        try:
            await self._bus.subscribe(subjects.watch_endpoints(self._namespace), self._on_endpoint)
        except FlusterError as error:
            log.info("what jobs deploy is not shown: %s", error)
            return
        while True:
            job_id, name = await self._new.get()
            try:
                if above := await self._above(job_id):
                    self._found(job_id, name, above)
            except FlusterError as error:  # it is over and forgotten, or no controller can tell
                log.info("which job has deployed %s is not known: %s", job_id, error)
            finally:
                self._new.task_done()

    def _on_endpoint(self, delivery: Delivery) -> None:
        with self._faults.contained("what %s registers is not shown", delivery.subject):
            if delivery.data:  # else it is gone
                self._hear(Endpoint.from_json(delivery.data))

    def _hear(self, endpoint: Endpoint) -> None:
        if endpoint.job_id is None or endpoint.job_id in self._seen:
            return
        with contextlib.suppress(asyncio.QueueFull):  # then it is looked at when it registers again
            self._new.put_nowait((endpoint.job_id, endpoint.name))
            self._seen[endpoint.job_id] = None
            if len(self._seen) > _MAX_SEEN:
                self._seen.popitem(last=False)

    async def _above(self, job_id: JobId) -> list[JobId]:
        above: list[JobId] = []
        while len(above) < _MAX_GENERATIONS:
            [info] = await self._states.get([above[-1] if above else job_id])
            if info.parent is None:
                break
            above.append(info.parent)
        return above
