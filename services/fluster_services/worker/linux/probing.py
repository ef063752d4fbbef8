"""Whether something can be written to a folder: asked by writing it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fluster_bus.core.errors import FlusterError
from fluster_services.capacity import describe_bytes
from fluster_services.config import DiskLimits

_PROBE = "probe"  # a file that is written and removed again
_PROBE_BYTES = 64 << 10


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
