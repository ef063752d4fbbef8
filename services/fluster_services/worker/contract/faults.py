"""What an attempt meets that cannot be started, and whose fault that is: its own, or that of the worker's machine."""

from __future__ import annotations

import os
import shutil
from errno import EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOBUFS, ENODEV, ENOMEM, ENOSPC, EROFS, ESTALE
from pathlib import Path

from fluster_services.capacity import describe_bytes

NO_ROOM = (ENOSPC, EDQUOT)
_OF_THE_MACHINE = (*NO_ROOM, EAGAIN, EIO, EMFILE, ENFILE, ENOBUFS, ENODEV, ENOMEM, EROFS, ESTALE)
_NO_THREAD = "can't start new thread"  # as Python says it
_PLENTY_BYTES = 32 << 30


class LaunchError(RuntimeError):
    """The attempt could not be started; nothing of it is left."""


class WorkerFaultError(LaunchError):
    """The same, and no task has anything to do with it: something of the worker's own does not work."""


class AlreadyStartedError(LaunchError):
    """That attempt was started, and is running or not forgotten."""


def is_workers_fault(error: BaseException) -> bool:
    """Whether an attempt could not be started for want of something that the worker's machine should have."""
    return any(
        isinstance(each, WorkerFaultError)
        or (isinstance(each, OSError) and each.errno in _OF_THE_MACHINE)
        or (isinstance(each, RuntimeError) and _NO_THREAD in str(each))
        for each in _chain(error)
    ) or says_no_room(str(error))


def is_no_room(error: BaseException) -> bool:
    """Whether an attempt could not be started for want of room on a disk."""
    is_of_system = any(isinstance(each, OSError) and each.errno in NO_ROOM for each in _chain(error))
    return is_of_system or says_no_room(str(error))


def says_no_room(text: str) -> bool:
    """Whether a program's words tell that a disk had no room: so says the system, in all languages that programs keep; Go's in
    small letters.
    """
    words = text.lower()
    return any(os.strerror(number).lower() in words for number in NO_ROOM)


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__
    return found


def is_scarce(*, free: int, total: int) -> bool:
    """Whether a disk has so little left that what finds no room there may well be no larger than is usual.

    Measured, since what a build says is the word of those whose packages it makes.
    """
    return free < min(total // 10, _PLENTY_BYTES)


def why_scarce(folder: Path) -> str | None:
    """In words, that the disk of `folder` has little room left; None where it has some, or is not to be seen from here."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    if not is_scarce(free=usage.free, total=usage.total):
        return None
    return f"only {describe_bytes(usage.free)} of {describe_bytes(usage.total)} are left at {folder}"
