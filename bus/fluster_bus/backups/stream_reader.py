"""Reads a whole stream for a backup, so that what was read is what the stream had at one moment.

A bucket keeps the last message of each key, and its writers go on: a key that is written anew moves to the end. So a reader that goes on until the
end of the stream has met each key as it is then, and an older message under the same key at most beside it, of which a server
that restores both keeps the later.

Copies of a stream may lag behind their leader. Read from one that lags a key may seem gone that has moved. So the leader is asked how
far the stream is, and what is left after that is read at once, from a copy that is as far.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime
from typing import TYPE_CHECKING

from fluster_bus.backups.archive import StoredMessage, header_block
from fluster_bus.core import server_subjects, subjects
from fluster_bus.core.delivery import TIME_HEADER
from fluster_bus.core.errors import NoRespondersError, StorageError, StreamNotFoundError
from fluster_bus.core.json_types import JsonObject
from fluster_bus.storage.feeds import Entry, Feed

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

_NOT_FOUND = 404
_BATCH, _BATCH_BYTES = 256, 2 << 20
_COPY_PATIENCE_S, _PAUSE_S = 5.0, 0.05
_PER_SECOND = 1_000_000_000


class StreamReader:
    """Reads a stream from its first message on, further with each `read_on`. Make one with `StreamReader.open`."""

    def __init__(self, bus: Bus, told: JsonObject) -> None:
        self._bus = bus
        self.config: JsonObject = told["config"]
        self.name: str = self.config["name"]
        self.state: JsonObject = told["state"]
        self._next = 1
        self._replicas = int(self.config.get("num_replicas", 1))
        self._feed = Feed(bus, self.name, subject=subjects.ANY_TAIL, watch="", batch=_BATCH)

    @classmethod
    async def open(cls, bus: Bus, stream: str) -> StreamReader:
        """Raises StreamNotFoundError, StorageError, BusError."""
        return cls(bus, await stream_told(bus, stream))

    async def read_on(self) -> AsyncGenerator[StoredMessage]:
        """What was not read yet. Raises StorageError, BusError."""
        if self.config.get("max_msgs_per_subject") != 1:
            # What is written from now on takes the place of nothing, and may be more than can be read meanwhile.
            newest = await self._newest()
            async with aclosing(self._stored(newest)) as messages:
                async for message in messages:
                    yield message
            return
        until = time.monotonic() + _COPY_PATIENCE_S
        while True:
            newest = await self._newest() if self._replicas > 1 else 0
            found = size = 0
            async with aclosing(self._stored(None)) as messages:
                async for message in messages:
                    found, size = found + 1, size + len(message.data)
                    yield message
            was_one_batch = found < _BATCH and size < _BATCH_BYTES
            if self._replicas == 1 or (was_one_batch and (self._next > newest or time.monotonic() >= until)):
                return  # the newest may have been deleted
            await asyncio.sleep(_PAUSE_S)

    async def _newest(self) -> int:
        return int((await stream_told(self._bus, self.name))["state"]["last_seq"])

    async def _stored(self, newest: int | None) -> AsyncGenerator[StoredMessage]:
        if self.config.get("allow_direct"):
            async with aclosing(self._feed.stored(self._next)) as entries:
                async for entry in entries:
                    if newest is not None and entry.sequence > newest:
                        return
                    self._next = entry.sequence + 1
                    yield _of_entry(entry)
            return
        while newest is None or self._next <= newest:
            message = await self._after(self._next)
            if message is None:
                return
            self._next = message.sequence + 1
            yield message

    async def _after(self, sequence: int) -> StoredMessage | None:
        request = json.dumps({"seq": sequence, "next_by_subj": subjects.ANY_TAIL}).encode()
        told = json.loads((await self._bus.request(server_subjects.message_get(self.name), request)).data)
        error = told.get("error")
        if error is not None:
            if error.get("code") == _NOT_FOUND:
                return None
            raise StorageError(f"stream {self.name} could not be read: {error.get('description')}")
        message = told["message"]
        headers, data = (base64.b64decode(message.get(part, "")) for part in ("hdrs", "data"))
        return StoredMessage(int(message["seq"]), message["subject"], _nanoseconds(message["time"]), headers, data)


async def stream_told(bus: Bus, stream: str) -> JsonObject:
    """What the server says about a stream: its `config` and `state`. Raises StreamNotFoundError, StorageError, BusError."""
    try:
        told: JsonObject = json.loads((await bus.request(server_subjects.stream_info(stream))).data)
    except NoRespondersError as error:
        raise StorageError(f"the server gives no state of stream {stream}: is JetStream enabled there?") from error
    wrong = told.get("error")
    if wrong is not None and wrong.get("code") == _NOT_FOUND:
        raise StreamNotFoundError(f"there is no stream {stream}")
    if wrong is not None:
        raise StorageError(f"stream {stream} tells nothing of itself: {wrong.get('description')}")
    return told


def _of_entry(entry: Entry) -> StoredMessage:
    stored_at = _nanoseconds(entry.headers[TIME_HEADER])
    return StoredMessage(entry.sequence, entry.subject, stored_at, header_block(entry.headers), entry.data)


def _nanoseconds(text: str) -> int:
    """`2026-11-25T21:46:54.232005702Z` since 1970. Python's own times have microseconds."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    seconds = int(datetime.fromisoformat(f"{whole}+00:00").timestamp())
    return seconds * _PER_SECOND + int(fraction.ljust(9, "0")[:9] or 0)
