"""The last who can fence a task: a template whose worker, or whose keepers, are dead or stopped.

A keeper fences its task by itself, and a worker ends what a dead keeper leaves. What is left is the watchdog's: a keeper that is
dead or stopped when the worker's lease is over, keepers that die when their worker is dead, and keepers that do not end when
the cluster's owner is gone.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fluster_bus.core.json_types import JsonObject
from fluster_bus.running.fence_clock import fence_clock
from fluster_services.worker.contract.attempt_directory import (
    KEEPER_FILE,
    MAX_SPEC_BYTES,
    SPEC_FILE,
    discard,
    read_json,
    read_json_lines,
)
from fluster_services.worker.contract.attempt_records import LaunchSpec, from_json
from fluster_services.worker.keeper.leftovers import keeper_state, kill_keeper, kill_leftovers, started
from fluster_services.worker.linux.process_locks import is_locked
from fluster_services.worker.linux.timers import Timers

_OWNER_GONE_S = 3.0  # for keepers to end their tasks by themselves
_GIVE_UP_AFTER_S = 10.0  # a process that SIGKILL does not end by then hangs in the kernel
_SWEEP_S = 0.02
_STARTING_S = 0.2  # before the next look at an attempt whose keeper has not yet written that it started
_MAX_LOOKS = 50
_OVERDUE_S = 0.5  # between two looks at attempts that should have ended
_MAX_OVERDUE = 120
_LEFT_LATER_S = 60.0  # between two looks whether a new worker has taken over
_STOPPED = "Tt"


@dataclass(frozen=True)
class _Attempt:
    directory: Path
    spec: LaunchSpec
    known: JsonObject | None  # what its keeper wrote when it started the task


class Watchdog:
    """Ends what outlives the lease of a worker, or the worker and its keeper, or the owner. One template has one."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._timers = Timers()  # by the fence clock
        self._state_dir: Path | None = None
        self._is_alone = False
        self._owner_is_gone = False
        self._looks = 0
        self._overdue = 0  # looks at attempts that should have ended, since the last renewal
        self._keepers: dict[Path, int | None] = {}  # {directory: pidfd}, of living ones whose attempts are not over
        self._ending: dict[Path, tuple[_Attempt, float]] = {}  # {directory: (attempt, when to give up)}

    @property
    def next_at(self) -> float | None:
        """When `fire` is to be called, by the fence clock."""
        return self._timers.first_at()

    @property
    def is_needed(self) -> bool:
        """Whether there is something left to watch, once the worker is gone."""
        return bool(self._keepers or self._ending or self._timers.at("look") is not None)

    def fire(self) -> None:
        """Do what is due."""
        self._timers.fire(fence_clock())

    def renew(self, state_dir: Path, ended_by: float) -> None:
        """The worker's lease: by `ended_by` keepers have ended what is fenced, unless there is another renewal."""
        self._state_dir = state_dir
        self._overdue = 0
        self._timers.set("lease", ended_by, self._on_lease_over)

    def on_start(self, directory: Path, spec: LaunchSpec) -> None:
        """An attempt is started. Before the first renewal its own fence is all that is known of the lease."""
        self._state_dir = directory.parent
        if self._timers.at("lease") is None and spec.fence_after_s is not None:
            self._timers.set("lease", fence_clock() + spec.fence_after_s + spec.kill_grace_s, self._on_lease_over)

    def on_worker_gone(self) -> None:
        """Watch the keepers in its place: what they leave when they die has no other end."""
        self._is_alone = True
        if self._timers.at("lease") is None:
            self._timers.set("lease", fence_clock(), self._on_lease_over)  # it is over already
        self._look()

    def on_owner_gone(self) -> None:
        """Keepers end their tasks now, and go; those that do not are ended."""
        self._is_alone = self._owner_is_gone = True
        self._timers.set("lease", fence_clock() + _OWNER_GONE_S, self._on_lease_over)
        self._look()

    # ---- looking ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        starts = False
        for attempt in self._unfinished():
            if attempt.directory in self._ending:
                continue
            if attempt.known is None:
                starts = True
            elif keeper_state(attempt.known) is None:
                self._end(attempt)
            elif attempt.directory not in self._keepers:
                self._keepers[attempt.directory] = self._open(attempt.known["keeper_pid"])
        polls = None in self._keepers.values()
        if polls or (starts and self._looks < _MAX_LOOKS):
            self._looks += 1
            self._timers.set("look", fence_clock() + _STARTING_S, self._on_look)

    def _on_look(self) -> None:
        for directory in [each for each, fd in self._keepers.items() if fd is None]:
            del self._keepers[directory]
        self._look()

    def _open(self, pid: int) -> int | None:
        """What tells when the process ends; None where nothing does."""
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # not on this system, or it ended just now: looked at again
            return None
        self._selector.register(fd, selectors.EVENT_READ, self._on_keeper_over)
        return fd

    def _on_keeper_over(self) -> None:
        """One of the keepers ended: those that live are watched again."""
        self._let_go()
        self._look()

    def _let_go(self) -> None:
        for fd in self._keepers.values():
            if fd is not None:
                self._selector.unregister(fd)
                os.close(fd)
        self._keepers.clear()

    def _unfinished(self) -> Iterator[_Attempt]:
        try:
            paths = sorted(self._state_dir.iterdir()) if self._state_dir is not None else []
        except OSError:  # the folder was removed, and with it all that is known
            return
        for directory in paths:
            if "." in directory.name or not directory.is_dir():
                continue
            spec = _spec_in(directory)
            if spec is not None and "exited" not in read_json_lines(directory / KEEPER_FILE):
                yield _Attempt(directory, spec, started(directory))

    # ---- ending -----------------------------------------------------------------------------------------

    def _on_lease_over(self) -> None:
        if self._is_alone and not self._owner_is_gone and self._is_succeeded():
            self._let_go()
            self._timers.cancel("look")
            return
        if self._owner_is_gone:
            self._timers.cancel("look")
        is_left = False
        for attempt in self._unfinished():
            if attempt.known is None:  # it is being started
                is_left = True
                continue
            if self._owner_is_gone:
                kill_keeper(attempt.known)
                self._end(attempt)
            elif attempt.spec.fence_after_s is not None:
                if (keeper_state(attempt.known) or "T") in _STOPPED:
                    self._end(attempt)
                else:
                    is_left = True  # it ends the task by itself, unless it is stopped meanwhile
        if not self._owner_is_gone and (is_left or self._is_alone):
            self._overdue += is_left
            again_s = _OVERDUE_S if is_left and self._overdue < _MAX_OVERDUE else _LEFT_LATER_S
            self._timers.set("lease", fence_clock() + again_s, self._on_lease_over)

    def _is_succeeded(self) -> bool:
        """Whether another worker has the state folder, whose own watchdog knows its lease."""
        return self._state_dir is not None and is_locked(self._state_dir)

    def _end(self, attempt: _Attempt) -> None:
        fd = self._keepers.pop(attempt.directory, None)
        if fd is not None:
            self._selector.unregister(fd)
            os.close(fd)
        self._ending.setdefault(attempt.directory, (attempt, time.monotonic() + _GIVE_UP_AFTER_S))
        self._sweep()

    def _sweep(self) -> None:
        for directory, (attempt, give_up_at) in list(self._ending.items()):
            try:
                is_left = bool(kill_leftovers(directory, attempt.spec))
            except OSError:  # the directory went: the process that removed it has seen the end
                is_left = False
            if not is_left or time.monotonic() > give_up_at:
                del self._ending[directory]
                if self._owner_is_gone:
                    discard(directory)
        if self._ending:
            self._timers.set("sweep", fence_clock() + _SWEEP_S, self._sweep)


def _spec_in(directory: Path) -> LaunchSpec | None:
    """What runs there; None where it is forgotten at this moment.

    A task that wrote over it is ended as any other, though its groups are not known then.
    """
    path = directory / SPEC_FILE
    try:
        spec = from_json(LaunchSpec, read_json(path, MAX_SPEC_BYTES) or {})
        if isinstance(spec.groups, dict):
            return spec
    except (TypeError, ValueError, AttributeError):
        pass
    return LaunchSpec(key=directory.name, fence_after_s=0.0) if os.path.lexists(path) else None
