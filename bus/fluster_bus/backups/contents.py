"""What a backup consists of: streams of a cluster, and a folder on the disk.

Which streams of a cluster belong into a backup, and in which order they are read and restored, is decided without I/O.

They are read one after the other while the cluster runs. So that each agrees with those before it, though it shows a later moment:

    submissions   first: what is not recorded yet is recorded later; what was meanwhile, the records tell
    requests      as soon after the submissions as can be: they go as soon as their job is recorded
    events        before the records, which tell again what the leader has not published
    calls         before the actors' rows, which tell which of them are handled
    secrets       before the records and again after them: they go as soon as their job has ended
    records       each job and task as it is at one moment
    all else      after the records: what a record names is there

Restored they are with the submissions last: so a submission finds all else.

On the disk a backup is a folder that is there as a whole or not at all, and what it says about itself (the manifest):

FOLDER/manifest.json          the manifest, for people too
FOLDER/STREAM/backup.json     configuration and bounds of a stream
FOLDER/STREAM/stream.tar.s2   its messages, under the name by which `nats stream restore FOLDER/STREAM` takes them
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import Field

from fluster_bus.core import buckets
from fluster_bus.core.errors import BackupError, InvalidMessageError
from fluster_bus.core.json_types import JsonObject
from fluster_bus.core.names import Namespace
from fluster_bus.core.stream_bounds import BUNDLES, PAYLOADS, REQUESTS, stream_of
from fluster_bus.core.version import VERSION
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.parts.wire_range import SPOKEN, WireRange, why_apart

_BEFORE = (REQUESTS.name, "events", "calls", "secrets")
_JOBS = "jobs"
_AFTER = ("actors", "registry", "results", "logs", BUNDLES.name, PAYLOADS.name)
_READ_AGAIN = ("secrets",)
KINDS = (*_BEFORE, _JOBS, *_AFTER)  # of a namespace

_SYSTEM = {
    "joins": buckets.bucket_stream(buckets.JOINS_BUCKET),
    "namespaces": buckets.bucket_stream(buckets.NAMESPACES_BUCKET),
}
# What lives only as long as the processes do which write it: they write it anew.
ALIVE_ONLY = (
    buckets.bucket_stream(buckets.WORKERS_BUCKET),
    buckets.bucket_stream(buckets.CONTROLLERS_BUCKET),
    buckets.ROOM_STREAM,
)
_PREFIXES = tuple(stream_of(kind, "n").removesuffix("n") for kind in KINDS)
FORMAT = 1
MANIFEST_FILE = "manifest.json"
_CONFIG_FILE, _DATA_FILE = "backup.json", "stream.tar.s2"
_PIECE = 1 << 20


@dataclass(frozen=True)
class Part:
    """A stream that belongs into a backup."""

    stream: str
    kind: str
    namespace: str | None = None

    @property
    def tells_of_use(self) -> bool:
        """Whether a cluster that has something there has been used: its controllers and actors alone write none of it."""
        return self.kind not in ("registry", "namespaces")


@dataclass(frozen=True)
class Plan:
    """What is to be read, in this order; a stream may be there twice, and is read on then. `left_out` are the other streams."""

    steps: tuple[Part, ...]
    left_out: tuple[str, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Each once."""
        return tuple(dict.fromkeys(self.steps))


def plan(streams: Collection[str]) -> Plan:
    """How a cluster is read that has these streams."""
    namespaces = {each.removeprefix(prefix) for each in streams for prefix in _PREFIXES if each.startswith(prefix)}
    steps = [Part(buckets.SUBMIT_STREAM, "submissions")]
    for namespace in sorted(namespaces):
        kinds = (*_BEFORE, _JOBS, *_READ_AGAIN, *_AFTER)
        steps += [Part(stream_of(kind, namespace), kind, namespace) for kind in kinds]
    steps += [Part(stream, kind) for kind, stream in _SYSTEM.items()]
    present = tuple(step for step in steps if step.stream in streams)
    known = {*(step.stream for step in present), *ALIVE_ONLY}
    return Plan(present, tuple(sorted(each for each in streams if each not in known)))


def restoring_order(parts: Collection[Part]) -> list[Part]:
    """The records after what they name, the submissions last."""
    last = {_JOBS: 1, "submissions": 2}
    return sorted(parts, key=lambda part: last.get(part.kind, 0))


