"""Finds every process that a test started, also those that were forked away from their parents."""

import contextlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from tests.waiting import wait_until

_VARIABLE = "FLUSTER_TEST_FAMILY"


@dataclass(frozen=True)
class Family:
    """Processes that were executed with a mark of their own in the environment, or copied from one that was."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def variables(self) -> dict[str, str]:
        """What to give to a process that is to belong to the family. Commands of jobs inherit nothing by themselves."""
        return {_VARIABLE: self.mark}

    def environment(self, **more: str) -> dict[str, str]:
        """This process's environment with the mark."""
        return {**os.environ, **self.variables, **more}

    def members(self) -> list[psutil.Process]:
        """Those that live."""
        return [process for process in psutil.process_iter() if self._has(process)]

    def named(self, part: str) -> list[psutil.Process]:
        """Those that live and have `part` in their command line or name."""
        found = []
        for process in self.members():
            try:
                if part in process.name() or any(part in word for word in process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill_named(self, part: str) -> None:
        """Kill those that `named` finds; one may have ended by itself since."""
        for process in self.named(part):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _has(self, process: psutil.Process) -> bool:
        try:
            return _mark_of(process.environ()) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def kill(self) -> None:
        """End them all."""
        for process in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait_gone(self, timeout_s: float = 60) -> None:
        """Return when none is left."""
        wait_until(lambda: not self.members(), timeout_s, lambda: [_shown(process) for process in self.members()])


def wait_ended(process: psutil.Process, timeout_s: float = 60) -> None:
    """Return when `process` runs no more, though its parent may not have taken note of it."""

    def has_ended() -> bool:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    def shown() -> list[str]:
        return [_shown(each) for each in (process, *process.parents())]

    with contextlib.suppress(psutil.NoSuchProcess):
        wait_until(has_ended, timeout_s, shown)


def _mark_of(environment: Mapping[str, str]) -> str | None:
    return environment.get(_VARIABLE)


def _shown(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()} {process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"
