"""Which files of the kernel's control groups (cgroups) hold what for a task: decided here, carried out in cgroups.py.

In version 1 each controller has a tree of its own, in version 2 all share one; a machine may have both. The group of a
task lies in that of its worker, so whatever bounds the worker bounds its tasks too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

CONTROLLERS = ("memory", "cpu", "pids")
MAX_PIDS = 16_384  # processes and threads of one task

PERIOD_US = 100_000
MIN_QUOTA_US = 1_000  # the kernel takes no less

Version = Literal[1, 2]
Groups = dict[str, dict[str, str]]  # {folder of a group: {file: what is written there, in this order}}


@dataclass(frozen=True)
class Limits:
    """What one task may take; None, or zero CPUs or memory, means unlimited."""

    memory: int | None = None  # bytes
    cpu: float | None = None
    pids: int | None = None


@dataclass(frozen=True)
class CgroupController:
    """Where the worker's own group of a controller lies."""

    version: Version
    folder: Path


def find_controllers(own_cgroup: str, mountinfo: str, v2_controllers: str) -> dict[str, CgroupController]:
    """{name: controller} from /proc/self/cgroup, /proc/self/mountinfo, and cgroup.controllers of the own group in v2."""
    own: dict[str, str] = {}  # {controller: path in its tree}, "" for version 2
    for line in own_cgroup.splitlines():
        _number, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    found: dict[str, CgroupController] = {}
    unified: CgroupController | None = None
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        root, mount_point = fields.split()[3:5]
        kind, _source, options = tail.split()[:3]
        if kind == "cgroup":
            for name in options.split(","):
                if name in CONTROLLERS and name in own:
                    found[name] = CgroupController(1, _inside(mount_point, root, own[name]))
        elif kind == "cgroup2" and "" in own:
            unified = CgroupController(2, _inside(mount_point, root, own[""]))
    if unified is not None:
        found |= {name: unified for name in v2_controllers.split() if name in CONTROLLERS and name not in found}
    return found


def unified_folder(own_cgroup: str, mountinfo: str) -> Path | None:
    """The own group in version 2, if there is such a tree."""
    found = find_controllers(own_cgroup, mountinfo, CONTROLLERS[-1])
    return next((each.folder for each in found.values() if each.version == 2), None)


def _inside(mount_point: str, root: str, path: str) -> Path:
    """Where `path` of a tree is seen, when the tree's `root` is seen at `mount_point`."""
    inner = PurePosixPath(path)
    if inner.is_relative_to(root):
        inner = inner.relative_to(root)
    elif inner.is_absolute():  # the container was given another part of the tree than it says
        inner = PurePosixPath()
    return Path(mount_point) / inner


def group_name(directory: str | Path) -> str:
    """What the groups of the attempt in `directory` are called."""
    return f"fluster-{hashlib.blake2s(str(directory).encode(), digest_size=8).hexdigest()}"


def groups(limits: Limits, controllers: Mapping[str, CgroupController], name: str) -> Groups:
    """The groups that hold a task to its limits, as far as `controllers` allow."""
    wanted: Groups = {}
    for controller in CONTROLLERS:
        place = controllers.get(controller)
        files = _files(limits, controller, place.version) if place is not None else {}
        if place is not None and files:
            wanted.setdefault(str(place.folder / name), {}).update(files)
    return wanted


def _files(limits: Limits, controller: str, version: Version) -> dict[str, str]:
    match controller:
        case "memory" if limits.memory:
            memory = str(limits.memory)
            if version == 1:
                # With swap only where the kernel counts that: the file is missing else.
                return {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes?": memory}
            return {"memory.max": memory, "memory.swap.max?": "0", "memory.oom.group?": "1"}
        case "cpu" if limits.cpu:
            quota = max(MIN_QUOTA_US, round(limits.cpu * PERIOD_US))
            if version == 1:
                return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota)}
            return {"cpu.max": f"{quota} {PERIOD_US}"}
        case "pids" if limits.pids:
            return {"pids.max": str(limits.pids)}
        case _:
            return {}


# What the kernel tells about the memory of a group, in version 1 and 2.
_PEAKS = ("memory.max_usage_in_bytes", "memory.memsw.max_usage_in_bytes")
MEMORY_FILES = ("memory.oom_control", *_PEAKS, "memory.events")
_CLOSE = 7 / 8  # to its limit: a request that is too large is refused before the usage has reached it


def went_over_memory(texts: Mapping[str, str], limit: int) -> bool:
    """Whether processes of a group were killed for its own limit, from its MEMORY_FILES, as far as there are any.

    One that was killed because the whole machine had no memory left is counted as killed, too.
    """
    events = _numbers(texts.get("memory.events", ""))
    if events.get("oom_kill", 0) and events.get("oom", 0):
        return True
    kills = _numbers(texts.get("memory.oom_control", "")).get("oom_kill", 0)
    return kills > 0 and max(int(texts.get(name) or 0) for name in _PEAKS) >= limit * _CLOSE


def _numbers(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (line.split() for line in text.splitlines())}
