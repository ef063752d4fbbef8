"""Calls of Linux that Python's library does not have, by ctypes: prctl, and timerfd, which it has from 3.13 on.

By prctl a process says with whom it dies, whose orphans it takes in, and what it is called; elsewhere that has no effect.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
CLOCK_BOOTTIME = 7  # linux/time.h: goes on while the machine sleeps
_TFD_TIMER_ABSTIME = 1  # linux/timerfd.h
_NANOSECONDS = 1_000_000_000
# Loaded at import, so that a freshly forked process does not have to. A PyDLL keeps the interpreter's lock: none of these calls
# blocks, and a thread that gives the lock away waits to have it again.
_LIBC = ctypes.PyDLL(None, use_errno=True) if sys.platform.startswith("linux") else None

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
        raise _error(f"prctl({option})")


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, nanoseconds: int) -> _TimeSpec:
        return cls(*divmod(nanoseconds, _NANOSECONDS))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class TimerFd:
    """A timer of the kernel's: a descriptor that is readable once the moment has come for which it was set last."""

    def __init__(self, clock: int) -> None:
        """`clock` is one of time's CLOCK_… numbers, or CLOCK_BOOTTIME. Raises OSError, also where the system has no such timers."""
        if _LIBC is None or not hasattr(_LIBC, "timerfd_create"):
            raise OSError(errno.ENOSYS, "this system has no timerfd")
        self._settime = _LIBC.timerfd_settime
        self._fd: int = _LIBC.timerfd_create(
            clock, os.O_NONBLOCK | os.O_CLOEXEC
        )  # which is how it spells these flags too
        if self._fd < 0:
            raise _error("timerfd_create")

    def fileno(self) -> int:
        return self._fd

    def set_at(self, at_s: float | None) -> None:
        """Set it to a moment of its clock, which may be past; None: it never comes. Raises OSError."""
        # Zero would stop it: a moment long past is one nanosecond after the clock began.
        value = 0 if at_s is None else max(1, int(at_s * _NANOSECONDS))
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec.of(value))
        if self._settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise _error("timerfd_settime")

    def setter(self, after_s: float) -> Callable[[], object]:
        """Return what sets it to `after_s` from when that is called, prepared once; with 0 what has it never come."""
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec.of(int(after_s * _NANOSECONDS)))
        return partial(self._settime, self._fd, 0, ctypes.byref(spec), None)

    def take(self) -> bool:
        """Have the descriptor be unreadable until it is set again; whether the moment had come."""
        with suppress(BlockingIOError):
            os.read(self._fd, 8)
            return True
        return False

    def close(self) -> None:
        """Close the descriptor. Another may get its number: nothing may set it from then on."""
        os.close(self._fd)


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
