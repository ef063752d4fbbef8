"""What one process does at a time: under a name on the machine, or in the state folder of a worker.

Whichever process does it may be killed: then the next one goes on at once.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from io import BufferedWriter
from pathlib import Path

_BACKLOG = 64
_CROWDED_S = 0.2  # before another look at a holder for whom too many wait already
_FILE = "lock"
_LOOKED_AT_S, _PAUSE_S = 0.5, 0.01  # others hold it for a moment when they look whether it is held


@asynccontextmanager
async def alone(name: str, on_wait: Callable[[], None]) -> AsyncIterator[None]:
    """Hold `name` on this machine for the length of the block; `on_wait` is called if another process holds it.

    Only on Linux: a socket's abstract address belongs to one process at most, and goes with it. Elsewhere nothing is held.
    """
    if sys.platform != "linux":
        yield
        return
    address = f"\0{name}"
    has_waited = False
    while True:
        with closing(socket.socket(socket.AF_UNIX)) as place:
            try:
                place.bind(address)
                place.listen(_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                yield
                return
        if not has_waited:
            on_wait()
            has_waited = True
        await _wait_gone(address)


async def _wait_gone(address: str) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as waiting:
        waiting.setblocking(False)
        try:
            waiting.connect(address)
        except BlockingIOError:
            await asyncio.sleep(_CROWDED_S)
        except OSError:  # it is gone already
            return
        else:
            with suppress(OSError):  # reset: the call was not accepted
                await asyncio.get_running_loop().sock_recv(waiting, 1)


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
