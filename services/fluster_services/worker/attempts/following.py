"""Follows an attempt to its end, or gives it up: its task can write where the worker reads."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from fluster_bus.core.errors import HOPELESS, BusError
from fluster_bus.core.fault_log import FaultLog, one_bounded_line
from fluster_bus.messages import JobStatus, Progress
from fluster_services.worker.attempts.pumps import LogPump
from fluster_services.worker.contract.attempt_directory import ExitRecord
from fluster_services.worker.contract.outcome import Outcome, outcome
from fluster_services.worker.contract.runtime import Exited, Progressed, RunningTask, Spooled

log = logging.getLogger(__name__)
_faults = FaultLog(log)


async def follow(
    running: RunningTask,
    pump: LogPump,
    *,
    on_progress: Callable[[Progress], Awaitable[None]],
    before_output: Callable[[], Awaitable[object]] | None = None,
) -> Outcome:
    """Carry an attempt's output off until it ends; returns how that was, once the last line is in the stream.

    `before_output` is awaited before any of it is published.
    """
    progress: Progress | None = None
    exit_record: ExitRecord | None = None
    async for event in running.events():
        if isinstance(event, Progressed):
            progress = Progress(fraction=event.fraction, message=event.message)
            await on_progress(progress)
            continue
        if before_output is not None and isinstance(event, Spooled):
            await before_output()
        await pump.publish(up_to=event.offset if isinstance(event, Spooled) else None)
        if isinstance(event, Exited):
            exit_record = event.record
    if exit_record is None:
        return Outcome(JobStatus.WORKER_FAILED, "its end is not known")
    return replace(outcome(exit_record), progress=progress)


def is_of_the_bus(error: Exception) -> bool:
    """True for what befalls the worker's connection, and no attempt."""
    return isinstance(error, BusError) and not isinstance(error, HOPELESS)


def give_up(key: str, running: RunningTask | None, error: Exception) -> Outcome:
    """Stop an attempt that met an error where it was started or followed; its end."""
    _faults.fault(error, "%s is followed no further", key)
    reason = f"its worker could not follow it any further: {one_bounded_line(f'{type(error).__name__}: {error}')}"
    if running is not None:
        running.kill(0.0, reason)
    is_of_the_machine = isinstance(error, OSError)
    return Outcome(JobStatus.WORKER_FAILED if is_of_the_machine else JobStatus.FAILED, reason)


async def forget(running: RunningTask) -> None:
    """Remove all that is kept about an attempt, once it has ended. What cannot be removed goes with the worker's next start."""
    try:
        async for _ in running.events():
            pass  # the last one is its end
        await running.forget()
    except Exception as error:
        _faults.fault(error, "what %s has left is not removed yet", running.key)


async def discard(running: RunningTask) -> None:
    """The same for one that is another worker's by now."""
    running.kill(0.0, "superseded by a newer attempt")
    await forget(running)
