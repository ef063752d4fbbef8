"""The daemon that keeps as many VMs as a cluster wants: one that died is replaced by another of its name."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, FlusterError
from fluster_bus.messages import Capacity, VMTrouble, WorkerId
from fluster_bus.running.backoff import Backoff
from fluster_services.daemon import run_daemon
from fluster_services.vm.backend import ClusterToJoin, VMBackend, VMError, VMInfo, VMStatus

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 10.0  # before a VM that died is replaced
_MAX_TROUBLE = 1_000  # characters
_SETTLED_S = 30.0  # one that was ready for so long may be replaced at once


@dataclass(frozen=True, kw_only=True)
class WantedVMs:
    """What the daemon is to keep."""

    backend: VMBackend
    resources: Mapping[WorkerId, Capacity]  # of each; what is 0 is as the backend has it
    boot_timeout_s: float


def run_vms(
    wanted: WantedVMs,
    cluster: Callable[[Bus], ClusterToJoin],
    *,
    address: BusAddress,
    ready_fd: int | None,
    owner_fd: int,
    log_file: Path,
    log_bytes: int,
) -> None:
    """Keep the VMs until SIGTERM, or until the owner is gone; then none is left.

    Lines that tell how many are ready are written to `ready_fd`, before the empty one when all are. Exits with status 1 and one line
    when one of them does not come up at the start.
    """
    progress_fds = [ready_fd] if ready_fd is not None else []

    def tell(text: str) -> None:
        log.info(text)
        for descriptor in progress_fds:
            os.write(descriptor, f"{text}\n".encode())

    async def serve(bus: Bus, ready: Callable[[], None]) -> None:
        def all_ready() -> None:
            progress_fds.clear()
            ready()

        try:
            await _Keeping(wanted, tell).run(cluster(bus), all_ready)
        except* VMError as errors:
            sys.stderr.write(f"{_first(errors)}\n")
            raise

    run_daemon(
        serve, address=address, name="vms", ready_fd=ready_fd, owner_fd=owner_fd, log_file=log_file, log_bytes=log_bytes
    )


def _first(errors: BaseExceptionGroup[VMError]) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


class _Keeping:
    """The VMs of one cluster, from its connection's beginning to its end."""

    def __init__(self, wanted: WantedVMs, tell: Callable[[str], None]) -> None:
        self._wanted = wanted
        self._tell = tell
        self._ready: set[WorkerId] = set()  # those that were so once
        self._bus: Bus | None = None

    async def run(self, cluster: ClusterToJoin, all_ready: Callable[[], None]) -> None:
        backend = self._wanted.backend
        self._bus = cluster.bus
        await backend.open(cluster)
        try:
            self._tell_ready()
            async with asyncio.TaskGroup() as tasks:
                for vm_id in self._wanted.resources:
                    tasks.create_task(self._keep(vm_id, all_ready))
        finally:
            await backend.close()

    def _tell_ready(self) -> None:
        self._tell(f"{len(self._ready)} of {len(self._wanted.resources)} VMs are ready")

    async def _keep(self, vm_id: WorkerId, all_ready: Callable[[], None]) -> None:
        backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
        while True:
            began = time.monotonic()
            try:
                end = await self._live(vm_id, all_ready)
            except FlusterError as error:
                if vm_id not in self._ready:
                    raise
                log.warning("VM %s could not be replaced: %s", vm_id, error)
                await self._tell_trouble(vm_id, f"its VM is gone and could not be replaced: {error}")
            else:
                log.warning("VM %s is over (%s): %s", vm_id, end.status, end.message or "its worker has left")
                if end.status is VMStatus.STOPPED:  # as its worker was asked to
                    return
                await self._tell_trouble(vm_id, "its VM is gone, and is being replaced")
            if time.monotonic() - began >= _SETTLED_S:
                backoff.reset()
            else:
                backoff.lengthen()
            await asyncio.sleep(backoff.pause_s)

    async def _tell_trouble(self, vm_id: WorkerId, trouble: str) -> None:
        """Have `explain` say why that worker is missing."""
        assert self._bus is not None  # noqa: S101 - it runs
        counts_for_s = self._wanted.boot_timeout_s + _LAST_PAUSE_S
        told = VMTrouble(vm_id=vm_id, trouble=trouble[:_MAX_TROUBLE], counts_for_s=min(counts_for_s, 3_600))
        try:
            await self._bus.publish(subjects.vm_trouble(), told.to_json())
        except BusError as error:
            log.info("what is wrong with VM %s is not told: %s", vm_id, error)

    async def _live(self, vm_id: WorkerId, all_ready: Callable[[], None]) -> VMInfo:
        """How one VM of that name ends that begins here."""
        backend = self._wanted.backend
        if vm_id in {each.vm_id for each in await backend.list_vms()}:
            await backend.release(vm_id)
        await backend.allocate(self._wanted.resources[vm_id], vm_id=vm_id)
        await backend.wait_ready(vm_id, self._wanted.boot_timeout_s)
        await self._tell_trouble(vm_id, "")
        if vm_id not in self._ready:
            self._ready.add(vm_id)
            self._tell_ready()
            if len(self._ready) == len(self._wanted.resources):
                all_ready()
        return await backend.wait_over(vm_id)
