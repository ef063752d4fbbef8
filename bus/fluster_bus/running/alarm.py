"""Waking an event loop a moment later, from any thread, unless it was called off: neither costs the loop anything."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import sys
import time
from collections.abc import Callable

_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC if sys.platform == "linux" else 0  # as timerfd_create spells them too


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Rings on `loop` so long after it was set last: a timer of the kernel's, which the loop waits for beside its sockets.

    Python has one from 3.13 on, which gives the interpreter's lock away at each call; this one keeps it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, after_s: float, on_ring: Callable[[], object]) -> None:
        """To be made on the loop. Raises OSError, also where there is no such timer."""
        libc = ctypes.PyDLL(None, use_errno=True) if sys.platform == "linux" else None
        if libc is None or not hasattr(libc, "timerfd_create"):
            raise OSError(errno.ENOSYS, "this system has no timerfd")
        self._settime = libc.timerfd_settime
        descriptor = libc.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS)
        if descriptor < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._descriptor = descriptor
        whole, rest = divmod(int(after_s * 1e9), 1_000_000_000)
        self._after = _Setting(_Timespec(0, 0), _Timespec(whole, rest))
        self._never = _Setting()
        self._in_time, self._off = ctypes.byref(self._after), ctypes.byref(self._never)
        self._loop, self._on_ring = loop, on_ring
        loop.add_reader(descriptor, self._ring)

    def __del__(self) -> None:
        # Not before: a thread that sets it must not find another's descriptor.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def set(self) -> None:
        """Have it ring once, counted from now."""
        self._settime(self._descriptor, 0, self._in_time, None)

    def call_off(self) -> None:
        """Have it not ring, if it has not yet."""
        self._settime(self._descriptor, 0, self._off, None)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set anew, or called off, at this very moment
            os.read(self._descriptor, 8)
            self._on_ring()

    def close(self) -> None:
        """Ring no more. On the loop."""
        self._loop.remove_reader(self._descriptor)
