"""Carries an attempt's output from its spool to the log stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from fluster_bus import subjects
from fluster_bus.bus import Bus
from fluster_bus.errors import BusError
from fluster_bus.feeds import Feed
from fluster_bus.messages import LogBatch, TaskRecord
from fluster_bus.streams import append
from fluster_services.worker.runtime import RunningTask

if TYPE_CHECKING:
    from fluster_services.worker.spool import SpoolRecord

T = TypeVar("T")

log = logging.getLogger(__name__)

_STREAMS = ("stderr", "stdout")
_CHUNK_BYTES = 256 << 10  # well below the server's message limit, also after JSON has escaped it
_PAUSE_S = 0.5


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
            subjects.logs_stream(record.namespace),
            subject=subject,
            watch=subjects.watch_logs(record.namespace),
        )
        last = await _patiently(self._bus, f"the last output of {record.job_id}", feed.last)
        if last is None:
            return
        batch = LogBatch.from_json(last.data)
        self._published = dict.fromkeys(_STREAMS, batch.offset if batch.more else batch.next_offset)
        self._published[subjects.last_token(last.subject)] = batch.next_offset

    async def publish(self) -> None:
        """Publish what the spool has by now. Waits for the bus when it is away: nothing is lost or doubled."""
        while True:
            start = min(self._published.values())
            records, following = self._running.read_log(start, max_bytes=_CHUNK_BYTES)
            if not records:
                return
            for stream, batch in self._batches(records, start, following):
                await self._append(stream, batch)
            self._published = dict.fromkeys(_STREAMS, following)

    def _batches(self, records: list[SpoolRecord], start: int, following: int) -> list[tuple[str, LogBatch]]:
        """A batch for each stream that has lines which are not stored yet."""
        lines = {
            stream: tuple(
                (each.time, each.text)
                for each in records
                if each.stream == stream and each.offset >= self._published[stream]
            )
            for stream in _STREAMS
        }
        present = [stream for stream in _STREAMS if lines[stream]]
        return [
            (stream, LogBatch(offset=start, next_offset=following, more=stream != present[-1], lines=lines[stream]))
            for stream in present
        ]

    async def _append(self, stream: str, batch: LogBatch) -> None:
        # By the place where this stream's own lines begin: the batch that a worker could still store before it died is
        # not the same as the one that its successor makes of the same chunk, which has grown meanwhile.
        message_id = f"{self._running.key}.{stream}.{self._published[stream]}"
        await _append_patiently(self._bus, self._subject(stream), batch, message_id)

    def _subject(self, stream: str) -> str:
        return _subject(self._record, stream)


async def publish_preparation(bus: Bus, record: TaskRecord, lines: Iterable[tuple[float, str]]) -> None:
    """Put what was said while an attempt was prepared, as (time, text), before its own output."""
    batch = LogBatch(offset=0, next_offset=0, lines=tuple(lines))
    subject = _subject(record, "stderr")
    await _append_patiently(bus, subject, batch, f"{subject}.preparation")


def _subject(record: TaskRecord, stream: str) -> str:
    return subjects.logs(record.namespace, record.job_id, str(record.task), str(record.attempt), stream)


async def _append_patiently(bus: Bus, subject: str, batch: LogBatch, message_id: str) -> None:
    await _patiently(bus, f"output for {subject}", lambda: append(bus, subject, batch, message_id=message_id))


async def _patiently(bus: Bus, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await attempt()
        except BusError as error:
            log.info("%s waits: %s", what, error)
            await bus.wait_connected()
            await asyncio.sleep(_PAUSE_S)
