"""The clock by which fences and leases are counted: it goes on while the machine sleeps. And the boot that it counts from."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

if sys.platform.startswith("linux"):

    def fence_clock() -> float:
        """Return seconds since boot, sleep included; every process of the machine reads the same."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def fence_clock() -> float:
        """Return seconds since some moment; on macOS they stand still while the machine sleeps."""
        return time.monotonic()


@functools.cache
def boot_id() -> str:
    """Return what tells this boot of the machine from all others; empty where the system does not tell (outside Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
