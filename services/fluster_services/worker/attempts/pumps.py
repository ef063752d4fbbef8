"""Carries an attempt's output, progress and result to the bus."""

from __future__ import annotations

import asyncio
import io
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from types import TracebackType
from typing import BinaryIO, Self, TypeVar, cast

from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import retried_when_connected, wait_to_retry
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    HOPELESS,
    BusError,
    FaultLog,
    InvalidMessageError,
    NamespaceGoneError,
    NoRespondersError,
    StreamNotFoundError,
    one_bounded_line,
)
from fluster_bus.core.stream_bounds import PAYLOADS
from fluster_bus.messages import LogBatch, Progress, ProgressReport, TaskRecord, TaskResult
from fluster_bus.running.coroutines import wait_set
from fluster_bus.storage.feeds import Feed
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.stored_messages import RESULT_CHUNK_BYTES, ResultStore
from fluster_bus.storage.streams import append
from fluster_services.worker.attempts.claims import is_gone
from fluster_services.worker.contract.faults import BuildOutput
from fluster_services.worker.contract.runtime import RunningTask
from fluster_services.worker.contract.spool import SpoolError, SpoolRun
from fluster_services.worker.task.task_result import MAX_RESULT_BYTES

T = TypeVar("T")

log = logging.getLogger(__name__)
_faults = FaultLog(log)

_STREAMS = ("stderr", "stdout")
_CHUNK_BYTES = 256 << 10  # well below the server's message limit, also after JSON has escaped it
_PAUSE_S = 0.5
_RELAY_S = 0.25  # between two batches of what a build says
_MAX_LIVE_LINES = 10_000  # of a build; of what it says after that, the last lines come at its end
_AGAIN_AFTER_S = 10.0  # progress, for a controller that was away
_MAX_DOING = 200  # characters


class LogPump:
    """One attempt's output; `publish` brings the stream up to what the spool has."""

    def __init__(self, bus: Bus, record: TaskRecord, running: RunningTask) -> None:
        self._bus = bus
        self._record = record
        self._running = running
        self._published = dict.fromkeys(_STREAMS, 0)  # {stream: the place in the spool up to which it is stored}

    async def resume(self) -> None:
        """Go on where an earlier worker stopped: the stream's last batch says where that was."""
        record = self._record
        subject = self._subject(subjects.ANY_TOKEN)
        feed = Feed(
            self._bus,
            buckets.logs_stream(record.namespace),
            subject=subject,
            watch=subjects.watch_logs(record.namespace),
        )
        try:
            last = await _patiently(self._bus, record.namespace, f"the last output of {record.job_id}", feed.last)
            if last is None:
                return
            batch = LogBatch.from_json(last.data)
        except NamespaceGoneError:
            return
        except InvalidMessageError as error:
            _faults.warning("the output of %s is published again from its beginning: %s", self._running.key, error)
            return
        self._published = dict.fromkeys(_STREAMS, batch.offset if batch.more else batch.next_offset)
        self._published[subjects.last_token(last.subject)] = batch.next_offset

    async def publish(self, up_to: int | None = None) -> None:
        """Publish what the spool has by now, or has at least up to the offset `up_to`. Waits for the bus when it is away: nothing
        is lost or doubled.
        """
        # Read up to `up_to` only: of a task that writes all the time there is always a little more, and each little batch costs
        # a round trip. The keeper reports the next offset 20 ms later.
        while (start := min(self._published.values())) < (math.inf if up_to is None else up_to):
            newest = max(self._published.values())
            # What one stream has stored already is read by itself: it is the other's only.
            max_bytes = min(_CHUNK_BYTES, newest - start or _CHUNK_BYTES)
            try:
                runs, following = self._running.read_log(start, max_bytes=max_bytes)
            except SpoolError as error:  # its task can write there as well
                _faults.warning("the output of %s is not read any further: %s", self._running.key, error)
                return
            if not runs:
                return
            for stream, batch in self.batches(runs, start, following):
                await self.append(stream, batch)
            self._published = {stream: max(end, following) for stream, end in self._published.items()}

    def batches(self, runs: list[SpoolRun], start: int, following: int) -> list[tuple[str, LogBatch]]:
        """A batch for each stream that has lines which are not stored yet."""
        lines: dict[str, list[tuple[float, str]]] = {stream: [] for stream in _STREAMS}
        going_on: dict[str, list[int]] = {stream: [] for stream in _STREAMS}
        for run in runs:
            if run.offset >= self._published[run.stream]:
                had = len(lines[run.stream])
                lines[run.stream] += zip(repeat(run.time), run.texts)
                if run.is_partial:
                    going_on[run.stream] += range(had, len(lines[run.stream]))
        present = [stream for stream in _STREAMS if lines[stream]]
        return [
            (
                stream,
                LogBatch(
                    offset=start,
                    next_offset=following,
                    more=stream != present[-1],
                    lines=tuple(lines[stream]),
                    going_on=tuple(going_on[stream]),
                ),
            )
            for stream in present
        ]

    async def append(self, stream: str, batch: LogBatch) -> None:
        # By the place where this stream's own lines begin: the batch that a worker could still store before it died is
        # not the same as the one that its successor makes of the same chunk, which has grown meanwhile.
        message_id = f"{self._running.key}.{stream}.{self._published[stream]}"
        await _append_patiently(self._bus, self._subject(stream), batch, message_id)

    def _subject(self, stream: str) -> str:
        return _subject(self._record, stream)


