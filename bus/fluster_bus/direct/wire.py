"""The protocol of NATS, client's side: bytes to what they say, and back. Without any I/O.

https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from fluster_bus.core.delivery import DESCRIPTION_HEADER, STATUS_HEADER, Delivery
from fluster_bus.core.json_types import JsonObject

END = b"\r\n"
PING, PONG = b"PING\r\n", b"PONG\r\n"
_VERSION = b"NATS/1.0"
_MAX_LINE = 1 << 20  # of what the server says about itself; it names all servers of its cluster
_LINE_BREAK = re.compile(r"[\r\n]")
_MAX_HEADERS = 128 << 10  # bytes; of a stored message they have 64 KiB at most, and what the server adds
_MAX_SUBJECTS = 4_000  # bytes; a server ends a connection on which the first line of a message has over 4,096
_tuple = tuple.__new__  # a named tuple of all its fields, which Python makes without running a function of its own


class ProtocolError(Exception):
    """What arrived is not NATS."""


class NumberedDelivery(NamedTuple):
    """A message for the subscription with that number."""

    subscription: int
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Info:
    """What the server says about itself."""

    values: JsonObject


@dataclass(frozen=True, slots=True)
class Refusal:
    """The server's `-ERR`."""

    text: str


@dataclass(frozen=True, slots=True)
class Ping:
    """The server wants to know whether this client is alive."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The server has dealt with all that was sent before our PING."""


Control = Info | Refusal | Ping | Pong
Said = NumberedDelivery | Control
RawMessage = tuple[
    int, bytes, bytes, bytes, bytes
]  # the same as it travels: subscription, subject, reply, body, headers
M = TypeVar("M")
# Of the words of a message's first line, of all that was read, and of where in it the message begins and ends.
Make = Callable[[list[bytes], bytes, int, int], M]


