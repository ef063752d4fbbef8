"""Disks of a few MiB, to be filled."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import optional


@contextmanager
def mounted(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A file system of that size at `folder`; where none can be mounted the test is skipped, or fails if FLUSTER_REQUIRE names mounts."""
    folder.mkdir()
    mount = shutil.which("mount")
    if sys.platform != "linux" or mount is None:
        optional.skip("mounts", "a small disk needs Linux and mount")
    program = [mount, "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    made = subprocess.run(program, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        optional.skip("mounts", f"a small disk needs the right to mount one: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(file: Path, *, left_bytes: int = 0) -> None:
    """Write to `file` until there is no room left, or just that much."""
    free = shutil.disk_usage(file.parent).free
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as ballast:
        os.posix_fallocate(ballast.fileno(), 0, free - left_bytes)
        while not left_bytes:  # and what is freed meanwhile
            ballast.write(bytes(4096))
