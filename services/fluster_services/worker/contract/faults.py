"""What an attempt meets that cannot be started, whose fault that is, and the output of a build that failed.

The fault is the attempt's own, or that of the worker's machine.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import deque
from errno import EAGAIN, EDQUOT, EIO, EMFILE, ENFILE, ENOBUFS, ENODEV, ENOMEM, ENOSPC, EROFS, ESTALE
from pathlib import Path

from fluster_services.capacity import describe_bytes

NO_ROOM = (ENOSPC, EDQUOT)
_OF_THE_MACHINE = (*NO_ROOM, EAGAIN, EIO, EMFILE, ENFILE, ENOBUFS, ENODEV, ENOMEM, EROFS, ESTALE)
_NO_THREAD = "can't start new thread"  # as Python says it
_PLENTY_BYTES = 32 << 30
MAX_LINES = 500
MAX_LINE_BYTES = 2_000
_REASON_LINES, _REASON_CHARACTERS = 20, 4_000
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

Line = tuple[float, str]  # (time, text)


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


def without_codes(text: str) -> str:
    """`text` without what a terminal would take for colours."""
    return _TERMINAL_CODES.sub("", text)


class BuildOutput:
    """What was said while something was built: the last lines of it."""

    def __init__(self) -> None:
        self.lines: deque[Line] = deque(maxlen=MAX_LINES)
        self.said = 0  # how many there were
        self.doing = ""  # now, in a few words
        self._of_command = 0  # since the last command began

    def add(self, text: str) -> None:
        self.lines.append((time.time(), without_codes(text)))
        self.said += 1
        self._of_command += 1

    def begin(self, command: str) -> None:
        """What is added from here on, `command` says."""
        self.add(f"$ {command}")
        self.doing = without_codes(command)
        self._of_command = 0

    def take(self, other: BuildOutput) -> None:
        """Add what was said elsewhere."""
        self.lines.extend(other.lines)
        self.said += other.said
        self.doing, self._of_command = other.doing, other._of_command

    def since(self, number: int) -> tuple[list[Line], int]:
        """The lines after the first `number`, and how many of those were dropped."""
        new = self.said - number
        kept = list(self.lines)[max(0, len(self.lines) - new) :]
        return kept, new - len(kept)

    def last_words(self) -> str:
        """Of the last command, as much as fits into the reason of a failure."""
        count = min(self._of_command, _REASON_LINES)
        texts = [text for _time, text in self.lines]
        return "\n".join(texts[len(texts) - count :])[-_REASON_CHARACTERS:]


class BuildError(LaunchError):
    """What an attempt needs could not be made; `output` is what was said meanwhile."""

    def __init__(self, message: str, output: BuildOutput | None = None) -> None:
        super().__init__(message)
        self.output = output or BuildOutput()
