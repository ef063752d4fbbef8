"""The container that is a VM: what the engine is asked for, decided without one."""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fluster_bus.messages import Capacity, WorkerId
from fluster_bus.running.fence_clock import boot_id
from fluster_services.worker.contract.container import (
    NOBODY,
    OWN_MINOR,
    TAKEN,
    Libraries,
    bind,
    device_requests,
    is_in_or_around,
    secret_places,
)
from fluster_services.worker.linux.limits import MAX_PIDS, MIN_QUOTA_US, PERIOD_US
from fluster_services.worker.linux.processes import start_ticks

VM_LABEL = "fluster.vm"
OWNER_LABEL = "fluster.vm.owner"
FOLDER = "/fluster"
STATE_FOLDER, WORK_FOLDER, HOME_FOLDER = f"{FOLDER}/state", f"{FOLDER}/work", f"{FOLDER}/home"
OWN_MEMORY = 256 << 20  # for the worker and its keepers, beside what tasks are given
_LOG_OPTIONS = {"max-size": "10m", "max-file": "2", "compress": "false"}


@dataclass(frozen=True)
class User:
    """A user and a group, as files have them."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()  # beside that


def user_of_vms(program: User, *, shares_folders: bool) -> User:
    """The user of a VM's processes: that of the program, unless it is root.

    With folders in common it is root there too, without root's rights: no other user could use their files.
    """
    if shares_folders:
        return program
    return User(program.uid, program.gid) if program.uid else User(NOBODY, NOBODY)


@dataclass(frozen=True)
class VMContainer:
    """What is asked of an engine."""

    vm_id: WorkerId
    image: str
    exact_image: str  # what that means to the engine, and goes on to mean
    network: str
    resources: Capacity
    owner: str  # the mark of the program that asks
    user: User
    folders: tuple[SharedFolder, ...]
    device_ids: tuple[str, ...]  # of the machine's GPUs
    mounts: tuple[tuple[str, str], ...]  # (where it lies here, where it lies in the container)
    python_path: tuple[str, ...]  # in the container, behind what the image has


def vm_container(
    vm_id: WorkerId,
    resources: Capacity,
    *,
    image: str,
    exact_image: str | None = None,
    network: str,
    owner: str,
    user: User,
    folders: Sequence[SharedFolder] = (),
    device_ids: Sequence[str] = (),
    libraries: Sequence[Libraries],
) -> VMContainer:
    """A container that sees these libraries, those of the last first in the way of its own interpreter."""
    return VMContainer(
        vm_id=vm_id,
        image=image,
        exact_image=exact_image or image,
        network=network,
        resources=resources,
        owner=owner,
        user=user,
        folders=tuple(folders),
        device_ids=tuple(device_ids),
        mounts=tuple(pair for each in libraries for pair in each.mounts.items()),
        python_path=tuple(entry for each in libraries for entry in each.python_path),
    )


def create_body(vm: VMContainer) -> dict[str, object]:
    """The request that has it made. It publishes no port, and has nothing of this machine but read-only packages and its folders.

    Standard input is the leash: the engine ends it when the program that attached is gone. It removes
    the container when it is over.
    """
    memory = vm.resources.memory + OWN_MEMORY
    visible = ",".join(vm.device_ids) or "void"
    return {
        "Image": vm.exact_image,
        "Entrypoint": ["python3", "-c", _BOOT, OWN_MINOR, vm.image, *vm.python_path],
        "Cmd": [],
        "Env": [f"HOME={HOME_FOLDER}", "PYTHONUNBUFFERED=1", f"NVIDIA_VISIBLE_DEVICES={visible}"],
        "User": f"{vm.user.uid}:{vm.user.gid}",
        "WorkingDir": WORK_FOLDER,
        "Healthcheck": {"Test": ["NONE"]},  # the image's own is for what the image would run
        "Labels": {VM_LABEL: vm.vm_id, OWNER_LABEL: vm.owner},
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "HostConfig": {
            "Init": True,
            "AutoRemove": True,
            "NetworkMode": vm.network,
            "Mounts": [
                *(bind(source, target) for source, target in vm.mounts),
                *(bind(str(folder.source), str(folder.path), is_writable=True) for folder in vm.folders),
            ],
            "GroupAdd": [str(group) for group in vm.user.groups],
            "LogConfig": {"Type": "local", "Config": _LOG_OPTIONS},
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "PidsLimit": MAX_PIDS,
            "Memory": memory,
            "MemorySwap": memory,
            "ShmSize": vm.resources.memory,  # it counts as memory
            # No NanoCpus: the engine refuses more than the machine has, and CPUs may be logical.
            **device_requests(vm.device_ids),
            "CpuPeriod": PERIOD_US,
            "CpuQuota": max(MIN_QUOTA_US, round(vm.resources.cpu * PERIOD_US)),
        },
    }


def folders_tar(user: User) -> bytes:
    """The worker's own folders, to be unpacked at the container's root."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for folder in (FOLDER, STATE_FOLDER, WORK_FOLDER, HOME_FOLDER):
            entry = tarfile.TarInfo(folder.removeprefix("/"))
            entry.type, entry.mode = tarfile.DIRTYPE, 0o700
            entry.uid, entry.gid = user.uid, user.gid
            tar.addfile(entry)
    return content.getvalue()