@dataclass
class _Followed:
    output: BuildOutput
    published: int = 0  # lines, those that were left out among them


class PreparationLog:
    """What is said while an attempt is prepared, put into its log as it comes, before its own output; `on_doing` is awaited with
    what is being done. Used with `async with`.
    """

    def __init__(self, bus: Bus, record: TaskRecord, on_doing: Callable[[str], Awaitable[None]]) -> None:
        self._bus = bus
        self._subject = _subject(record, "stderr")
        self._on_doing = on_doing
        self._doing = ""
        self._followed: list[_Followed] = []  # one after the other, as an image is pulled and then built upon
        self._is_over = asyncio.Event()
        self._relaying: asyncio.Task[None] | None = None

    def follow(self, output: BuildOutput) -> None:
        """What is in `output`, and comes, goes into the log."""
        if all(each.output is not output for each in self._followed):
            self._followed.append(_Followed(output))
        if self._relaying is None:
            self._relaying = asyncio.create_task(self._relay())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._relaying is None:
            return
        self._is_over.set()  # not cancelled: a batch that is under way may be stored or not
        try:
            await asyncio.shield(self._relaying)
        finally:
            self._relaying.cancel()

    async def _relay(self) -> None:
        while not self._is_over.is_set():
            await wait_set(self._is_over, _RELAY_S)
            if not self._is_over.is_set():
                await self._tell_doing()
                await self._publish_all(most=_MAX_LIVE_LINES)
        await self._publish_all(most=None)

    async def _tell_doing(self) -> None:
        doing = self._followed[-1].output.doing
        if doing != self._doing:
            self._doing = doing
            await self._on_doing(doing)

    async def _publish_all(self, *, most: int | None) -> None:
        for number, followed in enumerate(self._followed):
            if most is None or followed.published < most:
                await self._publish(number, followed)

    async def _publish(self, number: int, followed: _Followed) -> None:
        if followed.output.said == followed.published:
            return
        lines, left_out = followed.output.since(followed.published)
        if left_out:
            lines.insert(0, (lines[0][0], f"[fluster: {left_out:,} lines are left out]"))
        message_id = f"{self._subject}.preparation.{number}.{followed.published}"
        followed.published = followed.output.said
        batch = LogBatch(offset=0, next_offset=0, lines=tuple(lines))
        await _append_patiently(self._bus, self._subject, batch, message_id)


def _subject(record: TaskRecord, stream: str) -> str:
    return subjects.logs(record.namespace, record.job_id, str(record.task), str(record.attempt), stream)


async def _append_patiently(bus: Bus, subject: str, batch: LogBatch, message_id: str) -> None:
    namespace = subjects.namespace_of(subject)
    try:
        await _patiently(
            bus, namespace, f"output for {subject}", lambda: append(bus, subject, batch, message_id=message_id)
        )
    except HOPELESS as error:
        _faults.warning("%d lines of output for %s are left out: %s", len(batch.lines), subject, error)
        told = f"[fluster: {len(batch.lines):,} lines are left out, which could not be stored: {error}]"
        instead = batch.model_copy(update={"lines": ((batch.lines[0][0], one_bounded_line(told)),), "going_on": ()})
        with suppress(*HOPELESS):
            await _patiently(
                bus, namespace, f"output for {subject}", lambda: append(bus, subject, instead, message_id=message_id)
            )


