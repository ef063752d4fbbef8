"""What a namespace keeps by what it holds: the workspaces of jobs, and what is too large for a message.

A file is a row of chunks and, stored after them, a manifest. All are messages of one stream, written like any other and
read one by one, so that neither a job nor a client needs the right to make consumers.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from pydantic import Field

from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import (
    BusError,
    InvalidMessageError,
    ObjectCorruptError,
    ObjectNotFoundError,
    ObjectTooLargeError,
)
from fluster_bus.core.stream_bounds import BUDGET_SETTING, BUNDLES, SURE_OBJECT_BYTES, ObjectKind
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.parts.wire_range import SPOKEN
from fluster_bus.messages.requests import NamespaceReply, NamespaceRequest
from fluster_bus.storage.stored_messages import StoredMessages, side_by_side

if TYPE_CHECKING:
    from fluster_bus.connection.carrier import Carrier
    from fluster_bus.core.delivery import Delivery

CHUNK_BYTES = 512 << 10
MAX_OBJECT_BYTES = 512 << 20
MAX_MESSAGES = 8_192  # of a namespace: 4 GiB of chunks; beyond them the oldest go
_AT_ONCE = 8
_ASK_TIMEOUT_S = 3.0

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Manifest(Message):
    """What a stored file consists of."""

    size: int = Field(ge=0, le=MAX_OBJECT_BYTES)
    chunks: int = Field(ge=0, le=MAX_OBJECT_BYTES // CHUNK_BYTES)
    first_sequence: int  # of its oldest chunk: while that is there, all are


@dataclass(frozen=True)
class ObjectStore:
    """The stored objects of a namespace. Users that may submit jobs there may put and get them."""

    bus: Carrier
    namespace: str
    kind: ObjectKind = BUNDLES

    # ---- putting ----------------------------------------------------------------------------------------

    async def put(self, data: bytes) -> str:
        """The SHA-256 of `data`, once the server has it. Raises as `put_file` does."""
        sha256 = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
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
        if size > SURE_OBJECT_BYTES:
            await self._check_share(size)
        if self.kind.is_shared and await self._is_fresh(sha256):
            return
        sequences: list[int] = []
        for batch in _batches(enumerate(chunks)):
            parts = (
                (subjects.object_part(self.kind.name, self.namespace, sha256, number), chunk) for number, chunk in batch
            )
            sequences += await side_by_side(self._messages.append(subject, chunk) for subject, chunk in parts)
        manifest = _Manifest(size=size, chunks=len(sequences), first_sequence=min(sequences, default=0))
        await self._messages.append(
            subjects.object_manifest(self.kind.name, self.namespace, sha256), manifest.to_json()
        )

    async def _check_share(self, size: int) -> None:
        """Raise ObjectTooLargeError where the namespace's share has never room for it. Else it would push out all others first."""
        try:
            asked = await self.bus.request(
                subjects.ensure_namespace(self.namespace),
                NamespaceRequest(wire=SPOKEN).to_json(),
                timeout_s=_ASK_TIMEOUT_S,
            )
            limit = NamespaceReply.from_json(asked.data).object_bytes.get(self.kind.name, size)
        except BusError as error:
            log.info("no controller says how large objects may be: %s", error)
            return
        if size > limit:
            raise ObjectTooLargeError(
                f"the object has {size:,} bytes, over the limit of {limit:,}: namespace {self.namespace!r} has no larger share "
                f"of the store for {self.kind.name}; give its controllers a larger {BUDGET_SETTING}"
            )

    async def _is_fresh(self, sha256: str) -> bool:
        """True when the object is there, whole, and for a good while yet."""
        found = await self._messages.last(subjects.object_manifest(self.kind.name, self.namespace, sha256))
        if found is None or datetime.now(UTC) - _stored_at(found) > self.kind.renewed_after:
            return False
        try:
            manifest = _Manifest.from_json(found.data)
        except InvalidMessageError:
            return False
        if manifest.chunks == 0:
            return True
        oldest = await self._messages.at(manifest.first_sequence)
        return oldest is not None and subjects.is_object_part(_subject(oldest), self.kind.name, self.namespace, sha256)

    # ---- getting ----------------------------------------------------------------------------------------

    async def get_file(self, sha256: str, path: Path, *, max_bytes: int = MAX_OBJECT_BYTES) -> None:
        """Write the object to the new file `path`, checked against its hash; on any error nothing is left there.

        Raises ObjectNotFoundError, ObjectTooLargeError, ObjectCorruptError, OSError, and BusError when it cannot be
        read at the moment.
        """
        manifest = await self._manifest(sha256, max_bytes)
        with _new_file(path) as file:
            await self._write_chunks(file, sha256, manifest)

    async def get(self, sha256: str, *, max_bytes: int = MAX_OBJECT_BYTES) -> bytes:
        """The object, checked against its hash. Raises as `get_file` does."""
        found = io.BytesIO()
        await self._write_chunks(found, sha256, await self._manifest(sha256, max_bytes))
        return found.getvalue()

    async def remove(self, sha256: str) -> None:
        """Remove an object: a right of services, for kinds whose stream allows it. Raises BusError."""
        stream = buckets.objects_stream(self.kind.name, self.namespace)
        request = json.dumps({"filter": subjects.object_messages(self.kind.name, self.namespace, sha256)}).encode()
        await self.bus.request(server_subjects.stream_purge(stream), request)

    async def settle(self) -> None:
        """Return when all copies of what is stored have it, or after a moment. Needs the right to ask about streams."""
        await self._messages.settle()

    async def _manifest(self, sha256: str, max_bytes: int) -> _Manifest:
        found = await self._messages.last(subjects.object_manifest(self.kind.name, self.namespace, sha256))
        if found is None:
            raise self._missing(sha256)
        try:
            manifest = _Manifest.from_json(found.data)
        except InvalidMessageError as error:
            raise ObjectCorruptError(f"the manifest of object {sha256} was written over: {error}") from error
        if manifest.size > max_bytes:
            raise ObjectTooLargeError(f"object {sha256} has {manifest.size:,} bytes, over the limit of {max_bytes:,}")
        return manifest

    async def _write_chunks(self, file: BinaryIO, sha256: str, manifest: _Manifest) -> None:
        digest, left = hashlib.sha256(), manifest.size
        for batch in _batches(range(manifest.chunks)):
            for chunk in await side_by_side(self._chunk(sha256, number) for number in batch):
                left -= len(chunk)
                if left >= 0:  # else it is wrong anyhow, and must not fill the disk
                    digest.update(chunk)
                    file.write(chunk)
        if left != 0 or digest.hexdigest() != sha256:
            raise ObjectCorruptError(
                f"object {sha256} in namespace {self.namespace!r} is not what its name says: it was overwritten; "
                "change any of it, and it is stored under another name"
            )

    async def _chunk(self, sha256: str, number: int) -> bytes:
        found = await self._messages.last(subjects.object_part(self.kind.name, self.namespace, sha256, number))
        if found is None:
            raise self._missing(sha256)
        return found.data

    def _missing(self, sha256: str) -> ObjectNotFoundError:
        return ObjectNotFoundError(
            f"object {sha256} is not in namespace {self.namespace!r}, or no longer: objects are kept for "
            f"{self.kind.shown_time}, unless the cluster is set to longer, or until newer ones take their room"
        )

    @property
    def _messages(self) -> StoredMessages:
        return StoredMessages(self.bus, buckets.objects_stream(self.kind.name, self.namespace))


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


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, _AT_ONCE)):
        yield batch


def _stored_at(found: Delivery) -> datetime:
    return datetime.fromisoformat((found.headers or {})["Nats-Time-Stamp"])


def _subject(found: Delivery) -> str:
    return (found.headers or {})["Nats-Subject"]
