"""Follows attempts from their start to their end, or gives them up: a task can write where its worker reads."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from pydantic import ValidationError

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets
from fluster_bus.core.errors import HOPELESS, BusError, FaultLog, one_bounded_line
from fluster_bus.messages import JobStatus, Namespace, Progress, TaskRecord
from fluster_bus.messages.parts.images import UsedImage
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.tables import Row
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.pumps import LogPump, ProgressPump, publish_result
from fluster_services.worker.contract.attempt_records import ExitRecord
from fluster_services.worker.contract.outcome import Outcome, outcome
from fluster_services.worker.contract.runtime import Exited, Progressed, RunningTask, Spooled

log = logging.getLogger(__name__)
_faults = FaultLog(log)

_MOMENT_S = 0.05  # shorter than a user notices


class Follower:
    """Follows what runs. `why_ended` takes the state of the worker into account, `on_gpu_taken` takes the GPUs of an attempt
    that another holds out of the capacity, `on_over` is called with the key of an
    attempt that has ended, `give_back` frees its capacity, and `obey` does what a record asks for.
    """

    def __init__(
        self,
        bus: Bus,
        claims: Claims,
        progress: ProgressPump,
        *,
        why_ended: Callable[[str, Outcome], Awaitable[Outcome]],
        on_gpu_taken: Callable[[str], Awaitable[None]],
        on_over: Callable[[str], None],
        give_back: Callable[[str], Awaitable[None]],
        obey: Callable[[TaskRecord], None],
    ) -> None:
        self._bus = bus
        self._claims = claims
        self._progress = progress
        self._why_ended = why_ended
        self._on_gpu_taken = on_gpu_taken
        self._on_over = on_over
        self._give_back = give_back
        self._obey = obey
        self._registries: dict[Namespace, Registry] = {}

    async def see_through(self, row: Row[TaskRecord], key: str, running: RunningTask, *, adopted: bool) -> None:
        """Follow an attempt to its end, and write that into its record."""
        started_at = time.time()
        row, outcome = await self._followed(row, key, running, started_at, adopted=adopted)
        self._on_over(key)
        if outcome.is_gpu_taken:
            await self._on_gpu_taken(key)
        # Joined before the end is written: a controller that reads the end and offers the next task finds this worker listening.
        await asyncio.gather(self._remove_endpoints(row.value, outcome.reason), self._give_back(key))
        result = await publish_result(self._bus, row.value, running, outcome.result)
        if not await self._claims.end(
            row,
            outcome.state,
            outcome.reason,
            exit_code=outcome.exit_code,
            error=outcome.error,
            started_at=started_at,
            last_words=outcome.last_words,
            result=result,
            progress=outcome.progress,
            is_spared=outcome.is_spared,
            filled_disk=outcome.filled_disk,
            image=_used_image(running),
        ):
            log.info("%s ended as %s, and is no longer this worker's", key, outcome.state)
        await forget(running)

    async def _followed(
        self, row: Row[TaskRecord], key: str, running: RunningTask, started_at: float, *, adopted: bool
    ) -> tuple[Row[TaskRecord], Outcome]:
        """How an attempt ended, and its record by then."""
        is_over = asyncio.get_running_loop().create_future()
        tell_running = asyncio.create_task(self._tell_running(row, is_over, started_at, _used_image(running)))

        async def speak() -> None:
            """Before its output can be read, its record says that it runs."""
            if not is_over.done():
                is_over.set_result(False)
            await asyncio.wait({tell_running})

        try:
            pump = LogPump(self._bus, row.value, running)
            try:
                if adopted:
                    await pump.resume()
                on_progress = functools.partial(self._progress.tell, key, row.value)
                outcome = await follow(running, pump, on_progress=on_progress, before_output=speak)
                outcome = await self._why_ended(key, outcome)
            except Exception as error:
                if is_of_the_bus(error):
                    raise
                # What one task has left where it is read must not end the worker, and again each of its successors.
                outcome = give_up(key, running, error)
            if not is_over.done():
                is_over.set_result(True)
            return await tell_running, outcome
        finally:
            tell_running.cancel()
            self._progress.forget(key)

    async def _tell_running(
        self, row: Row[TaskRecord], is_over: asyncio.Future[bool], started_at: float, image: UsedImage | None
    ) -> Row[TaskRecord]:
        """Write that it runs, unless it is silent and over in a moment: then that is written together with its end."""
        try:
            async with asyncio.timeout(_MOMENT_S):
                if await asyncio.shield(is_over):
                    return row
        except TimeoutError:
            pass
        row = await self._claims.run(row, started_at=started_at, image=image)
        if row.value.state is JobStatus.BUILDING:  # it could not be written: the task was given to another worker
            record = row.value
            latest = await self._claims.patiently(
                lambda: self._claims.look(record.namespace, record.job_id, record.task)
            )
            if latest is not None:
                self._obey(latest.value)
        self._obey(row.value)  # what was wished while it was being started
        return row

    async def _remove_endpoints(self, record: TaskRecord, reason: str) -> None:
        """Whatever the attempt registered is gone with it; callers learn of it at once."""
        registry = self._registries.setdefault(record.namespace, Registry(self._bus, record.namespace))
        keys = buckets.endpoints_of_attempt(record.job_id, record.task, record.attempt)
        try:
            async with aclosing(registry.table.each(keys)) as rows:  # there may be as many as its task has written
                async for row in rows:
                    await registry.table.delete(row.key, reason=reason)
        except BusError as error:
            log.info("endpoints of %s are left to the controller: %s", record.job_id, error)


def _used_image(running: RunningTask) -> UsedImage | None:
    """What it runs in. That it was adopted with may have been written over."""
    try:
        return UsedImage.model_validate(running.spec.used_image) if running.spec.used_image is not None else None
    except ValidationError:
        return None


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
