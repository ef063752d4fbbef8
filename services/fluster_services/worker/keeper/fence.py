"""The fence of one attempt, as its keeper keeps it."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from fluster_bus.running.fence_clock import fence_clock
from fluster_services.worker.linux.timers import Alarm, Timers


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
