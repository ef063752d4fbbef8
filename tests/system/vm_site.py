"""Where VM backends are tested: a cluster without workers, and a way to see and to kill what a backend has made."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from fluster_bus.connection.bus import Bus
from fluster_bus.core.roles import Role
from fluster_bus.messages import WorkerId
from fluster_bus.storage.streams import workers_table
from fluster_services.vm import ClusterToJoin, DockerBackend, LocalBackend, VMBackend
from fluster_services.vm.container import VM_LABEL
from tests.docker_engine import Engine
from tests.system.daemons import DEFAULT, Daemons

Kind = Literal["local", "docker"]
CPUS, MEMORY = 2.0, 1 << 30


@dataclass(frozen=True)
class VMSite:
    """One kind of backend, opened for the cluster of `daemons`."""

    daemons: Daemons
    engine: Engine | None
    backend: VMBackend
    bus: Bus

    @property
    def kind(self) -> Kind:
        return "local" if self.engine is None else "docker"

    def container(self, vm_id: WorkerId) -> dict[str, Any]:
        """All that the engine knows about a VM."""
        assert self.engine is not None
        found = self.engine.containers(**{VM_LABEL: vm_id})
        assert len(found) == 1, found
        inspected: dict[str, Any] = self.engine.client.inspect_container(found[0]["Id"])
        return inspected

    async def machine(self, vm_id: WorkerId) -> psutil.Process:
        """The first process of a VM that is ready, seen from here."""
        if self.engine is not None:
            return psutil.Process(self.container(vm_id)["State"]["Pid"])
        parent = (await self.worker(vm_id)).parent()
        assert parent is not None
        return parent

    async def worker(self, vm_id: WorkerId) -> psutil.Process:
        """The worker of a VM that is ready, seen from here."""
        if self.engine is not None:
            (looks_after,) = (await self.machine(vm_id)).children()
            return next(each for each in looks_after.children() if each.name() == "fluster-worker")
        row = await workers_table(self.bus).get(vm_id)
        assert row is not None
        return psutil.Process(row.value.pid)

    def left(self) -> list[str]:
        """What there is of any VM."""
        if self.engine is not None:
            return [each["Names"][0] for each in vms(self.engine)]
        return [each.name() for each in self.daemons.family.named("fluster-vm")]


@asynccontextmanager
async def opened(daemons: Daemons, engine: Engine | None) -> AsyncIterator[VMSite]:
    """A site whose VMs are gone afterwards."""
    address = daemons.server.credentials(Role.SERVICE)
    bus = await Bus.connect(address, name="test")
    backend: VMBackend = LocalBackend(cpus=CPUS, memory=MEMORY)
    if engine is not None:
        backend = DockerBackend(cpus=CPUS, memory=MEMORY, image=engine.image, docker_host=engine.host)
    try:
        await backend.open(cluster_to_join(daemons, bus))
        try:
            yield VMSite(daemons, engine, backend, bus)
        finally:
            await backend.close()
    finally:
        await bus.close()


def cluster_to_join(daemons: Daemons, bus: Bus) -> ClusterToJoin:
    logs = daemons.folder / "logs"
    logs.mkdir(exist_ok=True)
    return ClusterToJoin(
        bus=bus,
        address=daemons.server.credentials(Role.SERVICE),
        job_credentials={DEFAULT: daemons.server.credentials(Role.JOB, DEFAULT)},
        state_dir=daemons.folder,
        timing=daemons.timing,
        working_dir=Path.cwd(),
        python_path=tuple(sys.path),
        log_dir=logs,
    )


def vms(engine: Engine, *, running: bool = False) -> list[dict[str, Any]]:
    """The containers that are VMs."""
    found = [each for each in engine.containers() if VM_LABEL in each["Labels"]]
    return [each for each in found if not running or each["State"] == "running"]


def docker_backend(engine: Engine, **fields: Any) -> DockerBackend:
    """Containers of 4 CPUs."""
    return DockerBackend(**{"image": engine.image, "docker_host": engine.host, "cpus": 4.0, "memory": "4GB", **fields})
