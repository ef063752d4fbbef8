"""The contract of everything that has machines to give: what a VM is to be, and what can be asked about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import FlusterError
from fluster_bus.messages import Capacity, Namespace, WorkerId
from fluster_services.config import Timing, WorkerLimits


class VMError(FlusterError):
    """A backend did not do what it was asked for; the text tells what, and why."""


class UnknownVMError(VMError, LookupError):
    """The backend has no VM of that id."""


class VMFailedError(VMError):
    """The VM is over, or never came up."""


class VMTimeoutError(VMError, TimeoutError):
    """The VM was not ready in time. It may still become so: it is not released by that."""


class VMStatus(StrEnum):
    """How far a VM is."""

    BOOTING = "booting"
    READY = "ready"
    """Its worker has registered on the bus."""
    STOPPED = "stopped"
    """Its worker has drained and left."""
    FAILED = "failed"
    """It did not come up, or died."""


@dataclass(frozen=True, kw_only=True)
class VMInfo:
    """A VM at one moment. Its worker is known on the bus by the same id."""

    vm_id: WorkerId
    status: VMStatus
    resources: Capacity
    """What its worker offers."""
    exit_code: int | None = None
    """The exit code once it is over, where it is known; 128 + n is signal n."""
    message: str = ""
    """Why it failed, with the last lines of its output."""


@dataclass(frozen=True, kw_only=True)
class ClusterToJoin:
    """What a backend has to know about the cluster whose workers its VMs run."""

    bus: Bus
    """A connection with the role "service": by it a backend sees which workers have registered."""
    address: BusAddress
    """Where the workers connect, with their role."""
    job_credentials: Mapping[Namespace, BusAddress]
    """Credentials for jobs, of the namespaces that VMs may serve."""
    state_dir: Path
    """A folder on this machine, for what a backend keeps here."""
    timing: Timing = field(default_factory=Timing)
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    drain_timeout_s: float = 60.0
    """How long a worker drains after SIGTERM, before what still runs is handed back."""
    build_timeout_s: float = 1_800.0
    """How long the environment of a job may take to build."""
    working_dir: Path | None = None
    """The working directory of tasks, where VMs see the folders of this machine."""
    python_path: tuple[str, ...] = ()
    """Folders that are added to the import path of tasks, where VMs see the folders of this machine."""
    device_ids: Mapping[WorkerId, tuple[str, ...]] = field(default_factory=dict)
    """The ids of this machine's GPUs that each VM has, for backends whose VMs are on this machine."""
    log_dir: Path | None = None
    """Where the output of each VM goes: `<id>.log`."""


class VMBackend(Protocol):
    """Allocates machines, each of which runs one worker that joins the cluster by its own connection to the bus.

    Everything but `open` raises VMError before `open` and after `close`. What a VM still runs is lost when it is released:
    drain its worker first. Each method may be called by several tasks of the event loop that has called `open`.
    """

    async def open(self, cluster: ClusterToJoin) -> None:
        """Be ready to allocate, with nothing left of programs that died. Raises VMError."""

    async def close(self) -> None:
        """Release everything. Raises VMError for what could not be."""

    async def allocate(self, resources: Capacity | None = None, *, vm_id: WorkerId | None = None) -> VMInfo:
        """A VM that boots, with these resources; what is not given, or 0, is as the backend has it.

        Its id is made up unless given. Raises VMError when a VM has that id, or none can be so large.
        """

    async def release(self, vm_id: WorkerId) -> None:
        """End the VM, whatever it does, and return when nothing of it is left; one that was released stays so.

        Raises UnknownVMError, and VMError when it could not be ended: then it can be tried again.
        """

    async def get_status(self, vm_id: WorkerId) -> VMInfo:
        """How the VM is. Raises UnknownVMError."""

    async def list_vms(self) -> list[VMInfo]:
        """All that are allocated and not released, the oldest first."""

    async def wait_ready(self, vm_id: WorkerId, timeout_s: float = 300.0) -> VMInfo:
        """Return when its worker has registered. Raises UnknownVMError, VMFailedError, VMTimeoutError."""

    async def wait_over(self, vm_id: WorkerId) -> VMInfo:
        """Return when it has stopped, failed or been released. Raises UnknownVMError."""
