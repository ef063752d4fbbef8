"""Looks after one worker: takes it out when it is not well, brings it back, and says whose fault a failure is.

What follows from what is decided in health.py; here the machine is looked at.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from fluster_bus.messages import JobStatus, WorkerId
from fluster_bus.running.coroutines import wait_set
from fluster_services.capacity import describe_bytes
from fluster_services.config import DiskLimits
from fluster_services.worker.contract.faults import (
    BuildError,
    LaunchError,
    WorkerFaultError,
    is_no_room,
    is_workers_fault,
    why_scarce,
)
from fluster_services.worker.contract.outcome import Outcome, describe_survivors
from fluster_services.worker.contract.runtime import RunningTask, Runtime
from fluster_services.worker.linux.disk import size_of, why_unwritable
from fluster_services.worker.linux.processes import start_ticks
from fluster_services.worker.presence.health import DiskUse, Health, MachineCheck, who_filled

log = logging.getLogger(__name__)

_INTERVAL_S = 5.0
_MEASURE_S = 30.0
_MEASURING_COSTS = 20  # folders are walked so seldom that it takes one part in so many of the time
_MAX_ATTEMPTS = 100


class Wellness:
    """Whether one worker may take work. `on_change` is awaited whenever that, or the reason, is another.

    `examine` tells why no attempt can be started, whatever the disk of `state_dir` has, and `places` where what attempts need is
    made; both are called in a thread.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        state_dir: Path,
        runtime: Runtime,
        limits: DiskLimits,
        *,
        examine: Callable[[], str | None],
        places: Callable[[], list[Path]],
        running: Mapping[str, RunningTask],
        grace_s: float,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        self._worker_id = worker_id
        self._state_dir = state_dir
        self._runtime = runtime
        self._examine = examine
        self._places = places
        self._running = running
        self._grace_s = grace_s
        self._on_change = on_change
        self._health = Health(limits)
        self._apart: str | None = None
        self._told: str | None = None
        self._well: DiskUse | None = None  # when the worker was last seen well
        self._measure_at = 0.0  # not earlier, while it is well
        self._blame_at = 0.0  # not earlier, while it is not
        self._blamed: dict[str, str] = {}  # {attempt that filled the disk: how that is reported}
        self._looking = asyncio.Lock()
        self._again = asyncio.Event()
        self._survivors = Survivors()

    @property
    def trouble(self) -> str | None:
        """Why the worker takes no work; None while it is well."""
        return self._apart or self._health.trouble

    def problems(self) -> list[str]:
        """All that an operator should know."""
        found = [self.trouble, self._runtime.trouble(), *self._survivors.problems()]
        return [each for each in dict.fromkeys(found) if each is not None]

    async def on_apart(self, why: str | None) -> None:
        """The controller and this worker do not understand each other; None: they do."""
        self._apart = why
        await self._tell()

    async def run(self) -> None:
        """Check the machine now and then, until cancelled."""
        while True:
            await wait_set(self._again, self._health.pause_s(now=time.monotonic(), interval_s=_INTERVAL_S))
            self._again.clear()
            await self.look()

    async def look(self) -> None:
        """Look at the machine, and do what follows."""
        async with self._looking:
            check = await asyncio.to_thread(_check, self._state_dir, self._examine)
            now = time.monotonic()
            self._health.on_check(check, now=now)
            if self.trouble is None:
                if now >= self._measure_at:
                    self._well = await self._measured(check)
            elif self._health.has_no_room(check):
                await self._blame(check)
        await self._tell()

    async def _tell(self) -> None:
        if self._told != self.trouble:
            if self.trouble is None:
                log.info("%s is well again, and takes work", self._worker_id)
            else:
                log.warning("%s takes no work: %s", self._worker_id, self.trouble)
            self._told = self.trouble
            await self._on_change()

    # ---- who filled the disk ----------------------------------------------------------------------------

    async def _measured(self, check: MachineCheck) -> DiskUse:
        began_at = time.monotonic()
        folders = {key: running.folder for key, running in self._running.items()}
        sizes = await asyncio.to_thread(lambda: {key: size_of(folder) for key, folder in folders.items()})
        now = time.monotonic()
        self._blame_at = now + _MEASURING_COSTS * (now - began_at)
        self._measure_at = max(now + _MEASURE_S, self._blame_at)
        return DiskUse(check.free_bytes, sizes)

    async def _blame(self, check: MachineCheck) -> None:
        """Stop the attempt that filled the disk, if one did."""
        if self._well is None or time.monotonic() < self._blame_at:
            return
        filler = who_filled(self._well, await self._measured(check))
        running = self._running.get(filler.key) if filler is not None else None
        if filler is None or running is None or filler.key in self._blamed:
            return
        told = (
            f"it filled the disk of worker {self._worker_id}: its own folders grew by {describe_bytes(filler.grown_bytes)} of "
            f"the {describe_bytes(filler.lost_bytes)} that went"
        )
        log.warning("%s is stopped: %s", filler.key, told)
        self._blamed[filler.key] = told
        running.kill(self._grace_s, told, preempted=True)

    # ---- whose fault a failure is -----------------------------------------------------------------------

    async def why_unstarted(self, error: Exception, settled: Callable[[], Awaitable[None]]) -> Outcome:
        """How an attempt ends that could not be started; `settled` returns when what was made for it is gone again.

        If the fault is the worker's, it has stopped taking offers by the time this returns.
        """
        outcome = await self._why_unstarted(error, settled)
        has_output = isinstance(error, BuildError) and error.output.said > 0
        return dataclasses.replace(outcome, has_output=has_output)

    async def _why_unstarted(self, error: Exception, settled: Callable[[], Awaitable[None]]) -> Outcome:
        reason = f"could not be started: {error}"
        if not isinstance(error, (LaunchError, OSError)):  # whose text says little by itself
            reason = f"could not be started: {type(error).__name__}: {error}"
        if is_no_room(error) and not isinstance(error, WorkerFaultError):
            await settled()
            await self.look()
            if self.trouble is None:  # with what was made for it gone there is room again
                return await self._why_too_large(reason)
        elif is_workers_fault(error):
            await self._on_fault(str(error))
        else:  # it may well be for something that it does not name
            await self.look()
        if self.trouble is None:
            return Outcome(JobStatus.FAILED, reason)
        return self._spared(reason)

    async def _why_too_large(self, reason: str) -> Outcome:
        """How an attempt ends for which there is some room, and not enough. One that meets it too often is too large after all."""
        scarce = await asyncio.to_thread(_find_scarce, self._places)
        if scarce is None:
            return Outcome(JobStatus.WORKER_FAILED, f"{reason} (worker {self._worker_id})", filled_disk=True)
        await self._on_fault(scarce)
        why = f"{reason}; worker {self._worker_id} takes no work, {scarce}"
        return Outcome(JobStatus.WORKER_FAILED, why, is_spared=True, filled_disk=True)

    async def why_ended(self, key: str, outcome: Outcome) -> Outcome:
        """How an attempt ended whose process is over, once the state of the worker is taken into account.

        What failed while the disk was full may have failed for that, whatever it says, if it could say anything.
        """
        told = self._blamed.pop(key, None)
        if outcome.survivors:
            log.error("%s is over: %s", key, outcome.reason)
            self._survivors.add(key, outcome.survivors)
        if outcome.state is JobStatus.SUCCEEDED:
            return outcome
        if outcome.is_workers_fault:
            await self._on_fault(outcome.reason)
            return self._spared(outcome.reason)
        if told is None and outcome.is_own_end and not (outcome.error is not None and outcome.error.is_final):
            await self.look()
            told = self._blamed.pop(key, None)
            if told is None and (self._health.has_no_disk or (outcome.is_unstarted and self.trouble is not None)):
                return self._spared(outcome.reason)
        if told is None:
            return outcome
        self._again.set()  # its folders go now
        return dataclasses.replace(outcome, state=JobStatus.WORKER_FAILED, reason=told, filled_disk=True)

    async def _on_fault(self, what: str) -> None:
        """The worker could not do its part: when this returns, it takes no more offers."""
        self._health.on_fault(what, now=time.monotonic())
        self._again.set()
        await self._tell()

    def _spared(self, reason: str) -> Outcome:
        why = f"{reason}; it was not the task's fault: worker {self._worker_id} takes no work, {self.trouble}"
        return Outcome(JobStatus.WORKER_FAILED, why, is_spared=True)


