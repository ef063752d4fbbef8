"""Watches a worker's GPUs: looks at them at intervals, and takes those out of its capacity that cannot be given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from fluster_bus.core.errors import FaultLog
from fluster_bus.messages import WorkerId
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.contract.runtime import RunningTask
from fluster_services.worker.engine import has_container
from fluster_services.worker.engine_images import Images
from fluster_services.worker.gpus.allocator import GpuAllocator, GpuLease
from fluster_services.worker.gpus.holders import Holder
from fluster_services.worker.gpus.locks import GpuTakenError

log = logging.getLogger(__name__)

_INTERVAL_S = 4.0  # a GPU at which the driver hangs is known 5 s later


class GpuWatch:
    """Watches the GPUs of one worker, and leases them to its attempts through the allocator. `on_change` is awaited when others are withheld than before, or for another reason."""

    def __init__(
        self,
        worker_id: WorkerId,
        allocator: GpuAllocator,
        ledger: Ledger,
        *,
        running: Mapping[str, RunningTask],
        grace_s: float,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        self._worker_id = worker_id
        self._allocator = allocator
        self._ledger = ledger
        self._running = running
        self._grace_s = grace_s
        self._on_change = on_change
        self._told: Mapping[str, str] = {}
        self._stopped: set[str] = set()  # attempts whose GPUs are of no use
        self._looking = asyncio.Lock()
        self._faults = FaultLog(log)

    @property
    def withheld(self) -> Mapping[str, str]:
        """{id: why no task is given it}"""
        return self._allocator.withheld

    def told(self) -> list[str]:
        """Which GPUs are withheld, and why."""
        return self._allocator.told(self._ids)

    def problems(self) -> list[str]:
        """What an operator should know of this worker's GPUs."""
        return self._allocator.problems(self._ids)

    async def run(self) -> None:
        """Look now and then, until cancelled; at once first."""
        while self._allocator.has_gpus(self._ids):
            await self.look()
            await asyncio.sleep(_INTERVAL_S)
        await self._allocator.close()

    async def look(self) -> None:
        """Look how the GPUs are, and who has them, and do what follows."""
        async with self._looking:
            await self._look(lambda: self._ledger.devices_in_use)
            self._stop_unwell()
            await self._follow()

    async def _look(self, in_use: Callable[[], frozenset[str]]) -> None:
        # Notes in locks are written by others: whatever one may have in it, it ends neither this worker nor an attempt.
        with self._faults.contained("the GPUs of worker %s stay as they were at the last look", self._worker_id):
            await self._allocator.look(self._ids, in_use)

    async def learn_names(self) -> None:
        """Know by their UUIDs what attempts were given by index, by an earlier version of this worker."""
        indices = {each for each in self._ledger.devices_in_use if each.isdecimal()} - set(self._ids)
        if (
            self._ids and indices
        ):  # else the driver, which may be slow to answer, is not asked before the first heartbeat
            await self._allocator.read()
            self._ledger.rename_devices(self._allocator.names_of(indices))

    async def lease(self, attempt: str) -> GpuLease:
        """What an attempt is to be started with. Raises GpuTakenError; then that GPU is out of the capacity."""
        devices = self._ledger.devices(attempt)
        if not self._ids:
            return GpuLease(devices)
        try:
            return await self._allocator.lease(devices)
        except GpuTakenError:
            await self._follow()
            raise

    async def on_taken(self, attempt: str) -> None:
        """Its keeper found that another holds a GPU: when this returns, that is out of the capacity, unless it is free again."""
        own = frozenset(self._ledger.devices(attempt))
        async with self._looking:
            await self._look(lambda: self._ledger.devices_in_use - own)
            await self._follow()

    async def why_held(self, attempt: str) -> str | None:
        """Why an attempt that has room cannot have its GPUs at this moment; they are out of the capacity then."""
        if not self._ids:
            return None
        why = self._allocator.why_held(self._ledger.devices(attempt))
        if why is not None:
            await self._follow()
        return why

    def uuids(self, attempt: str) -> tuple[str, ...]:
        """Of an attempt's GPUs; what has no UUID that is known is left out."""
        return self._allocator.uuids(self._ledger.devices(attempt)) if self._ids else ()

    def withheld_by_uuid(self) -> dict[str, str]:
        """{UUID: why no task is given it}"""
        return {uuid: why for each, why in self.withheld.items() for uuid in self._allocator.uuids((each,))}

    @property
    def _ids(self) -> tuple[str, ...]:
        """Of all GPUs of this worker: chips of other kinds are none of this one's business."""
        return self._ledger.device_ids if self._ledger.total.device == "gpu" else ()

    async def _follow(self) -> None:
        is_other = self._ledger.withhold(self._allocator.withheld)
        if is_other or self._told != self._allocator.withheld:
            self._told = self._allocator.withheld
            await self._on_change()

    def _stop_unwell(self) -> None:
        """End the attempts whose GPUs are of no use, to be tried elsewhere."""
        self._stopped &= self._running.keys()
        for key, running in self._running.items():
            devices = self._ledger.devices(key)
            told = [self._allocator.described(each) for each in devices if each in self._allocator.unwell]
            if told and key not in self._stopped:
                self._stopped.add(key)
                why = f"{'; '.join(told)} (worker {self._worker_id})"
                log.warning("%s is stopped: %s", key, why)
                running.kill(self._grace_s, why, preempted=True)


def container_finder(config: WorkerConfig, images: Images | None) -> Callable[[Holder], bool | None]:
    """Tells whether the container of a holder of a GPU is there; of this worker's own engine, and no other that a note may name."""

    def find(holder: Holder) -> bool | None:
        if config.containers is None or images is None or holder.engine != config.containers.engine:
            return None
        return has_container(config.containers.engine, images.api_version, holder.container)

    return find
