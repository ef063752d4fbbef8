"""Finds programs that come with packages of this Python, and starts programs without copying this process first.

A fork of a process as large as a keeper takes milliseconds: its page tables are copied, and from then on both pay for each page that
they touch. `posix_spawn` shares the memory until the program is executed, but cannot have the kernel end the program with
its parent; setpriv of util-linux does that on the way (https://man7.org/linux/man-pages/man1/setpriv.1.html).
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_EXECUTABLE_MAGIC = b"\x7fELF"


def spawn(
    command: Sequence[str], environment: Mapping[str, str], *, stdout_fd: int, stderr_fd: int, umask: int
) -> int | None:
    """Return the pid of `command`, run in the working directory as the leader of a session of its own.

    None when it has to be forked and executed instead, which also tells best what is wrong with a command that is none. All descriptors
    of this process but the standard ones must be close-on-exec.
    """
    setpriv = find_setpriv()
    if setpriv is None or not _is_program(command[0], environment):
        return None
    previous = os.umask(umask)
    try:
        return os.posix_spawn(
            setpriv,
            [setpriv, "--pdeathsig", "KILL", "--", *command],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, stdout_fd, 1),
                (os.POSIX_SPAWN_DUP2, stderr_fd, 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=_ignored_signals(),
        )
    except (OSError, ValueError):  # too long, or with a zero byte in it
        return None
    finally:
        os.umask(previous)


@functools.cache
def find_setpriv() -> str | None:
    """Return the path of a setpriv that knows --pdeathsig; other systems and BusyBox have none."""
    path = shutil.which("setpriv", path=os.defpath) if sys.platform.startswith("linux") else None
    return path if path is not None and b"pdeathsig" in Path(path).read_bytes() else None


def _is_program(name: str, environment: Mapping[str, str]) -> bool:
    """Whether that is found, and no script, whose interpreter might be missing."""
    path = shutil.which(name, path=environment.get("PATH", os.defpath))
    if path is None:
        return False
    with Path(path).open("rb") as file:
        return file.read(len(_EXECUTABLE_MAGIC)) == _EXECUTABLE_MAGIC


@functools.cache
def _ignored_signals() -> tuple[int, ...]:
    """Those that a program would inherit as ignored; what is handled becomes the default when it is executed."""
    return tuple(number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN)


def find_program(name: str) -> Path | None:
    """The program next to this Python, else the one on PATH."""
    # Not resolved: in a virtual environment this is a link to a Python that lies elsewhere.
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    return None if found is None else Path(found).absolute()
