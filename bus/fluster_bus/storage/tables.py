"""A bucket of typed records: read one, change it if it was not changed meanwhile, watch them all."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Generic, TypeVar

from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.delivery import SEQUENCE_HEADER
from fluster_bus.core.errors import (
    FaultLog,
    InvalidMessageError,
    InvalidNameError,
    KeyExistsError,
    MessageTooLargeError,
    NamespaceFullError,
    NoRespondersError,
    RequestTimeoutError,
    RevisionConflictError,
    StorageError,
    StorageTimeoutError,
    StreamNotFoundError,
    one_bounded_line,
)
from fluster_bus.core.json_types import JsonObject
from fluster_bus.core.stream_bounds import full_error
from fluster_bus.messages.parts.model import Message
from fluster_bus.storage.feeds import CaughtUp, Entry, Feed

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_bus.core.delivery import Delivery

log = logging.getLogger(__name__)

Record = TypeVar("Record", bound=Message)

_WRONG_REVISION = 10071  # JSStreamWrongLastSequenceErrF
_OVER_THE_STREAMS_LIMIT = 10054  # JSStreamMessageExceedsMaximumErr
_NO_MORE_OF_SUBJECT = "maximum messages per subject exceeded"
_NO_ROOM_LEFT = "maximum bytes exceeded"  # its code, 10077, is that of other failures too
_OPERATION_HEADER = "KV-Operation"
_REASON_HEADER = "Fluster-Reason"
_MAX_REASON_CHARACTERS = 300
_EXPECTED_HEADER = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_SUBJECT_HEADER = "Nats-Expected-Last-Subject-Sequence-Subject"
# Of an atomic batch, ADR-50: all its messages are stored or none is.
_BATCH_HEADER, _BATCH_SEQUENCE_HEADER = "Nats-Batch-Id", "Nats-Batch-Sequence"
_BATCH_COMMIT_HEADER = "Nats-Batch-Commit"
_DELETED = ("DEL", "PURGE")


@dataclass(frozen=True, slots=True)
class Row(Generic[Record]):
    """A record and the revision at which it was read."""

    key: str
    value: Record
    revision: int
    stored_at: datetime | None = field(default=None, compare=False)  # by the bus's clock; None for one's own


@dataclass(frozen=True, slots=True)
class Update(Generic[Record]):
    """A record that is to replace the one read at `revision`."""

    key: str
    value: Record
    revision: int


@dataclass(frozen=True, slots=True)
class Guard:
    """What must still be so for a batch to be taken: `key` stands at `revision`. An empty message is left under `trace`."""

    key: str
    revision: int
    trace: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """A record that was taken away."""

    key: str
    revision: int
    reason: str = ""  # as the process that took it away says, in one line


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What lies under a key and is not a record, or one that belongs elsewhere."""

    key: str
    revision: int
    why: str


