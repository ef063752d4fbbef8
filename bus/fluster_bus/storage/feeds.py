"""Reading a stream without a consumer: what is stored, then what comes, each message once and in order.

Stored messages are read by batches of direct gets, which every reader of a stream may be allowed without the right
to make consumers. New ones arrive because the stream republishes what it stored, with its sequence in a header: so
a reader subscribes, reads what is there, and applies whatever is newer. After a reconnect, or when a subscription
overflowed, it reads on from the last sequence it saw. Tables, logs and events are all read this way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core import server_subjects
from fluster_bus.core.delivery import SEQUENCE_HEADER, SUBJECT_HEADER, TIME_HEADER
from fluster_bus.core.errors import (
    DisconnectedError,
    FaultLog,
    InvalidMessageError,
    NoRespondersError,
    RequestTimeoutError,
    StorageError,
    StreamNotFoundError,
)
from fluster_bus.running.coroutines import TimeSlices

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_bus.core.delivery import Delivery

log = logging.getLogger(__name__)

_BATCH = 256
_BATCH_BYTES = 4 << 20  # as much is held at once, but for the last message: a busy log has 256 of some hundred KiB
_END_OF_BATCH, _NOT_FOUND = "204", "404"
_MAX_WAITING = 65_536  # republished messages that a slow reader lets lie before it reads on from the stream instead
_STREAM_PATIENCE_S, _REREAD_PAUSE_S = 5.0, 0.05
_COPY_PATIENCE_S, _INFO_TIMEOUT_S = 2.0, 2.0
_NOT_YET = (DisconnectedError, NoRespondersError, RequestTimeoutError)


@dataclass(frozen=True, slots=True)
class Entry:
    """A message of a stream."""

    sequence: int
    subject: str
    data: bytes
    headers: dict[str, str]

    @staticmethod
    def of(delivery: Delivery) -> Entry:
        """A stored message and a republished one say in the same headers where they belong. Raises InvalidMessageError."""
        headers = delivery.headers or {}
        try:
            return Entry(int(headers[SEQUENCE_HEADER]), headers[SUBJECT_HEADER], delivery.data, headers)
        except (KeyError, ValueError) as error:
            raise InvalidMessageError(f"a message of a stream does not say where it belongs: {error}") from error

    @property
    def time(self) -> datetime:
        """When the server stored it."""
        return datetime.fromisoformat(self.headers[TIME_HEADER])


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Everything stored so far has been read; what follows is new."""


