"""The container that an attempt runs in: what the engine is asked for, and which folders it may see, decided without one."""

from __future__ import annotations

import importlib
import posixpath
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fluster.breakpoints import with_hook
from fluster_services.worker.contract.container_output import INIT_VARIABLES
from fluster_services.worker.contract.faults import LaunchError
from fluster_services.worker.linux.limits import MAX_PIDS, MIN_QUOTA_US, PERIOD_US, Limits

if TYPE_CHECKING:
    from fluster.local_setup import ProfileName
    from fluster_services.worker.contract.config import ContainerSettings

OWN_MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"  # version of Python, such as 3.12

INNER_FOLDER = "/fluster"  # in the container: what an attempt's directory is to a task without one
WORKING_FOLDER = f"{INNER_FOLDER}/work"
_WORKSPACE_PATH = (WORKING_FOLDER, f"{WORKING_FOLDER}/src")
LIBRARIES_FOLDER = "/opt/fluster"
_LABEL = "fluster"
STATE_LABEL = f"{_LABEL}.state"
NOBODY = 65_534
_MIN_FREE_SHM_BYTES = 1 << 30  # where nothing is held to its memory
_LOG_OPTIONS = {"max-size": "64m", "max-file": "2", "compress": "false"}
_SCRATCH = ("/tmp", "/var/tmp")  # noqa: S108 - in the container, each its own
# What libraries for GPUs ask for: they lock memory that devices read, and have large frames on their stacks.
_GPU_ULIMITS = {"memlock": (-1, -1), "stack": (64 << 20, 64 << 20)}
_SITE = re.compile(r"/(site|dist)-packages$")
_PACKAGES = ("fluster", "fluster_bus", "fluster_services")
TAKEN = tuple(map(Path, (INNER_FOLDER, LIBRARIES_FOLDER, "/proc", "/sys", "/dev")))  # places in a container
# A process that reaches one of these owns the machine, whichever engine is used.
_ENGINES = (Path("/run/docker.sock"), Path("/run/containerd"), Path("/run/podman"))


@dataclass(frozen=True)
class Container:
    """What its keeper needs to know to have an attempt run in a container."""

    engine: str
    api_version: str
    name: str
    body: dict[str, object]  # of the request that has it made
    files: dict[str, str] = field(default_factory=dict)  # {name in the task's folder: the file that is copied there}
    owner: list[int] | None = None  # user and group who get the task's folder; None: as it is made
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Libraries:
    """What of this machine can be imported in a container."""

    mounts: Mapping[str, str]  # {where it lies here: where it lies in the container}
    python_path: tuple[str, ...]  # in the container


def own_libraries(python_path: Sequence[str]) -> Libraries:
    """Fluster and the packages that this process has; nothing else that it could import."""
    mounts = {
        path: f"{LIBRARIES_FOLDER}/packages/{number}" for number, path in enumerate(filter(_SITE.search, python_path))
    }
    found = [*mounts.values()]
    for name in _PACKAGES:
        folder = Path(importlib.import_module(name).__path__[0])
        if str(folder.parent) not in mounts:  # a checkout
            mounts[str(folder)] = f"{LIBRARIES_FOLDER}/own/{name}"
            if f"{LIBRARIES_FOLDER}/own" not in found:
                found.append(f"{LIBRARIES_FOLDER}/own")
    return Libraries(mounts, tuple(found))


def given_libraries(python_path: Sequence[str], *, secret: Sequence[Path]) -> Libraries:
    """The folders that the worker's configuration gives to all tasks, but none that has one of the `secret` places in it."""
    places = [place.resolve() for place in secret]
    folders = [
        path
        for path in python_path
        if Path(path).is_dir() and not any(place.is_relative_to(Path(path).resolve()) for place in places)
    ]
    mounts = {path: f"{LIBRARIES_FOLDER}/given/{number}" for number, path in enumerate(folders)}
    return Libraries(mounts, tuple(mounts.values()))


