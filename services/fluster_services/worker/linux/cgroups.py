"""Control groups as files: made, entered, read and removed. What they hold is decided in limits.py."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fluster_bus.core.errors import FlusterError
from fluster_services.worker.linux.limits import (
    CONTROLLERS,
    MEMORY_FILES,
    CgroupController,
    Groups,
    Limits,
    find_controllers,
    groups,
    unified_folder,
    went_over_memory,
)

log = logging.getLogger(__name__)

Enforcement = Literal["auto", "always", "never"]

_PROCESSES = "cgroup.procs"
_KILL = "cgroup.kill"  # since Linux 5.14, in version 2: all at once, also those that fork at that moment
_ENABLED = "cgroup.subtree_control"
_OPTIONAL = "?"  # behind a file's name: the kernel may lack it
_OWN_LEAF = "fluster-worker"
_PROBE = Limits(memory=64 << 20, cpu=0.5, pids=64)


class LimitsError(FlusterError):
    """Limits were asked for that this machine cannot enforce."""


@dataclass(frozen=True)
class Enforcer:
    """What holds tasks to their limits on this machine."""

    controllers: Mapping[str, CgroupController]
    missing: Mapping[str, str]  # {controller: why it cannot be used}

    def describe(self) -> str:
        """One line for the worker's log."""
        parts = [
            f"{name} by cgroup v{self.controllers[name].version}" for name in CONTROLLERS if name in self.controllers
        ]
        enforced = f"limits of tasks are enforced: {', '.join(parts)}" if parts else "limits of tasks are not enforced"
        return "; ".join([enforced, *(f"no {name}: {reason}" for name, reason in self.missing.items())])


def find_enforcer(enforcement: Enforcement) -> Enforcer:
    """What this process may use; to be called before it has children. Raises LimitsError when "always" cannot be had."""
    if enforcement == "never":
        return Enforcer({}, dict.fromkeys(CONTROLLERS, "not asked for"))
    controllers, missing = _controllers()
    for name, controller in list(controllers.items()):
        reason = _probe(name, controller)
        if reason is not None:
            del controllers[name]
            missing[name] = reason
    found = Enforcer(controllers, missing)
    if enforcement == "always" and missing:
        raise LimitsError(
            f"{found.describe()}. Run the worker as root or in a delegated cgroup (systemd: Delegate=yes), or do not "
            "ask for limits to be enforced"
        )
    return found


def _controllers() -> tuple[dict[str, CgroupController], dict[str, str]]:
    try:
        own, mounts = Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    except FileNotFoundError:
        return {}, dict.fromkeys(CONTROLLERS, "this system has no cgroups")
    folder = unified_folder(own, mounts)
    enabled = delegate(folder) if folder is not None else ""
    found = find_controllers(own, mounts, enabled)
    return found, {name: "the kernel offers none" for name in CONTROLLERS if name not in found}


def delegate(folder: Path) -> str:
    """Have the groups below `folder` (version 2) take the controllers that it has; returns them.

    A group with processes of its own may not give controllers on, so this process moves into a leaf.
    """
    try:
        offered = [each for each in (folder / "cgroup.controllers").read_text().split() if each in CONTROLLERS]
        if not offered:
            return ""
        wanted = " ".join(f"+{each}" for each in offered)
        try:
            (folder / _ENABLED).write_text(wanted)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            leaf = folder / _OWN_LEAF
            leaf.mkdir(exist_ok=True)
            (leaf / _PROCESSES).write_text("0")
            (folder / _ENABLED).write_text(wanted)
        return (folder / _ENABLED).read_text()
    except OSError as error:
        log.info("%s cannot be divided: %s", folder, error.strerror)
        return ""


def _probe(name: str, controller: CgroupController) -> str | None:
    """Why a controller cannot be used; None when it can."""
    wanted = groups(_PROBE, {name: controller}, f"fluster-probe-{secrets.token_hex(4)}")
    try:
        make(wanted)
    except OSError as error:
        return f"{error.filename or controller.folder}: {error.strerror}"
    finally:
        remove(wanted)
    return None


def make(wanted: Groups) -> None:
    """Make groups with their limits. Raises OSError."""
    for folder, files in wanted.items():
        group = Path(folder)
        group.mkdir(exist_ok=True)
        for name, value in files.items():
            file = group / name.removesuffix(_OPTIONAL)
            if not name.endswith(_OPTIONAL) or file.exists():
                file.write_text(value)


def enter(wanted: Groups) -> None:
    """Put this process into groups. Raises OSError."""
    for folder in wanted:
        (Path(folder) / _PROCESSES).write_text("0")


def kill(wanted: Groups) -> list[int]:
    """SIGKILL all that is in groups; returns the processes that were found."""
    found: list[int] = []
    for folder in wanted:
        try:
            # A process of another pid namespace is shown as 0.
            pids = [int(pid) for pid in (Path(folder) / _PROCESSES).read_text().split() if pid != "0"]
            if pids and (Path(folder) / _KILL).exists():
                (Path(folder) / _KILL).write_text("1")
        except (OSError, ValueError):  # the group is gone, or was never made, or is none
            continue
        found.extend(pids)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def was_over_memory(wanted: Groups, limit: int) -> bool:
    """True when processes in these groups were killed for going over their memory limit."""
    texts: dict[str, str] = {}
    for folder in wanted:
        for name in MEMORY_FILES:
            try:
                texts[name] = (Path(folder) / name).read_text()
            except OSError:  # the other version's file, or the group is gone
                continue
    return went_over_memory(texts, limit)


def remove(wanted: Groups) -> bool:
    """Remove groups whose processes have ended; False while one of them is in use."""
    is_gone = True
    for folder in wanted:
        try:
            os.rmdir(folder)  # noqa: PTH106 - the files in it are the kernel's, and go with it
        except FileNotFoundError:
            continue
        except OSError:
            is_gone = False
    return is_gone
