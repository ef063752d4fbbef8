"""How a keeper stops its task: asks, waits, and then kills until nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from fluster_bus.running.backoff import Backoff
from fluster_services.worker.linux.processes import descendants
from fluster_services.worker.linux.timers import Timers

_FIRST_SWEEP_INTERVAL_S = 0.01
_LAST_SWEEP_INTERVAL_S = 1.0
_GIVE_UP_AFTER_S = 30.0  # a process that SIGKILL does not end by then hangs in the kernel
_TIMERS = ("sigkill", "sweep", "give_up")
BY_FORCE = signal.SIGUSR1  # has the process that attends a container end it by force


def kill_descendants() -> None:
    """SIGKILL all descendants that are there at this moment."""
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it ended; or it is another user's, and the record names it
            continue


class Killing:
    """The end of the task whose main process is `task_pid`, by force.

    When that only attends a container, it is asked to end that by force: killed itself, it could not.
    """

    def __init__(
        self, timers: Timers, task_pid: int, on_give_up: Callable[[], None], *, in_container: bool = False
    ) -> None:
        self.has_given_up = False
        self.is_main_over = False
        self._timers = timers
        self._task_pid = task_pid
        self._on_give_up = on_give_up
        self._in_container = in_container
        self._has_terminated = False  # SIGTERM was sent
        self._sweeps: Backoff | None = None  # set once SIGKILL was sent

    @property
    def is_in_grace(self) -> bool:
        """True between SIGTERM and SIGKILL."""
        return self._timers.at("sigkill") is not None

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM now, and SIGKILL after `grace_s`, if not earlier by a call before."""
        if grace_s <= 0:
            self.sweep()
            return
        if self._sweeps is not None:
            return
        if not self._has_terminated:
            self._has_terminated = True
            self._signal_group(signal.SIGTERM)
            self._signal_group(signal.SIGCONT)  # a stopped process would sleep through its grace
        deadline = time.monotonic() + grace_s
        previous = self._timers.at("sigkill")
        self._timers.set("sigkill", deadline if previous is None else min(deadline, previous), self.sweep)

    def sweep(self) -> None:
        """SIGKILL whatever is left, again and again until there is nothing: one may have forked while we looked."""
        now = time.monotonic()
        self._timers.cancel("sigkill")
        if self._sweeps is None:
            self._sweeps = Backoff(_FIRST_SWEEP_INTERVAL_S, _LAST_SWEEP_INTERVAL_S)
            self._timers.set("give_up", now + _GIVE_UP_AFTER_S, self._give_up)
        if self._in_container:
            if not self.is_main_over:
                os.kill(self._task_pid, BY_FORCE)
        else:
            self._kill_all()
        self._timers.set("sweep", now + self._sweeps.pause_s, self.sweep)
        self._sweeps.lengthen()

    def _kill_all(self) -> None:
        # With the main process reaped its group's number may be another's, but without a subreaper there is nothing better.
        if not self.is_main_over or not sys.platform.startswith("linux"):
            self._signal_group(signal.SIGKILL)
        kill_descendants()

    def end(self) -> None:
        """Nothing is left to kill, or that was given up."""
        self._timers.cancel(*_TIMERS)

    def _give_up(self) -> None:
        self.has_given_up = True
        self._on_give_up()

    def _signal_group(self, number: int) -> None:
        try:
            os.killpg(self._task_pid, number)
        except ProcessLookupError:
            # Between fork and setsid the group is not there yet.
            if not self.is_main_over:
                os.kill(self._task_pid, number)
        except PermissionError:  # how macOS answers when all of the group are zombies
            return
