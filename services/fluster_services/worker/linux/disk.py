"""What folders take on their disk, and whether something can be written to them: asked by writing it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fluster_bus.core.errors import FlusterError
from fluster_services.capacity import describe_bytes
from fluster_services.config import DiskLimits

_PROBE = "probe"  # a file that is written and removed again
_PROBE_BYTES = 64 << 10
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system


class StateFolderError(FlusterError):
    """The folder of a worker's state cannot be had, without which it cannot even say that it is not well."""


def why_unwritable(folder: Path) -> str | None:
    """What the system says to a file in `folder`; None when it can be written."""
    probe = folder / _PROBE
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, bytes(_PROBE_BYTES))
        finally:
            os.close(fd)
            probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def why_unfit(folder: Path, limits: DiskLimits) -> str | None:
    """Why nothing large can be put into `folder`, which is made if need be; None when it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error)
    if free_bytes < limits.least_free_bytes:
        return f"only {describe_bytes(free_bytes)} are left there"
    return why_unwritable(folder)


def make_state_folder(folder: Path) -> None:
    """Have the folder of a worker's state. Raises StateFolderError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise state_folder_error(folder, error) from error


def state_folder_error(folder: Path, error: OSError) -> StateFolderError:
    """What is said when `error` came of making something in the folder."""
    existing = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    free = describe_bytes(shutil.disk_usage(existing).free)
    return StateFolderError(
        f"the state folder {folder} cannot be used: {error.filename or folder}: {error.strerror or error} ({free} are free "
        "there). Make room, or set FLUSTER_STATE_DIR to another folder"
    )


def size_of(folder: Path) -> int:
    """All that `sizes` finds."""
    return sum(sizes(folder))


def sizes(folder: Path, *, spared: Path | None = None) -> Iterator[int]:
    """The bytes of each thing in `folder`, one by one, without what is on other disks, and without the file `spared`.

    A file with several names in it counts once, one that goes meanwhile not at all.
    """
    try:
        own = os.lstat(folder)
    except FileNotFoundError:
        return
    yield own.st_blocks * _BLOCK_BYTES
    known: set[int] = set()  # of those with several names
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                yield from _sizes_in(entries, own.st_dev, waiting, known, str(spared))
        except OSError:  # it goes at this moment, or may not be looked into
            continue


def _sizes_in(
    entries: Iterator[os.DirEntry[str]], device: int, waiting: list[str], known: set[int], spared: str
) -> Iterator[int]:
    for entry in entries:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if status.st_dev != device or status.st_ino in known or entry.path == spared:
            continue
        if entry.is_dir(follow_symlinks=False):
            waiting.append(entry.path)
        elif status.st_nlink > 1:
            known.add(status.st_ino)
        yield status.st_blocks * _BLOCK_BYTES
