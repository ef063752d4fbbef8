"""Holds a task that asked for disk to it: what it has in its own folder is measured now and then, and with more it is stopped.

Only its own folder counts, with its log and what it returns. What it writes elsewhere, such as in a `cwd` of its user's, does not, nor
does what lies in a file system of its own (scratch.py), which holds no more than was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fluster_services.capacity import describe_bytes
from fluster_services.worker.contract.attempt_directory import LaunchSpec
from fluster_services.worker.linux.disk import sizes
from fluster_services.worker.linux.scratch import IMAGE_FILE, is_full
from fluster_services.worker.linux.timers import Timers

INTERVAL_S = 5.0
_MEASURING_COSTS = 20  # measured so seldom that it takes one part in so many of the time
_SLICE_S = 0.005  # for which its keeper does nothing else
_TIMER = "disk"


class DiskWatch:
    """Watches the folder of an attempt that asked for disk; `on_over` is called with the reason when it takes more."""

    def __init__(self, timers: Timers, folder: Path, spec: LaunchSpec, on_over: Callable[[str], None]) -> None:
        self._timers = timers
        self._folder = folder
        self._limit = spec.disk
        self._scratch = spec.scratch
        self._on_over = on_over
        self._sizes: Iterator[int] = iter(())
        self._cost_s = 0.0  # of the measuring under way
        if self._limit is not None:
            self._wait()

    def full_limit(self) -> int | None:
        """The bytes that the attempt asked for, if it has a file system of its own and that is full."""
        return self._limit if self._scratch is not None and is_full(self._folder / self._scratch) else None

    def close(self) -> None:
        """Look no more."""
        self._timers.cancel(_TIMER)

    def _wait(self) -> None:
        pause_s = max(INTERVAL_S, _MEASURING_COSTS * self._cost_s)
        self._timers.set(_TIMER, time.monotonic() + pause_s, self._begin)

    def _begin(self) -> None:
        self._size, self._cost_s = 0, 0.0
        self._sizes = sizes(self._folder, spared=self._folder / IMAGE_FILE if self._scratch is not None else None)
        self._measure()

    def _measure(self) -> None:
        began_at = time.monotonic()
        while time.monotonic() - began_at < _SLICE_S:
            size = next(self._sizes, None)
            if size is None:
                self._cost_s += time.monotonic() - began_at
                self._judge()
                return
            self._size += size
        self._cost_s += _SLICE_S
        self._timers.set(_TIMER, time.monotonic() + _SLICE_S, self._measure)

    def _judge(self) -> None:
        told = why_over(self._size, self._limit)
        if told is not None:
            self._on_over(told)
        else:
            self._wait()


def why_over(size: int, limit: int | None) -> str | None:
    """Why an attempt with `size` bytes in its own folder is to be stopped; None when it may go on."""
    if not limit or size <= limit:
        return None
    return f"over its disk limit of {describe_bytes(limit)}: its own folder has {describe_bytes(size)}"