class Parser(Generic[M]):
    """Cuts what arrives into what the server said, wherever the pieces begin and end; `make` makes the messages."""

    def __init__(self, make: Make[M]) -> None:
        self._make = make
        self._rest = bytearray()  # of something that is not complete yet
        self._needed = 0  # bytes until it is, as far as that is known

    def feed(self, data: bytes) -> list[M | Control]:
        """What is complete now. Raises ProtocolError."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        said: list[M | Control] = []
        self._needed = 0
        start, size = 0, len(data)
        while start < size:
            line_end = data.find(END, start)
            if line_end < 0:
                if size - start > _MAX_LINE:
                    raise ProtocolError(f"a line of over {size - start:,} bytes")
                break
            after = line_end + 2
            if data.startswith((b"MSG ", b"HMSG "), start):
                # By blanks alone: a subject may have any other byte, also what Python takes for white space.
                parts = data[start:line_end].split(b" ")
                try:
                    end = after + int(parts[-1])
                except ValueError as error:
                    raise _unknown(data[start:line_end]) from error
                if size < end + 2:
                    self._needed = end + 2 - start
                    break
                if data[end : end + 2] != END:
                    raise _unknown(data[start:line_end])
                try:
                    said.append(self._make(parts, data, after, end))
                except ValueError as error:
                    raise _unknown(data[start:line_end]) from error
                start = end + 2
            else:
                answer = _control(data[start:line_end])
                if answer is not None:
                    said.append(answer)
                start = after
        if start < size:
            self._rest += memoryview(data)[start:]
        return said


def message(parts: list[bytes], data: bytes, start: int, end: int) -> NumberedDelivery:
    """For a Parser: a message that can be read. Raises ValueError."""
    number, subject, reply, body, headers = raw_message(parts, data, start, end)
    return _tuple(NumberedDelivery, (number, delivery(subject, reply, body, headers)))


def delivery(subject: bytes, reply: bytes, data: bytes, headers: bytes) -> Delivery:
    """A message that can be read. Whatever its sender wrote makes one: a reply subject that is not text belongs to no client."""
    read = header_block(headers) if headers else None
    return _tuple(Delivery, (subject.decode("utf-8", "replace"), data, reply.decode("utf-8", "replace"), read))


def raw_message(parts: list[bytes], data: bytes, start: int, end: int) -> RawMessage:
    """For a Parser: a message that others read. Raises ValueError."""
    words, body = len(parts), start
    if parts[0] == b"HMSG":
        words -= 1  # the size of the headers stands before that of all
        body += int(parts[-2])
    if words not in (4, 5):
        raise ValueError("it has too few or too many words")
    return int(parts[2]), parts[1], parts[3] if words == 5 else b"", data[body:end], data[start:body]


def _control(line: bytes) -> Control | None:
    word, _, rest = line.partition(b" ")
    match word.upper():
        case b"PING":
            return Ping()
        case b"PONG":
            return Pong()
        case b"-ERR":
            return Refusal(rest.strip().strip(b"'").decode("utf-8", "replace"))
        case b"INFO":
            try:
                return Info(json.loads(rest))
            except ValueError as error:
                raise _unknown(line) from error
        case b"+OK" | b"":
            return None
        case _:
            raise _unknown(line)


def _unknown(line: bytes) -> ProtocolError:
    return ProtocolError(f"the server said {line[:100]!r}")


def header_block(raw: bytes) -> dict[str, str]:
    """The headers of a message, and the server's status among them. Its writer may have sent anything as such: all is read.

    A message is as one without any where they are larger than the server's own are: to read some megabytes takes seconds, in which
    nothing else of the program goes on.
    """
    if len(raw) > _MAX_HEADERS:
        return {}
    first, _, rest = raw.partition(END)
    headers = parse_headers(rest)
    status = first[len(_VERSION) :].strip() if first.startswith(_VERSION) else b""
    if status:
        headers[STATUS_HEADER] = status[:3].decode("ascii", "replace")
        description = status[3:].strip().decode("utf-8", "replace")
        if description:
            headers.setdefault(DESCRIPTION_HEADER, description)
    return headers


def parse_headers(raw: bytes) -> dict[str, str]:
    """The headers in lines `Name: value`."""
    headers: dict[str, str] = {}
    for line in raw.decode("utf-8", "replace").split("\r\n"):
        name, separator, value = line.partition(":")
        name = name.strip()
        # A name is a token: ASCII, without white space.
        if separator and name.isascii() and len(name.split(None, 1)) < 2:
            headers[name] = value.strip(" \t")  # all else is a part of it, as of a subject
    return headers


def connect(**options: object) -> bytes:
    return b"CONNECT " + json.dumps(options).encode() + END


def subscribe(number: int, subject: str, queue: str = "") -> bytes:
    return f"SUB {subject} {queue} {number}\r\n".encode()


def unsubscribe(number: int) -> bytes:
    return b"UNSUB %d\r\n" % number


def publish(subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> bytes:
    if headers is None:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply.encode(), len(data), data)
    raw = _VERSION + END + b"".join(_header_lines(headers)) + END
    sizes = (subject.encode(), reply.encode(), len(raw), len(raw) + len(data), raw, data)
    return b"HPUB %b %b %d %d\r\n%b%b\r\n" % sizes


def fits_line(subject: str, reply: str = "") -> bool:
    """Whether a server takes a message with these: one whose first line is too long ends the connection on which it is sent."""
    length = len(subject) + len(reply)
    return length <= _MAX_SUBJECTS >> 2 or len(subject.encode()) + len(reply.encode()) <= _MAX_SUBJECTS


def headers_size(headers: Mapping[str, str]) -> int:
    """How many bytes they have as they travel, or some more. They count as a part of the message."""
    return len(_VERSION) + 2 * len(END) + sum(len(f"{name}: {value}\r\n".encode()) for name, value in headers.items())


def _header_lines(headers: Mapping[str, str]) -> Iterator[bytes]:
    for name, value in headers.items():
        if _LINE_BREAK.search(name + value) or ":" in name:
            raise ValueError(f"the header {name!r} cannot have the value {value!r}: it would end its line")
        yield f"{name}: {value}\r\n".encode()