class Table(Generic[Record]):
    """Records of a bucket. `read(key, data)` makes one, `watch(key)` is where the server republishes its changes.

    What else may lie in the bucket is known by `has`, which is false for its key.
    """

    def __init__(
        self,
        bus: Bus,
        bucket: str,
        read: Callable[[str, bytes], Record],
        *,
        watch: Callable[[str], str],
        has: Callable[[str], bool] = lambda _key: True,
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._stream = buckets.bucket_stream(bucket)
        self._read = read
        self._watch_subject = watch
        self._has = has
        self._faults = FaultLog(log)

    async def get(self, key: str) -> Row[Record] | None:
        """The record under `key` with its revision, None when there is none."""
        subject = buckets.bucket_key(self._bucket, key)
        try:
            answer = await self._bus.request(f"{server_subjects.direct_get(self._stream)}.{subject}")
        except NoRespondersError as error:
            raise self._missing() from error
        if answer.status is not None or _operation(answer.headers) in _DELETED:
            return None
        entry = Entry.of(answer)
        return Row(key, self._read(key, answer.data), entry.sequence, entry.time)

    def _missing(self) -> StreamNotFoundError:
        return StreamNotFoundError(f"bucket {self._bucket} does not exist: the controller makes it when it starts")

    async def create(self, key: str, value: Record) -> int:
        """Put the first record under `key` and return its revision. Raises KeyExistsError."""
        try:
            return await self._write(key, value.to_json(), expected=0)
        except RevisionConflictError as error:
            exists = KeyExistsError(f"{key!r} exists already in bucket {self._bucket}")
            deleted = await self._revision_of_deleted(key)
            if deleted is None:
                raise exists from error
            try:
                return await self._write(key, value.to_json(), expected=deleted)
            except RevisionConflictError as second_error:  # another writer was quicker
                raise exists from second_error

    async def update(self, key: str, value: Record, revision: int) -> int:
        """Replace the record read at `revision`; return the new revision. Raises RevisionConflictError."""
        return await self._write(key, value.to_json(), expected=revision)

    async def update_all(self, updates: Sequence[Update[Record]], guard: Guard) -> list[int]:
        """Replace all these records, or none; return their new revisions.

        Raises RevisionConflictError when one of them was changed meanwhile, or the guard was. It takes some milliseconds
        however many they are, since the server puts a batch together in a file: up to 1,000 are allowed.
        """
        batch = secrets.token_hex(8)
        traced = {_EXPECTED_HEADER: str(guard.revision), _EXPECTED_SUBJECT_HEADER: self._subject(guard.key)}
        messages = [(guard.trace, b"{}", traced)]
        messages += [(each.key, each.value.to_json(), {_EXPECTED_HEADER: str(each.revision)}) for each in updates]
        for number, (key, data, headers) in enumerate(messages[:-1], start=1):
            placed = {**headers, _BATCH_HEADER: batch, _BATCH_SEQUENCE_HEADER: str(number)}
            await self._bus.publish(self._subject(key), data, headers=placed)
        key, data, headers = messages[-1]
        last = {_BATCH_HEADER: batch, _BATCH_SEQUENCE_HEADER: str(len(messages)), _BATCH_COMMIT_HEADER: "1"}
        end = await self._write(key, data, expected=None, headers={**headers, **last})
        return list(range(end - len(updates) + 1, end + 1))

    def _subject(self, key: str) -> str:
        return buckets.bucket_key(self._bucket, key)

    async def put(self, key: str, value: Record) -> int:
        """Put the record, whatever is there; return its revision."""
        return await self._write(key, value.to_json(), expected=None)

    async def delete(self, key: str, *, revision: int | None = None, reason: str = "") -> None:
        """Take the record away; with `revision`, only if it is still that one (RevisionConflictError). Watchers learn the reason."""
        headers = {_OPERATION_HEADER: "DEL"}
        if reason:
            headers[_REASON_HEADER] = _header_text(reason)
        await self._write(key, b"", expected=revision, headers=headers)

    async def _write(
        self, key: str, data: bytes, *, expected: int | None, headers: dict[str, str] | None = None
    ) -> int:
        if expected is not None:
            headers = {**(headers or {}), _EXPECTED_HEADER: str(expected)}
        subject = buckets.bucket_key(self._bucket, key)
        try:
            answer = await self._bus.request(subject, data, headers=headers)
        except NoRespondersError as error:
            raise self._missing() from error
        except RequestTimeoutError as error:
            raise StorageTimeoutError(
                f"writing {key!r} to bucket {self._bucket} was not acknowledged: is the server's disk full?"
            ) from error
        return sequence_of_ack(answer, f"{key!r} in bucket {self._bucket}")

    async def _revision_of_deleted(self, key: str) -> int | None:
        subject = buckets.bucket_key(self._bucket, key)
        answer = await self._bus.request(f"{server_subjects.direct_get(self._stream)}.{subject}")
        deleted = answer.status is None and _operation(answer.headers) in _DELETED
        return int((answer.headers or {})[SEQUENCE_HEADER]) if deleted else None

    async def rows(self, keys: str = subjects.ANY_TAIL) -> list[Row[Record]]:
        """All records whose keys match; one that cannot be read is left out, with a line in the log."""
        async with aclosing(self.each(keys)) as found:
            return [row async for row in found]

    async def each(self, keys: str = subjects.ANY_TAIL) -> AsyncGenerator[Row[Record]]:
        """The same, one after the other: for a caller that cannot hold them all."""
        async with aclosing(self._feed(keys).stored()) as entries:
            async for entry in entries:
                change = self._change(entry)
                if isinstance(change, Row):
                    yield change

    async def watch(
        self,
        keys: str = subjects.ANY_TAIL,
        *,
        is_known: Callable[[str, int], bool] | None = None,
        passed: Callable[[int], None] | None = None,
        sure: bool = False,
    ) -> AsyncGenerator[Row[Record] | Deleted | CaughtUp]:
        """The records whose keys match, then CaughtUp, then every change, in order, across server restarts.

        A record that cannot be read is passed over, with a line in the log; so is what `is_known(key, revision)`. `passed` is
        told the revision of whatever else lies in the bucket, when every change before it has been taken in. With `sure`
        nothing that was acknowledged before is missing, whichever copy is read (`Feed.follow`).
        """
        async with aclosing(self._feed(keys).follow(sure=sure)) as entries:
            async for entry in entries:
                if isinstance(entry, CaughtUp):
                    yield entry
                    continue
                if is_known is not None and is_known(buckets.key_of(self._bucket, entry.subject), entry.sequence):
                    continue
                change = self._change(entry)
                if isinstance(change, (Row, Deleted)):
                    yield change
                elif passed is not None:
                    passed(entry.sequence)

    async def watch_whole(self) -> AsyncGenerator[Row[Record] | Deleted | Unreadable | CaughtUp]:
        """As `watch`, for the caller that removes what is not a record: that is handed on as well."""
        async with aclosing(self._feed(subjects.ANY_TAIL).follow(sure=True)) as entries:
            async for entry in entries:
                change = entry if isinstance(entry, CaughtUp) else self._change(entry)
                if change is not None:
                    yield change

    async def unreadable(self) -> AsyncGenerator[Unreadable]:
        """What is not a record, of all that is stored now."""
        async with aclosing(self._feed(subjects.ANY_TAIL).stored()) as entries:
            async for entry in entries:
                change = self._change(entry)
                if isinstance(change, Unreadable):
                    yield change

    async def remove(self, found: Unreadable, *, reason: str) -> None:
        """Take away what is not a record, unless it was replaced meanwhile; watchers learn that its key is free.

        It needs the right to change streams. Raises BusError.
        """
        try:
            await self.delete(found.key, revision=found.revision, reason=reason)
        except (RevisionConflictError, InvalidNameError):
            # Replaced, or its key cannot be written as it was read: by its sequence it is found all the same.
            await self._delete_message(found.revision)

    def _feed(self, keys: str) -> Feed:
        return Feed(
            self._bus,
            self._stream,
            subject=buckets.bucket_key(self._bucket, keys),
            watch=self._watch_subject(keys),
        )

    def _change(self, entry: Entry) -> Row[Record] | Deleted | Unreadable | None:
        key = buckets.key_of(self._bucket, entry.subject)
        if not self._has(key):
            return None
        if _operation(entry.headers) in _DELETED:
            return Deleted(key, entry.sequence, _header_text(entry.headers.get(_REASON_HEADER, "")))
        try:
            return Row(key, self._read(key, entry.data), entry.sequence, entry.time)
        except (InvalidMessageError, InvalidNameError) as error:
            # A user that may write one key of a bucket must not stop all of its readers.
            self._faults.warning("%s in bucket %s cannot be read: %s", key, self._bucket, error)
            return Unreadable(key, entry.sequence, one_bounded_line(error))

    async def time(self) -> datetime:
        """What the clock shows now by which records are `stored_at`. It needs the right to read about streams."""
        return datetime.fromisoformat((await self._info())["ts"])

    async def copies(self) -> int:
        """How many servers keep the records. It needs the right to read about streams."""
        return int((await self._info())["config"]["num_replicas"])

    async def room(self) -> tuple[int, int]:
        """How many bytes the records take, and may take. It needs the right to read about streams."""
        told = await self._info()
        return int(told["state"]["bytes"]), int(told["config"]["max_bytes"])

    async def _info(self) -> JsonObject:
        try:
            answer = await self._bus.request(server_subjects.stream_info(self._stream))
        except NoRespondersError as error:
            raise self._missing() from error
        told: JsonObject = json.loads(answer.data)
        if "error" in told:
            raise StorageError(f"bucket {self._bucket} tells nothing of itself: {told['error'].get('description')}")
        return told

    async def forget_deleted(self, deleted: Deleted) -> None:
        """Remove the mark that a deletion leaves behind, so that a bucket does not grow without end.

        It needs the right to change streams; watchers do not hear of it.
        """
        await self._delete_message(deleted.revision)

    async def _delete_message(self, revision: int) -> None:
        request = json.dumps({"seq": revision, "no_erase": True}).encode()
        await self._bus.request(server_subjects.message_delete(self._stream), request)


def _header_text(text: str) -> str:
    """What a header can carry of it, and a terminal can be shown: one bounded line."""
    line = " ".join(text[:_MAX_REASON_CHARACTERS].split())
    return "".join(each if each.isascii() and each.isprintable() else "?" for each in line)


def _operation(headers: dict[str, str] | None) -> str | None:
    return headers.get(_OPERATION_HEADER) if headers else None


def sequence_of_ack(answer: Delivery, what: str) -> int:
    """The sequence under which a stream stored a message.

    Raises RevisionConflictError, MessageTooLargeError, NamespaceFullError, StorageError.
    """
    ack = json.loads(answer.data)
    error = ack.get("error")
    if error is None:
        return int(ack["seq"])
    if error.get("err_code") == _WRONG_REVISION:
        raise RevisionConflictError(f"{what} was changed by another writer")
    if error.get("err_code") == _OVER_THE_STREAMS_LIMIT:
        raise MessageTooLargeError(f"{what} is larger than its stream takes: {error.get('description')}")
    if error.get("description") == _NO_MORE_OF_SUBJECT and ack.get("stream") == buckets.SUBMIT_STREAM:
        raise NamespaceFullError(
            f"{what} was not stored: as many submissions of the namespace wait to be recorded as may; submit again when fewer "
            "do, and see that a controller is up"
        )
    if error.get("description") == _NO_ROOM_LEFT:
        raise full_error(what, str(ack.get("stream")))
    raise StorageError(f"{what} was not stored: {error.get('description')}")
