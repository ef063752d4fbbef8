"""The lock of a state folder: one worker uses it at a time."""

from __future__ import annotations

import fcntl
import os
import time
from io import BufferedWriter
from pathlib import Path

_FILE = "lock"
_LOOKED_AT_S, _PAUSE_S = 0.5, 0.01  # others hold it for a moment when they look whether it is held


def take_lock(state_dir: Path) -> BufferedWriter:
    """Return the lock, which is held until it is closed. Raises BlockingIOError when another process has it."""
    fd = os.open(state_dir / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    lock = os.fdopen(fd, "wb")
    deadline = time.monotonic() + _LOOKED_AT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                lock.close()
                raise
            time.sleep(_PAUSE_S)
        else:
            return lock


def is_locked(state_dir: Path) -> bool:
    """Whether a worker uses the folder."""
    try:
        fd = os.open(state_dir / _FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the folder was removed
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
