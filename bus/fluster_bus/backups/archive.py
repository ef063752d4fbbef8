"""Archives of streams as nats-server restores them: `NATSARC1`, in blocks compressed with Snappy.

    archive  "NATSARC1", the state as JSON, the messages by their sequences, an empty entry as the end
    entry    length of the name, time in nanoseconds, sequence, lengths of headers and body (variable-length integers), then
             name, headers and body

nats-server 2.15 and newer reads them, so does `nats stream restore`. What the server makes of a stream by itself has the same form, but
not all that a bucket had: see docs/decisions/0088-a-backup-is-read-not-snapshotted.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol

import cramjam

from fluster_bus.core.errors import BackupError, NoRespondersError
from fluster_bus.running.coroutines import retried

if TYPE_CHECKING:
    from fluster_bus.core.delivery import Delivery

_MAGIC = b"NATSARC1"
_STATE = b"state.json"
_BLOCK_BYTES = 1 << 20
# Servers add these to what they hand out, and again to what is restored.
_OF_THE_SERVER = frozenset(
    {
        "Nats-Stream",
        "Nats-Subject",
        "Nats-Sequence",
        "Nats-Time-Stamp",
        "Nats-Last-Sequence",
        "Nats-Num-Pending",
        "Nats-UpTo-Sequence",
    }
)
_AGE = 1_000_000_000
_LEAST_AHEAD = 500_000_000


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a stream with all that the server keeps of it."""

    sequence: int
    subject: str
    time_ns: int
    headers: bytes  # as on the wire, empty where there are none
    data: bytes


def goes_on_after(last: int) -> int:
    """The sequence after which a restored stream goes on: a multiple of a billion, far above what was given since the backup.

    So no revision is given twice, and a reader that followed the stream until it was lost takes what comes for new.
    """
    return -(-(last + _LEAST_AHEAD) // _AGE) * _AGE


def header_block(headers: dict[str, str]) -> bytes:
    """The headers of a stored message as on the wire, without what the server adds."""
    own = {name: value for name, value in headers.items() if name not in _OF_THE_SERVER}
    if not own:
        return b""
    lines = "".join(f"{name}: {value}\r\n" for name, value in own.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode(errors="surrogateescape")


class ArchiveWriter:
    """Writes one archive. `first` and `last` bound its sequences; `last` is where the restored stream goes on."""

    def __init__(self, file: BinaryIO, *, first: int, last: int, messages: int, size: int) -> None:
        self._file = file
        self._block = bytearray(_MAGIC)
        self._last = last
        self.messages = 0
        self.newest = 0  # sequence
        # A server wants to know of at least one message where the sequences have room for some; it counts for itself.
        state = {
            "messages": max(messages, 1),
            "bytes": size,
            "first_seq": max(first, 1),
            "first_ts": "0001-01-01T00:00:00Z",
            "last_seq": last,
            "last_ts": "0001-01-01T00:00:00Z",
            "consumer_count": 0,
        }
        self._add(_STATE, json.dumps(state).encode())

    def write(self, message: StoredMessage) -> None:
        """Add a message, of a higher sequence than any before. Raises OSError."""
        if not self.newest < message.sequence <= self._last:
            raise ValueError(f"sequence {message.sequence} does not lie between {self.newest} and {self._last}")
        self.newest = message.sequence
        self.messages += 1
        self._add(
            message.subject.encode(errors="surrogateescape"),
            message.data,
            time_ns=message.time_ns,
            sequence=message.sequence,
            headers=message.headers,
        )
        if len(self._block) >= _BLOCK_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write the end, without which no server takes it. Raises OSError."""
        self._add(b"", b"")
        self._flush()

    def _add(self, name: bytes, data: bytes, *, time_ns: int = 0, sequence: int = 0, headers: bytes = b"") -> None:
        signed = time_ns << 1 if time_ns >= 0 else (-time_ns << 1) - 1
        for number in (len(name), signed, sequence, len(headers), len(data)):
            self._block += _varint(number)
        self._block += name + headers + data

    def _flush(self) -> None:
        self._file.write(memoryview(cramjam.snappy.compress(self._block)))
        self._block.clear()


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


_HEARD_WITHIN_S = 10.0


class Requests(Protocol):
    """What is needed of a `Bus`."""

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> Delivery: ...


class ArchiveSender:
    """Sends the archive of `stream` to `where`, the subject on which a server has said that it takes it."""

    def __init__(self, bus: Requests, stream: str, where: str, *, heard_within_s: float = _HEARD_WITHIN_S) -> None:
        self._bus = bus
        self._stream = stream
        self._where = where
        self._heard_within_s = heard_within_s
        self._is_taken = False

    async def send(self, chunk: bytes, timeout_s: float) -> bytes:
        """The server's answer, which comes within so many seconds; an empty chunk is the end. Raises BackupError, BusError."""
        # Another server of a group may say on which subject it listens before this connection's server knows that it does.
        patience_s = 0.0 if self._is_taken else self._heard_within_s
        try:
            answer = await retried(
                lambda _left_s: self._bus.request(self._where, chunk, timeout_s=timeout_s),
                on=(NoRespondersError,),
                timeout_s=patience_s,
            )
        except NoRespondersError as error:
            raise BackupError(self._refused()) from error
        self._is_taken = True
        return answer.data

    def _refused(self) -> str:
        if self._is_taken:
            return (
                f"the server that made stream {self._stream} from its archive takes no more of it: it has ended, or lost its connection "
                "to the others; look whether all servers run, and restore again"
            )
        return (
            "the servers take no archive: their configuration, or the accounts that they know, are of an older release; make them anew "
            "(`fluster credentials push`, or the server's configuration), and try again"
        )
