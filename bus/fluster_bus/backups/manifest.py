"""What a backup says of itself, and how it lies on a disk.

FOLDER/manifest.json          this, for people too
FOLDER/STREAM/backup.json     configuration and bounds of a stream
FOLDER/STREAM/stream.tar.s2   its messages, under the name by which `nats stream restore FOLDER/STREAM` takes them
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import Field

from fluster_bus.core.errors import BackupError, InvalidMessageError
from fluster_bus.core.names import Namespace
from fluster_bus.core.version import VERSION
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.parts.wire_range import SPOKEN, WireRange, why_apart

FORMAT = 1
MANIFEST_FILE = "manifest.json"
_CONFIG_FILE, _DATA_FILE = "backup.json", "stream.tar.s2"
_PIECE = 1 << 20


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
    config: dict[str, Any]  # as the server told it

    def request(self, replicas: int) -> dict[str, Any]:
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