@dataclass(frozen=True)
class ContainerSpec:
    """What an attempt is, as far as its container is concerned."""

    key: str  # <ns>.<job>.<task>.<attempt>
    image: str
    command: list[str] | None  # None: a callable
    env: Mapping[str, str]
    limits: Limits
    memory: int | None = None  # that it asked for, whether it is held to that or not
    devices: Sequence[str] = ()  # GPUs
    mounts: Mapping[str, str] = field(default_factory=dict)  # {path in the container: path here}, checked
    exact_image: str | None = None  # a name of the same image that means no other
    has_workspace: bool = False  # in its folder
    begins_in: str = ""  # a path in that


def labels(key: str, state: Path) -> dict[str, str]:
    """By which a container is found again."""
    namespace, job, task, attempt = key.split(".")
    names = {"namespace": namespace, "job": job, "task": task, "attempt": attempt}
    return {**{f"{_LABEL}.{name}": value for name, value in names.items()}, STATE_LABEL: str(state)}


def create_body(
    spec: ContainerSpec,
    settings: ContainerSettings,
    *,
    state: Path,
    task_folder: Path,
    user: tuple[int, int],
    own: Libraries,
    given: Libraries,
) -> dict[str, object]:
    """The request that has the container made (https://docs.docker.com/reference/api/engine/, ContainerCreate).

    A task that should escape from it has: no capability, no way to get one, an ordinary user, a root that cannot be written
    to, Docker's own system call filter, and nothing of the machine but its folder and read-only packages. Never the engine's socket.
    """
    is_callable = spec.command is None
    libraries = {**own.mounts, **given.mounts} if is_callable else {}
    mounts = [bind(str(task_folder), INNER_FOLDER, is_writable=True)]
    mounts += [bind(source, target) for source, target in libraries.items()]
    mounts += [bind(source, target) for target, source in spec.mounts.items()]
    environment = with_hook(
        {
            "PYTHONUNBUFFERED": "1",
            **INIT_VARIABLES,
            "HOME": _SCRATCH[0],  # the image's own user may have none, or one that cannot be written to
            **({"PYTHONPATH": ":".join(_WORKSPACE_PATH)} if spec.has_workspace and not is_callable else {}),
            "NVIDIA_VISIBLE_DEVICES": ",".join(spec.devices) or "void",
            **spec.env,
        }
    )
    command = spec.command or ["python3", "-c", _BOOT, OWN_MINOR, spec.image, *own.python_path]
    return {
        "Image": spec.exact_image or spec.image,
        "Entrypoint": command,
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "WorkingDir": posixpath.join(WORKING_FOLDER, spec.begins_in) if spec.begins_in else WORKING_FOLDER,
        "Healthcheck": {"Test": ["NONE"]},  # the image's own is for what the image would run
        "Labels": labels(spec.key, state),
        **({} if settings.profile == "trusted" else {"User": f"{user[0]}:{user[1]}"}),
        "HostConfig": {
            "Init": True,  # as process 1, a program would not be ended by SIGTERM
            "NetworkMode": settings.network,
            "Mounts": mounts,
            "LogConfig": {"Type": "local", "Config": _LOG_OPTIONS},
            **_hardening(settings.profile),
            **_limits(spec.limits),
            "ShmSize": settings.shm_bytes or spec.limits.memory or max(spec.memory or 0, _MIN_FREE_SHM_BYTES),
            "Ulimits": _ulimits(settings),
            **device_requests(spec.devices),
        },
    }


def bind(source: str, target: str, *, is_writable: bool = False) -> dict[str, object]:
    """A place of this machine for the request that has a container made."""
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": not is_writable}


def _hardening(profile: ProfileName) -> dict[str, object]:
    """What takes from a task what it has no need of. The trusted ones are as the image and the engine have them."""
    if profile == "trusted":
        return {}
    return {
        "ReadonlyRootfs": True,
        "Tmpfs": dict.fromkeys(_SCRATCH, "rw,exec,nosuid,nodev,mode=1777"),
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],  # and no seccomp=…: the engine's own filter stays on
    }


