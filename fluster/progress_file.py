"""How far a task is, as it tells its keeper: the newest word lies in a file, and a pipe says that there is one.

However often a task reports, and whatever it is forked into, nothing piles up, and the last word is not lost: it is
in the file before the pipe says so, and a pipe that is full says it already.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import NamedTuple

DIRECTORY_VARIABLE = "FLUSTER_ATTEMPT_DIRECTORY"  # where both are; set for every task
PROGRESS_FILE = "progress"
PROGRESS_PIPE = "progress.pipe"
MAX_PROGRESS_CHARACTERS = 500
_SIZE = 4_096  # of the file, always: what is written there later needs no more room
_NOBODY_READS = (errno.ENXIO, errno.ENOENT)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Progress(NamedTuple):
    """How far a task is."""

    fraction: float
    message: str


def checked_progress(fraction: float, message: str) -> Progress:
    """What may be reported; a long message is cut. Raises ValueError, TypeError."""
    if not isinstance(fraction, int | float):
        raise TypeError(f"invalid fraction={fraction!r}: give how much is done, from 0 to 1")
    if not isinstance(message, str):
        raise TypeError(f"invalid message={message!r}: give a text")
    if not 0 <= fraction <= 1:  # nor is it NaN
        raise ValueError(f"fraction={fraction!r} is not between 0 and 1: give done / total")
    if len(message) > MAX_PROGRESS_CHARACTERS:
        message = message[: MAX_PROGRESS_CHARACTERS - 1] + "…"
    return Progress(float(fraction), message)


def make_progress_pipe(directory: Path) -> int:
    """Make the pipe in `directory`; its reading end, which does not block. Raises OSError."""
    os.mkfifo(directory / PROGRESS_PIPE, 0o600)
    # Also for writing: else the pipe would be at its end, time and again, whenever no task has it open.
    return os.open(directory / PROGRESS_PIPE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def write_progress(directory: Path, progress: Progress) -> None:
    """Tell the keeper. Does nothing when there is none any more, or no room on the disk. Raises OSError."""
    data = json.dumps(progress, ensure_ascii=False).encode(errors="replace").ljust(_SIZE)
    try:
        pipe = os.open(directory / PROGRESS_PIPE, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOBODY_READS:
            return
        raise
    try:
        file = os.open(directory / PROGRESS_FILE, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(file, data, 0)
        finally:
            os.close(file)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # full: it will be read; broken: the reader is gone
            os.write(pipe, b".")
    except OSError as error:
        # A task that only reports its progress must not end for that.
        if error.errno not in (*_NOBODY_READS, *_NO_ROOM):
            raise
    finally:
        os.close(pipe)


def read_progress(directory: Path) -> Progress | None:
    """What was reported last, None when that is nothing, or nothing sensible: the task's code may write there as well."""
    try:
        file = os.open(directory / PROGRESS_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # the task has taken it away
        return None
    try:
        fraction, message = json.loads(os.pread(file, _SIZE, 0))
        told = checked_progress(fraction, message)
        return Progress(told.fraction, told.message.encode(errors="replace").decode())
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    finally:
        os.close(file)
