"""Whether a worker is fit to run tasks, and which attempt filled its disk. Pure: told what was found and when, it says what follows.

A worker takes itself out when it meets a fault of its own (its disk, its forks, its engine), or when a look at the machine
finds one. It returns when a look finds nothing and its pause is over: a look cannot see every fault, so one that comes again
soon after the return doubles the pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fluster_bus.running.backoff import Backoff
from fluster_services.capacity import describe_bytes
from fluster_services.config import DiskLimits

_UNWELL_INTERVAL_S = 1.0  # between two looks
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LAPSE_S = 120.0  # a fault that comes later than this after the return is another one


@dataclass(frozen=True)
class MachineCheck:
    """What one check of the machine found."""

    folder: str  # where the worker's state is
    free_bytes: int  # on the disk of that
    unwritable: str | None = None  # why nothing can be written there
    trouble: str | None = None  # why the runtime can start nothing


class Health:
    """What is wrong with one worker. Times are seconds of a monotonic clock."""

    def __init__(self, limits: DiskLimits) -> None:
        self._limits = limits
        self._found: str | None = None  # by the last look
        self.has_no_disk = False  # what that found is that the disk is full, or cannot be written to
        self._fault: str | None = None  # met since the worker was well
        self._back_at = 0.0  # not earlier
        self._well_since = -_LAPSE_S
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    @property
    def trouble(self) -> str | None:
        """Why the worker takes no work; None while it is well."""
        return self._found or self._fault

    def on_fault(self, what: str, *, now: float) -> None:
        """The worker could not do its part, by no fault of a task's."""
        if self._fault is None:
            if now - self._well_since < _LAPSE_S:  # it is met again
                self._backoff.lengthen()
            else:
                self._backoff.reset()
            self._back_at = now + self._backoff.pause_s
        self._fault = what

    def on_check(self, check: MachineCheck, *, now: float) -> None:
        """The machine was looked at."""
        was_well = self.trouble is None
        self._found = self._problem(check, was_well=was_well)
        self.has_no_disk = self._found is not None and self._found != check.trouble
        if self._found is None and now >= self._back_at:
            self._fault = None
        if self.trouble is None and not was_well:
            self._well_since = now

    def pause_s(self, *, now: float, interval_s: float) -> float:
        """How long until the next check, which is made each `interval_s` while the worker is well."""
        if self._found is not None:
            return min(_UNWELL_INTERVAL_S, interval_s)
        return min(max(self._back_at - now, 0.0), interval_s) if self._fault is not None else interval_s

    def has_no_room(self, check: MachineCheck) -> bool:
        """Whether what is wrong with a worker that is not well is that its disk is full."""
        return check.free_bytes < self._limits.well_free_bytes

    def _problem(self, check: MachineCheck, *, was_well: bool) -> str | None:
        """What is wrong, in words that stay the same as long as it does."""
        limits = self._limits
        if check.free_bytes < (limits.least_free_bytes if was_well else limits.well_free_bytes):
            return (
                f"its disk has no room: less than {describe_bytes(limits.well_free_bytes)} are left at {check.folder}"
            )
        if check.unwritable is not None:
            return f"its disk cannot be written to at {check.folder}: {check.unwritable}"
        return check.trouble


# ---- who filled the disk --------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskUse:
    """How a disk stood at one moment: what was free, and what each attempt had in folders of its own, in bytes."""

    free: int
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class DiskFiller:
    """The attempt that filled a disk."""

    key: str
    grown_bytes: int  # in its own folders
    lost_bytes: int  # of the disk's free space


def who_filled(well: DiskUse, now: DiskUse) -> DiskFiller | None:
    """The attempt whose own folders grew by more than half of what the disk has lost since it was `well`; None: none did."""
    lost = well.free - now.free
    growth = {key: size - well.sizes.get(key, 0) for key, size in now.sizes.items()}
    if lost <= 0 or not growth:
        return None
    key = max(growth, key=lambda each: growth[each])
    return DiskFiller(key, growth[key], lost) if 2 * growth[key] > lost else None
