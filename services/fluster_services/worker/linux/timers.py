"""Moments at which a process has something to do: timers with names, and an alarm by the fence clock."""

from __future__ import annotations

import selectors
from collections.abc import Callable

from fluster_bus.running.fence_clock import fence_clock
from fluster_bus.running.linux_calls import CLOCK_BOOTTIME, TimerFd

_LONGEST_S = 86_400.0  # a selector takes no more than some weeks, and users give what they like


class Timers:
    """Named moments, each at most once, on whatever clock the caller reads."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, at: float, action: Callable[[], None]) -> None:
        self._due[name] = (at, action)

    def at(self, name: str) -> float | None:
        return self._due[name][0] if name in self._due else None

    def cancel(self, *names: str) -> None:
        for name in names:
            self._due.pop(name, None)

    def first_at(self) -> float | None:
        return min((at for at, _ in self._due.values()), default=None)

    def timeout(self, now: float) -> float | None:
        """For how long to wait until it is to be looked again whether something is due; None: nothing ever is."""
        at = self.first_at()
        return min(max(0.0, at - now), _LONGEST_S) if at is not None else None

    def fire(self, now: float) -> None:
        for name, (at, action) in list(self._due.items()):
            if at <= now and self._due.get(name) == (at, action):
                del self._due[name]
                action()


class Alarm:
    """Has a selector return at a moment of the fence clock: at once when the machine wakes, if it slept past that moment.

    The time-out of select and epoll stands still while the machine sleeps, so it is too late by the whole sleep. Elsewhere than on
    Linux this is a plain time-out.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._timer = _timer()
        self._at: float | None = None
        if self._timer is not None:
            selector.register(self._timer, selectors.EVENT_READ, self._on_time)

    def timeout(self, at: float | None, timeout_s: float | None) -> float | None:
        """Set the alarm to `at`; returns how long to wait for the selector at most, which is to be `timeout_s` at most."""
        if self._timer is not None:
            if at != self._at:
                self._at = at
                self._timer.set_at(at)
            return timeout_s
        if at is None:
            return timeout_s
        left_s = max(0.0, at - fence_clock())
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def _on_time(self) -> None:
        if self._timer is not None:
            self._at = None  # it rings once
            self._timer.take()


def _timer() -> TimerFd | None:
    try:
        return TimerFd(CLOCK_BOOTTIME)
    except OSError:
        return None
