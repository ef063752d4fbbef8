"""Wakes a process at a moment of the fence clock: at once when the machine wakes, if it slept past that moment.

The time-out of select and epoll stands still while the machine sleeps, so it is too late by the whole sleep.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import sys

from fluster_bus.running.fence_clock import fence_clock

_CLOCK_BOOTTIME = 7  # linux/time.h
_TFD_TIMER_ABSTIME = 1  # linux/timerfd.h
_NANOSECONDS = 1_000_000_000
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Alarm:
    """Has a selector return at a moment. Elsewhere than on Linux it is a plain time-out."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._fd = _timer_fd()
        self._at: float | None = None
        if self._fd is not None:
            selector.register(self._fd, selectors.EVENT_READ, self._on_time)

    def timeout(self, at: float | None, timeout_s: float | None) -> float | None:
        """Set the alarm to `at`; returns how long to wait for the selector at most, which is to be `timeout_s` at most."""
        if self._fd is not None:
            if at != self._at:
                self._at = at
                _set(self._fd, at)
            return timeout_s
        if at is None:
            return timeout_s
        left_s = max(0.0, at - fence_clock())
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def _on_time(self) -> None:
        if self._fd is not None:
            self._at = None  # it rings once
            os.read(self._fd, 8)


def _timer_fd() -> int | None:
    if _LIBC is None:
        return None
    fd = _LIBC.timerfd_create(_CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC)
    return fd if fd >= 0 else None


def _set(fd: int, at: float | None) -> None:
    # Zero would disarm it: a moment long past is one nanosecond after boot.
    ticks = 0 if at is None else max(1, int(at * _NANOSECONDS))
    spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(*divmod(ticks, _NANOSECONDS)))
    if _LIBC is not None and _LIBC.timerfd_settime(fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"timerfd_settime: {os.strerror(error)}")
