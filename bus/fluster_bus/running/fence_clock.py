"""The clock by which fences and leases are counted: it goes on while the machine sleeps."""

from __future__ import annotations

import sys
import time

if sys.platform.startswith("linux"):

    def fence_clock() -> float:
        """Return seconds since boot, sleep included; every process of the machine reads the same."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def fence_clock() -> float:
        """Return seconds since some moment; on macOS they stand still while the machine sleeps."""
        return time.monotonic()