class Feed:
    """The messages of `stream` that match `subject`; `watch` is where the stream republishes them."""

    def __init__(self, bus: Bus, stream: str, *, subject: str, watch: str, batch: int = _BATCH) -> None:
        self._bus = bus
        self._stream = stream
        self._subject = subject
        self._watch = watch
        self._faults = FaultLog(log)
        self._batch = batch  # messages that are read at once

    async def stored(self, start: int = 1, *, since: datetime | None = None) -> AsyncGenerator[Entry]:
        """What is stored now, in order: from sequence `start` on, or from the time `since` on."""
        while True:
            place = {"seq": start} if since is None else {"start_time": since.isoformat()}
            since = None
            request = json.dumps(
                {**place, "batch": self._batch, "max_bytes": _BATCH_BYTES, "next_by_subj": self._subject}
            ).encode()
            answers = await self._bus.request_many(
                server_subjects.direct_get(self._stream), request, last_status=_END_OF_BATCH
            )
            end = answers.pop()
            if end.status not in (_END_OF_BATCH, _NOT_FOUND):
                text = (end.headers or {}).get("Description", "")
                raise StorageError(f"stream {self._stream} could not be read: {end.status} {text}")
            for answer in answers:
                entry = self._entry(answer)
                if entry is not None:
                    start = entry.sequence + 1
                    yield entry
            start = max(start, int((end.headers or {}).get("Nats-Last-Sequence", "0")) + 1)
            if end.status == _NOT_FOUND or int((end.headers or {}).get("Nats-Num-Pending", "0")) == 0:
                return

    def _entry(self, delivery: Delivery) -> Entry | None:
        with self._faults.contained("a message of stream %s is passed over", self._stream):
            return Entry.of(delivery)
        return None

    async def _newest(self) -> int:
        """The sequence up to which the server has stored that leads the others; 0 where there is one copy."""
        told = json.loads(
            (await self._bus.request(server_subjects.stream_info(self._stream), timeout_s=_INFO_TIMEOUT_S)).data
        )
        if "error" in told:
            raise NoRespondersError(f"stream {self._stream}: {told['error'].get('description')}")
        return int(told["state"]["last_seq"]) if told["config"]["num_replicas"] > 1 else 0

    async def last(self) -> Entry | None:
        """The newest message, None when there is none."""
        request = json.dumps({"last_by_subj": self._subject}).encode()
        answer = await self._bus.request(server_subjects.direct_get(self._stream), request)
        return Entry.of(answer) if answer.status is None else None

    async def follow(self, start: int = 1, *, sure: bool = False) -> AsyncGenerator[Entry | CaughtUp]:
        """What is stored from `start` on, then CaughtUp, then what comes, until the caller stops reading.

        Any of the servers that keep a copy answers, and one may be behind what was acknowledged before: with `sure` it is waited for.
        It needs the right to read about streams, and reads all of one.

        CaughtUp is given again after every reconnect. Raises StreamNotFoundError when there is no such stream, and ClosedError
        when there will be no further connection.
        """
        arrivals, slices = _Arrivals(), TimeSlices()
        subscription = await self._bus.hear(self._watch, arrivals.add)
        self._bus.on_reconnect(arrivals.reread)
        self._bus.on_end(arrivals.reread)  # which raises then
        patience_s = _STREAM_PATIENCE_S
        try:
            while True:
                arrivals.clear()
                try:
                    await self._bus.flush()  # what is stored from here on arrives
                    newest = await self._newest() if sure else 0
                    until = time.monotonic() + _COPY_PATIENCE_S  # the newest may have been deleted
                    while True:
                        async for entry in self.stored(start):
                            await slices.step()
                            start = entry.sequence + 1
                            yield entry
                        if start > newest or time.monotonic() >= until:
                            break
                        await asyncio.sleep(_REREAD_PAUSE_S)
                except _NOT_YET as error:
                    if patience_s <= 0 and isinstance(error, NoRespondersError):
                        raise StreamNotFoundError(f"there is no stream {self._stream}") from error
                    # The server is away, or just back: its streams answer a moment later than its connections.
                    await wait_to_retry(self._bus, _REREAD_PAUSE_S)
                    patience_s -= _REREAD_PAUSE_S
                    continue
                patience_s = math.inf  # it was there: from now on it is waited for
                yield CaughtUp()
                while (delivery := await arrivals.next(slices)) is not None:
                    new = self._entry(delivery)
                    if new is not None and new.sequence >= start:
                        start = new.sequence + 1
                        yield new
        finally:
            self._bus.off(arrivals.reread)
            await subscription.unsubscribe()


class _Arrivals:
    """Republished messages that wait for the reader; None in their place says that some may be missing."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Delivery | None] = asyncio.Queue()

    def add(self, delivery: Delivery) -> None:
        if self._queue.qsize() >= _MAX_WAITING:
            self.reread()
        else:
            self._queue.put_nowait(delivery)

    def reread(self) -> None:
        self.clear()
        self._queue.put_nowait(None)

    def clear(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()

    async def next(self, slices: TimeSlices) -> Delivery | None:
        if self._queue.empty():
            delivery = await self._queue.get()
            slices.begin()
            return delivery
        await (
            slices.step()
        )  # one that writes a lot keeps its reader busy, and whatever else the reader's program does goes on
        return await self._queue.get()
