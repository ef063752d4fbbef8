"""A file system of a task's own, which has as much room as the task asked for: a file with ext4 in it, mounted on a loop device.

It lies in the attempt's directory, and what is mounted there goes with that, however the attempt ends. The file has holes where nothing was
written, so that it takes no more of the worker's disk than the task does.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fluster_services.worker.linux.processes import detach

IMAGE_FILE = "disk.img"

_PROGRAMS = ("mkfs.ext4", "mount")
_SEARCHED = f"{os.defpath}:/usr/local/sbin:/usr/sbin:/sbin"
_PATIENCE_S = 60.0
_MADE_BY_KERNEL = "lost+found"
# What ext4 needs for itself: besides a part of the whole, some for its first tables.
_OVERHEAD_BYTES, _OVERHEAD_PART = 4 << 20, 32
_PROBE_BYTES = 4 << 20
_FULL_BYTES = 64 << 10

HowDisk = Literal["mounted", "watched", "not enforced"]


@dataclass(frozen=True)
class Disks:
    """How tasks that asked for disk are held to it at one worker."""

    how: HowDisk = "not enforced"
    missing: str = ""  # why it is not a file system of their own

    def describe(self, interval_s: float) -> str:
        """A part of the worker's first line."""
        watched = f"watched each {interval_s:g} s"
        match self.how:
            case "mounted":
                return f"disk is enforced by a file system of each task's own, beyond that {watched}"
            case "watched":
                return f"disk is {watched} (no file systems of tasks' own: {self.missing})"
            case "not enforced":
                return "disk is not enforced"


def find_disks(folder: Path) -> Disks:
    """What can be had in `folder`, which is tried."""
    missing = _why_not(folder)
    return Disks("mounted") if missing is None else Disks("watched", missing)


def _why_not(folder: Path) -> str | None:
    import tempfile  # few need it, as with what follows

    if not sys.platform.startswith("linux"):
        return "this system is not Linux"
    if os.geteuid() != 0:
        return "only root may mount them"
    for name in _PROGRAMS:
        if shutil.which(name, path=_SEARCHED) is None:
            return f"the program {name} is not installed"
    try:
        with tempfile.TemporaryDirectory(prefix="probe-", dir=folder) as probe:
            place = Path(probe) / "mounted"
            try:
                mount(place, _PROBE_BYTES)
            finally:
                unmount([place])
    except OSError as error:
        return error.strerror or str(error)
    return None


def mount(place: Path, size: int) -> None:
    """Have an empty folder `place` with room for `size` bytes. Blocks. Raises OSError."""
    image = place.with_name(IMAGE_FILE)
    place.mkdir(mode=0o700, exist_ok=True)
    with image.open("xb") as file:
        file.truncate(size + size // _OVERHEAD_PART + _OVERHEAD_BYTES)
    options = "lazy_itable_init=1,nodiscard,root_owner=0:0"
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", options, str(image))
    _run("mount", "-t", "ext4", "-o", "loop,discard,nosuid,nodev,noatime", str(image), str(place))
    (place / _MADE_BY_KERNEL).rmdir()
    place.chmod(0o700)


def _run(*command: str) -> None:
    import subprocess

    program = shutil.which(command[0], path=_SEARCHED) or command[0]
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, errors="replace", check=False, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired as cause:
        raise OSError(f"{command[0]} was not done within {_PATIENCE_S:g} s") from cause
    if done.returncode != 0:
        raise OSError(f"{command[0]}: {' '.join(done.stderr.split())[:500]}")


def unmount(places: Iterable[Path]) -> None:
    """Have nothing mounted at any of them; what cannot be unmounted stays for the next one who tries."""
    for place in places:
        if is_mounted(place):
            detach(place)


def is_mounted(place: Path) -> bool:
    """Whether a file system of its own is at `place`."""
    try:
        return os.path.ismount(place)
    except OSError:
        return False


def is_full(place: Path) -> bool:
    """Whether nothing more can be written to what is mounted at `place`."""
    try:
        free = os.statvfs(place)
    except OSError:
        return False
    return is_mounted(place) and (free.f_bavail * free.f_frsize < _FULL_BYTES or free.f_favail == 0)
