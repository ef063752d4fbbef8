"""Makes a backup of a cluster while it runs, by reading all of its streams."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fluster_bus.backups.archive import ArchiveWriter, goes_on_after
from fluster_bus.backups.contents import (
    MANIFEST_FILE,
    BackedUpStream,
    Manifest,
    Part,
    config_file,
    data_file,
    digest_of,
    plan,
    private_file,
    whole_folder,
)
from fluster_bus.backups.stream_reader import StreamReader
from fluster_bus.core import server_subjects
from fluster_bus.core.errors import BackupError, NoRespondersError
from fluster_bus.core.names import Namespace

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus


@dataclass(frozen=True, slots=True)
class BackupProgress:
    """How far it is: `done` of `total` bytes, of which a moment later there may be more."""

    stream: str
    done: int
    total: int


class _OpenArchive:
    """A stream that is being read into its file."""

    def __init__(self, part: Part, reader: StreamReader, writer: ArchiveWriter) -> None:
        self.part = part
        self.reader = reader
        self.writer = writer

    def described(self, folder: Path) -> BackedUpStream:
        file = data_file(folder, self.part.stream)
        return BackedUpStream(
            stream=self.part.stream,
            kind=self.part.kind,
            namespace=Namespace(self.part.namespace) if self.part.namespace is not None else None,
            messages=self.writer.messages,
            last=self.writer.newest,
            goes_on_after=goes_on_after(int(self.reader.state["last_seq"])),
            size=file.stat().st_size,
            sha256=digest_of(file),
            config=self.reader.config,
        )


async def make_backup(
    bus: Bus, folder: Path, *, on_progress: Callable[[BackupProgress], None] = lambda _progress: None
) -> Manifest:
    """Write all that the cluster keeps into `folder`, which is there as a whole afterwards or not at all.

    The user of `bus` is an operator. Raises BackupError, StorageError, BusError.
    """
    began_at = time.time()
    steps = plan(await stream_names(bus))
    if not any(part.kind == "jobs" for part in steps.parts):
        raise BackupError(f"the server at {bus.address} has no streams of Fluster: did a controller ever run there?")
    with whole_folder(folder) as draft, ExitStack() as files:
        archives: dict[str, _OpenArchive] = {}
        done = total = 0
        for number, part in enumerate(steps.steps):
            if part.stream not in archives:
                archives[part.stream] = await _opened(
                    bus, part, files.enter_context(private_file(data_file(draft, part.stream)))
                )
                total += int(archives[part.stream].reader.state["bytes"])
            archive = archives[part.stream]
            async with aclosing(archive.reader.read_on()) as messages:
                async for message in messages:
                    archive.writer.write(message)
                    done += len(message.data) + len(message.headers)
                    on_progress(BackupProgress(part.stream, done, max(done, total)))
            if part not in steps.steps[number + 1 :]:
                archive.writer.finish()
        files.close()  # all of them are on the disk
        streams = tuple(archive.described(draft) for archive in archives.values())
        for each in streams:
            with private_file(config_file(draft, each.stream)) as file:
                file.write(each.restorable)
        manifest = Manifest(began_at=began_at, ended_at=time.time(), streams=streams, left_out=steps.left_out)
        with private_file(draft / MANIFEST_FILE) as file:
            file.write(manifest.model_dump_json(indent=2).encode())
    return manifest


async def _opened(bus: Bus, part: Part, file: BinaryIO) -> _OpenArchive:
    reader = await StreamReader.open(bus, part.stream)
    state = reader.state
    writer = ArchiveWriter(
        file,
        first=int(state["first_seq"]),
        last=goes_on_after(int(state["last_seq"])),
        messages=int(state["messages"]),
        size=int(state["bytes"]),
    )
    return _OpenArchive(part, reader, writer)


async def stream_names(bus: Bus) -> list[str]:
    """All streams of the server. Raises BackupError, BusError."""
    names: list[str] = []
    while True:
        try:
            answer = await bus.request(server_subjects.STREAM_NAMES, json.dumps({"offset": len(names)}).encode())
        except NoRespondersError as error:
            raise BackupError(f"the server at {bus.address} keeps no streams: is JetStream enabled there?") from error
        told = json.loads(answer.data)
        if "error" in told:
            raise BackupError(f"the server does not tell its streams: {told['error'].get('description')}")
        found = told.get("streams") or []
        names += found
        if not found or len(names) >= int(told.get("total", 0)):
            return names
