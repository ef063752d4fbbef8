"""What is installed for a job is what its tenant says: neither that nor the code of packages has the worker's memory to itself."""

from __future__ import annotations

import os
import subprocess
import sys

from fluster_services.worker.environments.uv import _LAUNCHER


def test_uv_and_what_it_runs_are_held_to_a_part_of_the_memory() -> None:
    """`-r /dev/zero` was read until the machine had no more."""
    script = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), sys.executable, "-c", script]
    told = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert 0 < told <= max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4, 4 << 30)