def _find_scarce(places: Callable[[], list[Path]]) -> str | None:
    """Which of the places has little room left, in words; None when all have some."""
    return next((found for folder in places() if (found := why_scarce(folder)) is not None), None)


def _check(folder: Path, examine: Callable[[], str | None]) -> MachineCheck:
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return MachineCheck(str(folder), 0, error.strerror or str(error), examine())
    return MachineCheck(str(folder), free_bytes, why_unwritable(folder), examine())


class Survivors:
    """What is left of the attempts of one worker, and should not be."""

    def __init__(self) -> None:
        self._left: dict[str, list[tuple[int, str | None]]] = {}  # {attempt: (pid, when it was started)}

    def add(self, key: str, pids: Sequence[int]) -> None:
        """These processes of an attempt have survived; the oldest are forgotten where there are very many."""
        self._left[key] = [(pid, start_ticks(pid)) for pid in pids]
        while len(self._left) > _MAX_ATTEMPTS:
            del self._left[next(iter(self._left))]

    def problems(self) -> list[str]:
        """What still is there, one line for each attempt."""
        there = {key: [each for each in found if _is_there(*each)] for key, found in self._left.items()}
        self._left = {key: found for key, found in there.items() if found}
        return [f"of {key}, {describe_survivors([pid for pid, _ in found])}" for key, found in self._left.items()]


def _is_there(pid: int, started: str | None) -> bool:
    """Whether that very process is there: its number may be another's by now."""
    return started is not None and start_ticks(pid) == started
