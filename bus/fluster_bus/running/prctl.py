"""What a process asks of Linux by prctl: with whom it dies, whose orphans it takes in, and what it is called. A no-op elsewhere."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
# Loaded at import, so that a freshly forked process does not have to.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None

# The beginning of a program that runs between fork and exec, as a program of its own (`python -I -S -c`), since code in the
# forked child of a process with threads may wait for ever for a lock. Its first argument is the number of its owner, with
# which it and what it executes dies, where the system can do that; the others are in `arguments`.
DIES_WITH_OWNER = f"""
import os, sys
owner, *arguments = sys.argv[1:]
if sys.platform == "linux":
    import ctypes
    PR_SET_PDEATHSIG, SIGKILL = {_PR_SET_PDEATHSIG}, 9
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(owner):
        sys.exit("its owner is gone")
"""


def become_subreaper() -> None:
    """Become the parent of every orphaned descendant, so that none of them gets out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process `signal_number` when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def set_process_name(name: str) -> None:
    """Show this process as `name` (15 bytes at most) in ps and top."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


def _prctl(option: int, argument: int | bytes) -> None:
    """Raises OSError."""
    if _LIBC is None:
        return
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
