"""Files of a namespace, kept by what they hold: the workspaces of jobs.

A file is a row of chunks and, stored after them, a manifest. All are messages of one stream, written like any other and
read one by one, so that neither a job nor a client needs the right to make consumers.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from pydantic import Field

from fluster_bus import subjects
from fluster_bus.errors import (
    DisconnectedError,
    InvalidMessageError,
    NoRespondersError,
    ObjectCorruptError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    RequestTimeoutError,
    StorageError,
)
from fluster_bus.messages.model import Message
from fluster_bus.retries import retried
from fluster_bus.tables import sequence_of_ack

if TYPE_CHECKING:
    from fluster_bus.bus import Bus
    from fluster_bus.delivery import Delivery

CHUNK_BYTES = 512 << 10
MAX_OBJECT_BYTES = 512 << 20
MAX_MESSAGES = 8_192  # of a namespace: 4 GiB of chunks; beyond them the oldest go
KEPT_S = 7 * 86_400
_RENEWED_AFTER = timedelta(seconds=KEPT_S / 4)  # what is put again later than this is stored anew
_AT_ONCE = 8
_PATIENCE_S = 30.0
_UNANSWERED = (NoRespondersError, DisconnectedError, RequestTimeoutError)

T = TypeVar("T")


class _Manifest(Message):
    """What a stored file consists of."""

    size: int = Field(ge=0, le=MAX_OBJECT_BYTES)
    chunks: int = Field(ge=0, le=MAX_OBJECT_BYTES // CHUNK_BYTES)
    first_sequence: int  # of its oldest chunk: while that is there, all are


@dataclass(frozen=True)
class ObjectStore:
    """The stored files of a namespace. Whoever may submit jobs there may put and get them."""

    bus: Bus
    namespace: str

    # ---- putting ----------------------------------------------------------------------------------------

    async def put(self, data: bytes) -> str:
        """The SHA-256 of `data`, once the server has it. Raises as `put_file` does."""
        sha256 = hashlib.sha256(data).hexdigest()
        starts = range(0, len(data), CHUNK_BYTES)
        await self._put(sha256, len(data), (data[start : start + CHUNK_BYTES] for start in starts))
        return sha256

    async def put_file(self, file: BinaryIO) -> str:
        """The SHA-256 of what `file` holds from its start on, once the server has it. What it has is not sent again.

        Raises ObjectTooLargeError, StorageError.
        """
        sha256 = await asyncio.to_thread(_hash_of, file)
        size = file.tell()
        file.seek(0)
        await self._put(sha256, size, iter(lambda: file.read(CHUNK_BYTES), b""))
        return sha256

    async def _put(self, sha256: str, size: int, chunks: Iterator[bytes]) -> None:
        if size > MAX_OBJECT_BYTES:
            raise ObjectTooLargeError(f"the object has {size:,} bytes, over the limit of {MAX_OBJECT_BYTES:,}")
        if await self._is_fresh(sha256):
            return
        sequences: list[int] = []
        for batch in _batches(enumerate(chunks)):
            parts = ((subjects.bundle_part(self.namespace, sha256, number), chunk) for number, chunk in batch)
            sequences += await _all(self._append(subject, chunk) for subject, chunk in parts)
        manifest = _Manifest(size=size, chunks=len(sequences), first_sequence=min(sequences, default=0))
        await self._append(subjects.bundle_manifest(self.namespace, sha256), manifest.to_json())

    async def _append(self, subject: str, data: bytes) -> int:
        """Store one message. Sent twice it is there once, since the later takes the place of the earlier."""
        try:
            answer = await _patiently(lambda: self.bus.request(subject, data))
        except NoRespondersError as error:
            raise StorageError(f"no stream takes {subject}: does the namespace exist, is a controller up?") from error
        except RequestTimeoutError as error:
            raise StorageError(f"{subject} was not acknowledged: is the server's disk full?") from error
        return sequence_of_ack(answer, subject)

    async def _is_fresh(self, sha256: str) -> bool:
        """True when the object is there, whole, and for a good while yet."""
        found = await self._last(subjects.bundle_manifest(self.namespace, sha256))
        if found is None or datetime.now(UTC) - _stored_at(found) > _RENEWED_AFTER:
            return False
        try:
            manifest = _Manifest.from_json(found.data)
        except InvalidMessageError:
            return False
        if manifest.chunks == 0:
            return True
        oldest = await self._read(self._direct_get, json.dumps({"seq": manifest.first_sequence}).encode())
        return oldest is not None and subjects.is_bundle_part(_subject(oldest), self.namespace, sha256)

    # ---- getting ----------------------------------------------------------------------------------------

    async def get_file(self, sha256: str, path: Path, *, max_bytes: int = MAX_OBJECT_BYTES) -> None:
        """Write the object to the new file `path`, checked against its hash; on any error nothing is left there.

        Raises ObjectNotFoundError, ObjectTooLargeError, ObjectCorruptError, OSError, and BusError when it cannot be
        read at the moment.
        """
        found = await self._last(subjects.bundle_manifest(self.namespace, sha256))
        if found is None:
            raise self._missing(sha256)
        try:
            manifest = _Manifest.from_json(found.data)
        except InvalidMessageError as error:
            raise ObjectCorruptError(f"the manifest of object {sha256} was written over: {error}") from error
        if manifest.size > max_bytes:
            raise ObjectTooLargeError(f"object {sha256} has {manifest.size:,} bytes, over the limit of {max_bytes:,}")
        with _new_file(path) as file:
            await self._write_chunks(file, sha256, manifest)

    async def _write_chunks(self, file: BinaryIO, sha256: str, manifest: _Manifest) -> None:
        digest, left = hashlib.sha256(), manifest.size
        for batch in _batches(range(manifest.chunks)):
            for chunk in await _all(self._chunk(sha256, number) for number in batch):
                left -= len(chunk)
                if left >= 0:  # else it is wrong anyhow, and shall not fill the disk
                    digest.update(chunk)
                    file.write(chunk)
        if left != 0 or digest.hexdigest() != sha256:
            raise ObjectCorruptError(
                f"object {sha256} in namespace {self.namespace!r} is not what its name says: somebody wrote over it; "
                "change any of it, and it is stored under another name"
            )

    async def _chunk(self, sha256: str, number: int) -> bytes:
        found = await self._last(subjects.bundle_part(self.namespace, sha256, number))
        if found is None:
            raise self._missing(sha256)
        return found.data

    def _missing(self, sha256: str) -> ObjectNotFoundError:
        return ObjectNotFoundError(
            f"object {sha256} is not in namespace {self.namespace!r}, or not any more: objects are kept for "
            f"{KEPT_S // 86_400} days, or until newer ones take their room"
        )

    # ---- asking -----------------------------------------------------------------------------------------

    @property
    def _direct_get(self) -> str:
        return subjects.direct_get(subjects.bundles_stream(self.namespace))

    async def _last(self, subject: str) -> Delivery | None:
        return await self._read(f"{self._direct_get}.{subject}")

    async def _read(self, subject: str, data: bytes = b"") -> Delivery | None:
        try:
            answer = await _patiently(lambda: self.bus.request(subject, data))
        except NoRespondersError as error:
            stream = subjects.bundles_stream(self.namespace)
            raise StorageError(f"stream {stream} does not exist: the controller makes it when it starts") from error
        return answer if answer.status is None else None


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    with path.open("xb") as file:
        try:
            yield file
        except BaseException:
            path.unlink()
            raise


def _hash_of(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(CHUNK_BYTES):
        digest.update(block)
    return digest.hexdigest()


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while the server is just coming back: nothing here does harm when it is done twice."""
    return await retried(lambda _left_s: ask(), on=_UNANSWERED, timeout_s=_PATIENCE_S)


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What these return, run side by side; none runs on when one has failed."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, _AT_ONCE)):
        yield batch


def _stored_at(found: Delivery) -> datetime:
    return datetime.fromisoformat((found.headers or {})["Nats-Time-Stamp"])


def _subject(found: Delivery) -> str:
    return (found.headers or {})["Nats-Subject"]
