"""What one worker is told when it is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fluster_bus.access.address import BusAddress
from fluster_bus.core.devices import Devices
from fluster_bus.messages import Capacity, Namespace, WorkerId
from fluster_services.config import Timing, WorkerLimits
from fluster_services.worker.contract.container import ContainerSettings
from fluster_services.worker.linux.cgroups import Enforcement


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker needs to know."""

    address: BusAddress  # with the credentials of the role "service"
    worker_id: WorkerId
    state_dir: Path  # a worker that comes back with the same folder and id adopts what it started
    total: Capacity
    job_credentials: Mapping[Namespace, BusAddress]
    job_credentials_dir: Path | None = None  # what comes into this folder has the worker serve further namespaces
    timing: Timing = field(default_factory=Timing)
    working_dir: Path | None = None
    python_path: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = (
        None  # of all tasks that are processes; None: the few variables that are safe
    )
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    device_ids: tuple[str, ...] = ()  # of the devices in `total`; 0, 1, … unless given
    other_devices: tuple[Devices, ...] = ()  # of other models, see `total`
    detected_share: tuple[int, int] | None = (
        None  # (number, count): it finds GPUs once it serves, and has that part of them
    )
    enforce_limits: Enforcement = "never"  # "auto": as far as the machine lets it; "always": or it does not start
    containers: ContainerSettings | None = None  # None: tasks are plain processes
    drain_timeout_s: float = 60.0  # after SIGTERM, before what still runs is handed back
    build_timeout_s: float = ContainerSettings.build_timeout_s  # for the environment of a job
    advertised_host: str = "127.0.0.1"  # where tasks on other workers reach what listens on this machine
