"""What a keeper bounds its task by: the fence, its disk and memory, and the GPUs that are its own.

Of the disk only the task's own folder counts, with its log and what it returns. What it writes elsewhere, such as in a `cwd` of its
user's, does not, nor does what lies in a file system of its own (scratch.py), which holds no more than was asked for.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from fluster.progress_file import DIRECTORY_VARIABLE
from fluster_bus.running.fence_clock import fence_clock
from fluster_services.capacity import describe_bytes
from fluster_services.worker.contract.attempt_records import LaunchSpec
from fluster_services.worker.gpus.holders import Holder, described
from fluster_services.worker.gpus.locks import GpuLock, GpuTakenError
from fluster_services.worker.linux import cgroups
from fluster_services.worker.linux.disk import sizes
from fluster_services.worker.linux.processes import oom_kill_count
from fluster_services.worker.linux.scratch import IMAGE_FILE, is_full
from fluster_services.worker.linux.timers import Alarm, Timers

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
                self._stop_if_over()
                return
            self._size += size
        self._cost_s += _SLICE_S
        self._timers.set(_TIMER, time.monotonic() + _SLICE_S, self._measure)

    def _stop_if_over(self) -> None:
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


class Fence:
    """When a task is to be stopped, and when it is to have ended: by the fence clock, and at once when the machine wakes."""

    def __init__(
        self, selector: selectors.BaseSelector, on_due: Callable[[], None], on_grace_over: Callable[[], None]
    ) -> None:
        self._timers = Timers()
        self._alarm = Alarm(selector)
        self._on_due = on_due
        self._on_grace_over = on_grace_over

    def set(self, at: float, *, grace_s: float) -> None:
        """Move it. The grace counts from when it is due: a keeper that was stopped, or asleep, past that has none to give."""
        self._timers.set("due", at, self._on_due)
        self._timers.set("grace", at + grace_s, self._on_grace_over)

    def cancel(self) -> None:
        """Have none."""
        self._timers.cancel("due", "grace")

    @property
    def is_overdue(self) -> bool:
        """Whether it was due before this process noticed."""
        at = self._timers.at("due")
        return at is not None and at <= fence_clock()

    def timeout(self, timeout_s: float | None) -> float | None:
        """Return how long to wait for the selector at most, which is to be `timeout_s` at most."""
        return self._alarm.timeout(self._timers.first_at(), timeout_s)

    def fire(self) -> None:
        """Do what is due."""
        self._timers.fire(fence_clock())


class HeldGpus:
    """The locks of an attempt's GPUs; none for an attempt without any."""

    def __init__(self) -> None:
        self._locks: list[GpuLock] = []
        self._holder: Holder | None = None

    @property
    def fds(self) -> list[int]:
        """What the task is to inherit: it has its GPUs for as long as one of its processes has these open."""
        return [lock.fd for lock in self._locks]

    def take(self, spec: LaunchSpec, directory: Path, *, since_boot_s: float) -> None:
        """Take all of them, and leave a note in each. Raises GpuTakenError, OSError; then none is held."""
        if not spec.gpu_locks:
            return
        self._holder = Holder.here(
            spec.key,
            since_boot_s=since_boot_s,
            mark=f"{DIRECTORY_VARIABLE}={directory}",
            groups=list(spec.groups),
            container=spec.container.name if spec.container is not None else "",
            engine=spec.container.engine if spec.container is not None else "",
        )
        try:
            for path, gone in sorted(spec.gpu_locks.items()):  # in one order for all that take several
                self._take(GpuLock(Path(path)), gone)
        except BaseException:
            self.release()
            raise

    def _take(self, lock: GpuLock, gone: str) -> None:
        assert self._holder is not None  # noqa: S101 - `take` has made it
        try:
            lock.take(gone=gone)
            lock.write_note(self._holder.as_note())
        except GpuTakenError as cause:
            note = lock.note()
            lock.close()
            raise GpuTakenError(
                f"{described(note)} has {lock.path.name.removeprefix('fluster-gpu-')}: {cause}"
            ) from cause
        except BaseException:
            lock.close()
            raise
        self._locks.append(lock)

    def on_begun(self, task_pid: int) -> None:
        """Name the task's process as well, by whose session what is left of it is found."""
        if self._holder is None:
            return
        note = self._holder.begun(task_pid).as_note()
        for lock in self._locks:
            with suppress(OSError):  # a full disk: the environment of its processes tells who they are
                lock.write_note(note)

    def release(self) -> None:
        """All of the task has ended: the next one may take them."""
        for lock in self._locks:
            with suppress(OSError):
                lock.clear_note()
        self.leave()

    def leave(self) -> None:
        """Let go of them without a word: their next holder proves that nothing of the task is left."""
        for lock in self._locks:
            lock.close()
        self._locks.clear()
        self._holder = None


class MemoryBound:
    """Whether a task was ended for lack of memory: its own limit's, or the machine's."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec
        self._kills_before: int | None = None

    def on_begun(self) -> None:
        """The task has begun: what the machine killed before is not counted."""
        self._kills_before = oom_kill_count()

    def exceeded_limit(self) -> int | None:
        """Return the task's limit, in bytes, when it took more; else None."""
        limit = self._spec.limits.memory
        return limit if limit and cgroups.was_over_memory(self._spec.groups, limit) else None

    def was_machine_short(self, signal_number: int | None) -> bool | None:
        """True when the task was killed as the machine ran out of memory, as far as is known; None when that cannot be known."""
        # The machine's count has the kills of all: of a container, the engine itself tells why it ended.
        if signal_number != signal.SIGKILL or self._spec.container is not None:
            return False
        count = oom_kill_count()
        return None if count is None or self._kills_before is None else count > self._kills_before