async def _patiently(bus: Bus, namespace: str, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    async def on_error(error: BusError) -> None:
        log.info("%s waits: %s", what, error)
        if isinstance(error, StreamNotFoundError | NoRespondersError) and await is_gone(bus, namespace):
            raise NamespaceGoneError(f"the cluster has no namespace {namespace!r}") from error

    return await retried_when_connected(bus, attempt, on_error=on_error, unless=HOPELESS, pause_s=_PAUSE_S)


@dataclass
class _Told:
    report: ProgressReport
    told_at: float


class ProgressPump:
    """The newest word of each attempt that runs here."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._told: dict[str, _Told] = {}  # {attempt key: its newest word}

    async def tell(self, key: str, record: TaskRecord, progress: Progress) -> None:
        """Pass on what an attempt says."""
        await self._tell(key, record, progress, is_preparing=False)

    async def tell_preparing(self, key: str, record: TaskRecord, doing: str) -> None:
        """Pass on what is being done before an attempt can start."""
        await self._tell(key, record, Progress(fraction=0.0, message=doing[:_MAX_DOING]), is_preparing=True)

    async def _tell(self, key: str, record: TaskRecord, progress: Progress, *, is_preparing: bool) -> None:
        report = ProgressReport(
            namespace=record.namespace,
            job_id=record.job_id,
            task=record.task,
            attempt=record.attempt,
            progress=progress,
            is_preparing=is_preparing,
        )
        self._told[key] = _Told(report, time.monotonic())
        await self._publish(report)

    def forget(self, key: str) -> None:
        """The attempt is over."""
        self._told.pop(key, None)

    async def repeat_forever(self) -> None:
        """Pass on again what was reported a while ago."""
        while True:
            await asyncio.sleep(_AGAIN_AFTER_S / 4)
            now = time.monotonic()
            for told in list(self._told.values()):
                if now - told.told_at >= _AGAIN_AFTER_S:
                    told.told_at = now
                    await self._publish(told.report)

    async def _publish(self, report: ProgressReport) -> None:
        subject = subjects.watch_progress(report.namespace, report.job_id, str(report.task))
        try:
            await self._bus.publish(subject, report.to_json())
        except BusError as error:
            log.info("the progress of %s.%d is reported later: %s", report.job_id, report.task, error)


async def publish_result(
    bus: Bus, record: TaskRecord, running: RunningTask, result: TaskResult | None
) -> TaskResult | None:
    """What the task's record says about its result, once that is stored. Waits for the bus when it is away.

    It is stored before the record says so; a worker that dies between leaves it to its successor, who does it again.
    """
    if result is None or not result.size:
        return result
    while True:
        try:
            if result.size > MAX_RESULT_BYTES:
                file = _ResultFile(running, result.size)
                payloads = ObjectStore(bus, record.namespace, PAYLOADS)
                return TaskResult(
                    size=result.size, json_size=result.json_size, object=await payloads.put_file(cast("BinaryIO", file))
                )
            store = ResultStore(bus, record.namespace)
            await store.put(record.job_id, record.task, record.attempt, _chunks(running, result.size))
        except HOPELESS as error:
            return TaskResult(error=f"what it returned could not be stored: {error}")
        except StreamNotFoundError as error:
            if await is_gone(bus, record.namespace):
                return TaskResult(error=f"what it returned could not be stored: {error}")
            await asyncio.sleep(_PAUSE_S)
        except BusError as error:
            log.info("the result of %s waits: %s", running.key, error)
            await wait_to_retry(bus, _PAUSE_S)
        except OSError as error:
            return TaskResult(error=f"what it returned could not be read from its worker's disk: {error}")
        else:
            return result


class _ResultFile(io.RawIOBase):
    """What a task left, as a file."""

    def __init__(self, running: RunningTask, size: int) -> None:
        super().__init__()
        self._running = running
        self._size = size
        self._place = 0

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._place
        data = self._running.read_result(self._place, left if size < 0 else min(size, left))
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("a place in it is counted from its start")
        self._place = offset
        return offset

    def tell(self) -> int:
        return self._place


def _chunks(running: RunningTask, size: int) -> Iterator[bytes]:
    for start in range(0, size, RESULT_CHUNK_BYTES):
        yield running.read_result(start, min(RESULT_CHUNK_BYTES, size - start))
