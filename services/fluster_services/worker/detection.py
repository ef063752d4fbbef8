"""What this machine has."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fluster_bus.messages import Capacity


def detect_capacity(*, cpu: float | None = None, memory: int | None = None) -> Capacity:
    """The machine's CPUs, memory and free disk, unless given."""
    return Capacity(
        cpu=cpu
        if cpu is not None
        else float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        memory=memory if memory is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk=shutil.disk_usage(Path.home()).free,
    )
