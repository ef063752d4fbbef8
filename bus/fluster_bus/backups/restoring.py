"""Restores a backup: each stream is deleted where it is there, and made anew from its archive."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import nats.js.errors

from fluster_bus.backups.archive import ArchiveSender
from fluster_bus.backups.contents import (
    ALIVE_ONLY,
    BackedUpStream,
    Manifest,
    Part,
    check_files,
    data_file,
    plan,
    read_manifest,
    restoring_order,
)
from fluster_bus.backups.lead import RestoringLead
from fluster_bus.backups.making import BackupProgress, stream_names
from fluster_bus.backups.stream_reader import stream_told
from fluster_bus.core import buckets, server_subjects
from fluster_bus.core.errors import BackupError, StorageError
from fluster_bus.core.json_types import JsonObject
from fluster_bus.storage.replication import placement_error

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

_OLDEST_SERVER = (2, 15)
_CHUNK_BYTES = 512 << 10
_CHUNK_TIMEOUT_S, _END_TIMEOUT_S, _ASK_TIMEOUT_S = 60.0, 600.0, 30.0
_EXISTS, _NOT_FOUND = (10_058, 10_130), 404
_OWN_KEYS = 2  # of a bucket of jobs, that leaders write


async def restore_backup(
    bus: Bus,
    folder: Path,
    *,
    replace: bool = False,
    on_progress: Callable[[BackupProgress], None] = lambda _progress: None,
) -> Manifest:
    """Make the streams of the backup in `folder` what they were; controllers wait meanwhile, and then lead what is there.

    What the cluster has must be empty, unless `replace` says that it may be lost. The user of `bus` is an operator. When it fails
    before anything was changed, all is as before; after that controllers wait until a restore has come to its end. Raises BackupError,
    StorageError, BusError.
    """
    if bus.server_version < _OLDEST_SERVER:
        raise BackupError(
            f"the server at {bus.address} is nats-server {'.'.join(map(str, bus.server_version))}: restoring needs "
            f"{'.'.join(map(str, _OLDEST_SERVER))} or newer; update it"
        )
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    lead = await RestoringLead.take(bus)
    is_whole = not lead.found_half  # what is there is a cluster to lead
    try:
        names = await stream_names(bus)
        present = plan(names).parts  # also of namespaces that the backup does not have
        if not replace:
            await _check_empty(bus, present)
        is_whole = False
        for stream in (*(each.stream for each in present), *ALIVE_ONLY):
            if stream in names and stream != buckets.bucket_stream(buckets.CONTROLLERS_BUCKET):
                await _delete(bus, stream)
        copies = await lead.copies()  # controllers make more once there are servers for them
        streams, done = {_part(each): each for each in manifest.streams}, 0
        for part in restoring_order(streams):
            replicas = min(int(streams[part].config.get("num_replicas", 1)), copies)
            async with aclosing(_restored(bus, folder, streams[part], replicas)) as all_sent:
                async for sent in all_sent:
                    lead.check()
                    on_progress(BackupProgress(part.stream, done + sent, manifest.size))
            done += streams[part].size
        is_whole = True
    finally:
        await lead.end(is_whole=is_whole)
    return manifest


def _part(each: BackedUpStream) -> Part:
    return Part(each.stream, each.kind, each.namespace)


async def _check_empty(bus: Bus, present: Sequence[Part]) -> None:
    for part in present:
        if not part.tells_of_use:
            continue
        messages = int((await stream_told(bus, part.stream))["state"]["messages"])
        if messages > (_OWN_KEYS if part.kind == "jobs" else 0):
            raise BackupError(
                f"the cluster is not empty: stream {part.stream} has {messages} messages; give --replace to lose all that it has, "
                "or restore into an empty one"
            )


async def _delete(bus: Bus, stream: str) -> None:
    told = await _asked(bus, server_subjects.stream_delete(stream), {})
    error = told.get("error")
    if error is not None and error.get("code") != _NOT_FOUND:
        raise BackupError(f"stream {stream} could not be deleted: {error.get('description')}")


async def _restored(bus: Bus, folder: Path, each: BackedUpStream, replicas: int) -> AsyncGenerator[int]:
    """How many bytes of its archive are sent, until the stream is there."""
    sender = ArchiveSender(bus, each.stream, await _begun(bus, each, replicas))
    sent = 0
    with data_file(folder, each.stream).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            answer = await sender.send(chunk, _CHUNK_TIMEOUT_S)
            if answer:
                _check(each, answer, replicas)
            sent += len(chunk)
            yield sent
    told = await sender.send(b"", _END_TIMEOUT_S)
    _check(each, told, replicas)
    last = int(json.loads(told)["state"]["last_seq"])
    if last < each.goes_on_after:
        raise BackupError(
            f"stream {each.stream} goes on after {last} and not after {each.goes_on_after}: restore again"
        )


async def _begun(bus: Bus, each: BackedUpStream, replicas: int) -> str:
    """Where the archive is to be sent. Raises StorageError, BackupError."""
    told = await _asked(bus, server_subjects.stream_restore(each.stream), each.request(replicas))
    _raise_error(each, told, replicas)
    where = str(told.get("deliver_subject", ""))
    if not server_subjects.is_restore(where):
        raise BackupError(f"the server did not say where it takes the archive of stream {each.stream}")
    return where


def _check(each: BackedUpStream, answer: bytes, replicas: int) -> None:
    _raise_error(each, json.loads(answer), replicas)


def _raise_error(each: BackedUpStream, told: JsonObject, replicas: int) -> None:
    error = told.get("error")
    if error is None:
        return
    if error.get("err_code") in _EXISTS:
        raise BackupError(
            f"stream {each.stream} was made while it was being restored: stop all controllers, and try again"
        )
    placed = placement_error(each.stream, each.config.get("max_bytes"), replicas, nats.js.errors.APIError(**error))
    if placed is not None:
        raise placed
    raise StorageError(f"stream {each.stream} could not be restored: {error.get('description')}")


async def _asked(bus: Bus, subject: str, request: dict[str, object]) -> JsonObject:
    told: JsonObject = json.loads(
        (await bus.request(subject, json.dumps(request).encode(), timeout_s=_ASK_TIMEOUT_S)).data
    )
    return told