# Read by all versions of Python 3.
_BOOT = """
import sys
own, image, added = sys.argv[1], sys.argv[2], sys.argv[3:]
sys.argv[1:] = []
found = "%d.%d" % sys.version_info[:2]
if found != own:
    sys.exit("image %r has Python %s, and this cluster's is %s: a worker needs the same minor version, so name an image "
        "with Python %s" % (image, found, own, own))
sys.path[:] = [entry for entry in sys.path if entry] + added
try:
    from fluster_services.vm.machine import main
except ImportError as error:
    sys.exit("Fluster cannot be imported in image %r: %s" % (image, error))
main()
"""


# Where a system has its own files, here and in a container, which would be covered there.
_SYSTEM = ("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/run", "/sbin", "/usr", "/var/run")
_TAKEN = (*map(Path, _SYSTEM), *TAKEN)
_OF_ENGINES = (Path("/var/lib/containerd"), Path("/var/lib/docker"))


@dataclass(frozen=True)
class SharedFolder:
    """A folder that a VM has under the path that it has here."""

    path: Path
    source: Path  # the same without links, which may lead elsewhere by the time that the next VM is made


def checked_folders(folders: Iterable[str | Path], *, engine: str) -> tuple[SharedFolder, ...]:
    """The folders, each once. Raises ValueError for what is not a folder, and for what no VM may see or cover."""
    if isinstance(folders, str | Path):
        raise ValueError(f"folders={str(folders)!r} is one folder: give a list of them")
    secret = [each.resolve() for each in secret_places(engine, *_OF_ENGINES)]
    found: list[SharedFolder] = []
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise ValueError(f"folders has {folder!r}: give a path, such as '/srv/data'")
        given = str(folder)
        path = Path(os.path.normpath(re.sub("^/+", "/", given)))  # POSIX tells two slashes from one
        if not path.is_absolute():
            raise ValueError(f"folders has {given!r}: give the whole path, such as {str(path.absolute())!r}")
        if not path.is_dir():
            raise ValueError(f"folders has {given!r}, which is {'not a folder' if path.exists() else 'not there'}")
        shared = SharedFolder(path, path.resolve())
        if is_in_or_around(shared.source, secret):
            raise ValueError(f"folders has {given!r}, which shows what is a container engine's: no VM may see that")
        if is_in_or_around(path, _TAKEN) or is_in_or_around(shared.source, _TAKEN):
            raise ValueError(
                f"folders has {given!r}, where a system has its own files: give one for data, such as '/srv/data'"
            )
        found.append(shared)
    _check_apart(found)
    return tuple(dict.fromkeys(found))


def _check_apart(folders: list[SharedFolder]) -> None:
    """What lies in another one could be moved by a program that may write to that."""
    for inner in folders:
        for outer in folders:
            if outer.path in inner.path.parents or outer.source in inner.source.parents:
                raise ValueError(f"folders has {str(inner.path)!r}, which lies in {str(outer.path)!r}: give that alone")


def own_mark() -> str:
    """What tells this process from every other of this machine, also from later ones with its number."""
    return f"{_place()}.{os.getpid()}.{start_ticks(os.getpid())}"


def is_gone(mark: str) -> bool:
    """Whether that mark is of a process of this machine, as this process sees it, that lives no more."""
    place, _, rest = mark.partition(".")
    pid, _, ticks = rest.partition(".")
    if place != _place() or not pid.isdigit():
        return False  # of another machine that uses the same engine, or of a container: not for us to judge
    return str(start_ticks(int(pid))) != ticks


def _place() -> str:
    """One boot of one machine, and one view of its processes."""
    view = Path("/proc/self/ns/pid")
    return f"{boot_id()}-{view.stat().st_ino if view.exists() else 0}"
