"""Follows an attempt to its end: its progress is passed on, and its output carried off."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from fluster_bus.messages import JobStatus, Progress
from fluster_services.worker.attempts.log_pump import LogPump
from fluster_services.worker.contract.attempt_directory import ExitRecord
from fluster_services.worker.contract.outcome import Outcome, outcome
from fluster_services.worker.contract.runtime import Exited, Progressed, RunningTask, Spooled


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
        await pump.publish()
        if isinstance(event, Exited):
            exit_record = event.record
    if exit_record is None:
        return Outcome(JobStatus.WORKER_FAILED, "its end is not known")
    return replace(outcome(exit_record), progress=progress)