def _ulimits(settings: ContainerSettings) -> list[dict[str, object]]:
    asked = {**(_GPU_ULIMITS if settings.profile == "gpu" else {}), **settings.ulimits}
    return [{"Name": name, "Soft": soft, "Hard": hard} for name, (soft, hard) in asked.items()]


def _limits(limits: Limits) -> dict[str, object]:
    asked: dict[str, object] = {"PidsLimit": limits.pids or MAX_PIDS}
    if limits.memory:
        asked |= {"Memory": limits.memory, "MemorySwap": limits.memory}
    if limits.cpu:
        # No NanoCpus: the engine refuses more than the machine has, and CPUs may be logical.
        asked |= {"CpuPeriod": PERIOD_US, "CpuQuota": max(MIN_QUOTA_US, round(limits.cpu * PERIOD_US))}
    return asked


NO_GPUS = "could not select device driver"  # in what an engine says that has none of NVIDIA's


def device_requests(devices: Sequence[str]) -> dict[str, object]:
    """What an engine is asked for so that a container has these GPUs, and no others."""
    if not devices:
        return {}
    return {"DeviceRequests": [{"Driver": "nvidia", "DeviceIDs": list(devices), "Capabilities": [["gpu"]]}]}


# What runs a callable, by whatever Python the image has. Read by all versions of Python 3.
_BOOT = """
import json, sys
own, image, added = sys.argv[1], sys.argv[2], sys.argv[3:]
sys.argv[1:] = []
def refuse(kind, message):
    with open("/fluster/error.json", "w") as file:
        json.dump({"type": kind, "message": message}, file)
    sys.stderr.write("fluster: " + message + "\\n")
    sys.exit(126)
found = "%d.%d" % sys.version_info[:2]
if found != own:
    refuse("PythonMismatchError", "image %r has Python %s, and this worker's is %s: a callable needs the worker's own "
        "minor version. Name an image with Python %s, or give the job as a command" % (image, found, own, own))
sys.path[:] = [entry for entry in sys.path if entry] + added
try:
    from fluster_services.worker.task.task_process import run_executed
except ImportError as error:
    refuse("ImportError", "Fluster cannot be imported in image %r: %s" % (image, error))
run_executed("/fluster")
"""


def secret_places(engine: str, *own: Path) -> list[Path]:
    """What no container is to see: the ways to engines, `engine` among them, and these folders of Fluster's own."""
    return [*own, Path(engine.removeprefix("unix://")), *_ENGINES]


def is_in_or_around(place: Path, others: Iterable[Path]) -> bool:
    """Whether `place` shows any of the others, or a part of one."""
    return any(place.is_relative_to(each) or each.is_relative_to(place) for each in others)


def checked_mounts(mounts: Mapping[str, str], roots: Sequence[str], *, secret: Sequence[Path] = ()) -> dict[str, str]:
    """`mounts` with what their links lead to. Raises LaunchError for what a worker with these roots does not mount.

    Whatever the roots are: nothing in a `secret` place, nor around one.
    """
    places = [each.resolve() for each in secret]
    found = {}
    for target, source in mounts.items():
        place = Path(source).resolve()
        if not any(place.is_relative_to(Path(root).resolve()) for root in roots):
            allowed = ", ".join(roots) or "nothing: see FLUSTER_MOUNT_ROOTS"
            raise LaunchError(f"mounts has {source!r}, and this worker mounts {allowed}")
        if is_in_or_around(place, places):
            raise LaunchError(f"mounts has {source!r}, where the worker has files that no task may see")
        if not place.exists():
            raise LaunchError(f"mounts has {source!r}, which is not there at this worker")
        if any(Path(target).is_relative_to(taken) for taken in TAKEN):
            raise LaunchError(
                f"mounts has {target!r} as a place in the container, which is taken: choose one such as /data"
            )
        found[target] = str(place)
    return found
