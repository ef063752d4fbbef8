"""Carries an attempt's output from its spool to the log stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fluster_bus import subjects
from fluster_bus.bus import Bus
from fluster_bus.errors import BusError
from fluster_bus.feeds import Feed
from fluster_bus.messages import LogBatch, TaskRecord
from fluster_bus.streams import append
from fluster_services.worker.runtime import RunningTask

if TYPE_CHECKING:
    from fluster_services.worker.spool import SpoolRecord

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
        self._published = 0

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
        last = await feed.last()
        self._published = LogBatch.from_json(last.data).next_offset if last is not None else 0

    async def publish(self) -> None:
        """Publish what the spool has by now. Waits for the bus when it is away: nothing is lost or doubled."""
        while True:
            records, following = self._running.read_log(self._published, max_bytes=_CHUNK_BYTES)
            if not records:
                return
            batches = list(self._batches(records, following))
            for stream, batch in batches:
                await self._append(stream, batch)
            self._published = following

    def _batches(self, records: list[SpoolRecord], following: int) -> Iterator[tuple[str, LogBatch]]:
        """A batch for each stream that has lines. Only the last moves on, so that after a crash none is left out."""
        lines = {stream: [(each.time, each.text) for each in records if each.stream == stream] for stream in _STREAMS}
        present = [stream for stream in _STREAMS if lines[stream]]
        for stream in present:
            end = following if stream == present[-1] else self._published
            yield stream, LogBatch(offset=self._published, next_offset=end, lines=tuple(lines[stream]))

    async def _append(self, stream: str, batch: LogBatch) -> None:
        message_id = f"{self._running.key}.{stream}.{batch.offset}"
        while True:
            try:
                await append(self._bus, self._subject(stream), batch, message_id=message_id)
            except BusError as error:
                log.info("output of %s waits: %s", self._running.key, error)
                await self._bus.wait_connected()
                await asyncio.sleep(_PAUSE_S)
            else:
                return

    def _subject(self, stream: str) -> str:
        record = self._record
        return subjects.logs(record.namespace, record.job_id, str(record.task), str(record.attempt), stream)