class BackedUpStream(Message):
    """A stream in a backup."""

    stream: str = Field(pattern=r"^[A-Za-z0-9_-]+$")  # a folder is named after it
    kind: str
    namespace: Namespace | None = None
    messages: int
    last: int  # the sequence of the newest of them, 0 where there is none
    goes_on_after: int  # the sequence after which it goes on once it is restored
    size: int  # of its archive, in bytes
    sha256: str  # of its archive
    config: JsonObject  # as the server told it

    def request(self, replicas: int) -> JsonObject:
        """What the server is asked for that is to make it anew, with so many copies."""
        metadata = {
            name: text for name, text in self.config.get("metadata", {}).items() if not name.startswith("_nats.")
        }
        return {
            "config": {**self.config, "metadata": metadata, "num_replicas": replicas},
            "state": {"messages": self.messages, "bytes": self.size, "first_seq": 1, "last_seq": self.goes_on_after},
        }

    @property
    def restorable(self) -> bytes:
        """The same for the `nats` command, which knows no manifest."""
        return json.dumps(self.request(int(self.config.get("num_replicas", 1))), indent=2).encode()


class Manifest(Message):
    """All that a backup has."""

    format: int = FORMAT
    fluster: str = VERSION
    wire: WireRange = SPOKEN
    began_at: float  # Unix times in seconds
    ended_at: float
    streams: tuple[BackedUpStream, ...]
    left_out: tuple[str, ...] = ()  # streams of the server that are none of Fluster's

    @property
    def size(self) -> int:
        return sum(each.size for each in self.streams)


def data_file(folder: Path, stream: str) -> Path:
    """Where the messages of a stream lie."""
    return folder / stream / _DATA_FILE


def config_file(folder: Path, stream: str) -> Path:
    """Where its `restorable` lies."""
    return folder / stream / _CONFIG_FILE


def read_manifest(folder: Path) -> Manifest:
    """What the backup in `folder` says of itself. Raises BackupError."""
    file = folder / MANIFEST_FILE
    try:
        manifest = Manifest.from_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BackupError(f"{folder} is not a backup: it has no {MANIFEST_FILE}") from error
    except OSError as error:
        raise BackupError(f"{file} cannot be read: {error.strerror}") from error
    except InvalidMessageError as error:
        raise BackupError(f"{file} is damaged: {error}") from error
    if manifest.format != FORMAT:
        raise BackupError(f"{folder} has format {manifest.format}, this release of Fluster reads format {FORMAT}")
    apart = why_apart(
        manifest.wire, f"the backup {folder} (fluster {manifest.fluster})", here=f"this fluster {VERSION}"
    )
    if apart is not None:
        raise BackupError(apart)
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise BackupError where a file is missing, or is not what was written."""
    for each in manifest.streams:
        file = data_file(folder, each.stream)
        try:
            size, digest = file.stat().st_size, digest_of(file)
        except OSError as error:
            raise BackupError(f"{file} cannot be read: {error.strerror}; take another backup") from error
        if (size, digest) != (each.size, each.sha256):
            raise BackupError(f"{file} is damaged: its digest is not that of the manifest; take another backup")


def digest_of(file: Path) -> str:
    """The SHA-256 of a file. Raises OSError."""
    found = hashlib.sha256()
    with file.open("rb") as data:
        while piece := data.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


_LOCK = "lock"


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to be filled, which becomes `folder` when the body ends well, and else is removed.

    What one that was killed has left beside it is removed by the next. Raises BackupError where `folder` is there already, or
    cannot be written.
    """
    draft = folder.with_name(f".{folder.name}.partial")
    with _explained(folder):
        if folder.exists():
            raise BackupError(f"{folder} is there already: name another folder, or remove it")
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(draft / _LOCK, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            _hold(lock, folder)
            _empty(draft)
            try:
                yield draft
                (draft / _LOCK).unlink()
                _sync(draft)
                draft.rename(folder)
                _sync(folder.parent)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        finally:
            os.close(lock)


@contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """A new file for its owner alone, on the disk when the body ends. Raises OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BackupError(
            f"the backup {folder} cannot be written: {error.strerror}; nothing of it is left: make room or rights there, or name "
            "another folder"
        ) from error


def _hold(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BackupError(f"another one writes the backup {folder} at this moment: name another folder") from error


def _empty(draft: Path) -> None:
    for left in draft.iterdir():
        if left.is_dir():
            shutil.rmtree(left)
        elif left.name != _LOCK:
            left.unlink()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
