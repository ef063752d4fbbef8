"""Who made a VM: a program that may be gone by now."""

from __future__ import annotations

import os
from pathlib import Path

from fluster_services.worker.linux.processes import boot_id, start_ticks


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
