"""The settings of one worker, and of its containers."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fluster.local_setup import ProfileName
from fluster_bus.access.address import BusAddress
from fluster_bus.core.devices import Devices
from fluster_bus.core.names import is_secret_name
from fluster_bus.messages import Capacity, Namespace, WorkerId
from fluster_services.config import Timing, WorkerLimits
from fluster_services.worker.gpus.inventory import MaskStyle
from fluster_services.worker.linux.cgroups import Enforcement

_ULIMIT = re.compile(r"([a-z]+)=(-1|\d+)(?::(-1|\d+))?")
_NOT_PASSED_ON = ("FLUSTER_", "SLURM_")  # they say which program the owner of a local cluster is


@dataclass(frozen=True)
class ContainerSettings:
    """How a worker runs attempts in containers of a Docker Engine."""

    engine: str = "unix:///var/run/docker.sock"
    image: str = f"python:{sys.version_info.major}.{sys.version_info.minor}-slim"
    """Of jobs that name none."""
    network: str = "host"
    """A job reaches the bus by the address that the worker reaches it by."""
    profile: ProfileName = "default"
    ulimits: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {"core": (0, 0)})
    """{name: (soft, hard)}; others are as the engine has them, whose own limits are the most that it can give."""
    shm_bytes: int | None = None
    """Of /dev/shm; None: as much as the task's memory, of which it is a part."""
    mount_roots: tuple[str, ...] = ()
    """The folders of this machine below which jobs may have folders mounted."""
    timeout_s: float = 60.0
    """For an answer of the engine."""
    pull_timeout_s: float = 900.0
    """For the next step of a pull, of which there may be any number."""
    build_network: str | None = None
    """Of builds of images for packages; None: as the containers."""
    build_authorities: str | None = None
    """The path of certificates that pip is to trust in builds, beside those that the image trusts."""
    build_timeout_s: float = 1_800.0
    max_images: int = 50
    """Images that were built and are kept, beside those in use."""


def parse_ulimits(text: str) -> dict[str, tuple[int, int]]:
    """{name: (soft, hard)} from a text such as nofile=1024:65536,core=0. Raises ValueError."""
    found = {}
    for part in text.split(","):
        matched = _ULIMIT.fullmatch(part.strip())
        if matched is None:
            raise ValueError(f"invalid limit {part!r}: write NAME=SOFT:HARD, such as nofile=1024:65536")
        name, soft, hard = matched.groups()
        found[name] = (int(soft), int(hard or soft))
    return found


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
    # Of all tasks that are processes; None: the few variables that are safe.
    environment: Mapping[str, str] | None = None
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    device_ids: tuple[str, ...] = ()  # of the devices in `total`; 0, 1, … unless given
    other_devices: tuple[Devices, ...] = ()  # of other models, see `total`
    # (number, count): it finds GPUs once it serves, and has that part of them.
    detected_share: tuple[int, int] | None = None
    enforce_limits: Enforcement = "never"  # "auto": as far as the machine lets it; "always": or it does not start
    containers: ContainerSettings | None = None  # None: tasks are plain processes
    drain_timeout_s: float = 60.0  # after SIGTERM, before what still runs is handed back
    build_timeout_s: float = ContainerSettings.build_timeout_s  # for the environment of a job
    gpu_mask: MaskStyle = "index"  # how tasks learn their GPUs
    gpu_locks: str | None = None  # the folder with the locks of the machine's GPUs; None: the usual one
    advertised_host: str = "127.0.0.1"  # where tasks on other workers reach what listens on this machine


def program_environment(variables: Mapping[str, str], *, with_secrets: bool) -> dict[str, str]:
    """`variables` without those that are about the program itself, and its import path.

    Without `with_secrets`, those with names like *TOKEN*, *SECRET*, *KEY* and *PASSWORD* are left out as well.
    """
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(_NOT_PASSED_ON) and name != "PYTHONPATH" and (with_secrets or not is_secret_name(name))
    }
