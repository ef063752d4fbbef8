"""Messages between processes of one machine: a JSON object a line, over pipes and sockets.

    encoded(message) ─► pipe or socket ─► JsonLines.feed    where what was read is at hand: selectors, callbacks of a loop
                                          JsonLineStream    over asyncio's streams, by the same decoder

A line that is not a message ends its own record: those behind it are read as they are. None is kept beyond a length that its
reader gives, so the other end cannot fill the memory of this one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fluster_bus.core.json_types import JsonObject

if TYPE_CHECKING:
    import asyncio

_READ_BYTES = 64 * 1024
_SHOWN_BYTES = 200


class BadLineError(ValueError):
    """A line was too long, or not a JSON object."""

    def __init__(self, line: bytes, problem: str) -> None:
        """`line` may be its beginning."""
        more = "…" if len(line) > _SHOWN_BYTES else ""
        super().__init__(f"the line {line[:_SHOWN_BYTES]!r}{more} {problem}")


def encoded(message: Mapping[str, object] | list[int]) -> bytes:
    """Return the line that says `message`, newline included. Raises TypeError for what JSON does not have."""
    return json.dumps(message).encode() + b"\n"


def checked(message: JsonObject | BadLineError) -> JsonObject:
    """Return the message. Raises it if it is a BadLineError."""
    if isinstance(message, BadLineError):
        raise message
    return message


class Lines:
    """Cuts a stream of bytes into its lines, whatever they say. Keeps `max_bytes` of a line that has not ended."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()  # what there is of the last line
        self._is_skipping = False  # the rest of a line that was too long

    def feed(self, data: bytes) -> list[bytes | BadLineError]:
        """Return the lines that `data` completes, without their newlines. One that is too long is bad at once, and once."""
        *ended, rest = data.split(b"\n")
        lines: list[bytes | BadLineError] = []
        for part in ended:
            if not self._is_skipping:
                lines.append(self._checked(bytes(self._rest + part) if self._rest else bytes(part)))
            self._is_skipping = False
            self._rest.clear()
        if not self._is_skipping:
            self._rest += rest
            if len(self._rest) > self._max_bytes:
                lines.append(self._checked(bytes(self._rest)))
                self._rest.clear()
                self._is_skipping = True
        return lines

    def _checked(self, line: bytes) -> bytes | BadLineError:
        if len(line) > self._max_bytes:
            return BadLineError(line, f"is longer than {self._max_bytes:,} bytes")
        return line


class JsonLines:
    """Decodes a stream of bytes into its messages, each of `max_line_bytes` at most. Blank lines are passed over."""

    def __init__(self, max_line_bytes: int) -> None:
        self._lines = Lines(max_line_bytes)

    def feed(self, data: bytes) -> Iterator[JsonObject | BadLineError]:
        """Return the messages that `data` completes, each decoded when it is its turn."""
        lines = self._lines.feed(data)  # now, even if the messages are never asked for
        return (_decoded(line) for line in lines if isinstance(line, BadLineError) or line.strip())


def _decoded(line: bytes | BadLineError) -> JsonObject | BadLineError:
    if isinstance(line, BadLineError):
        return line
    if not line.startswith(b"{"):  # told without an attempt to decode it: a hostile end may write many
        return BadLineError(line, "is not a JSON object")
    try:
        message: JsonObject = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadLineError(line, f"is not JSON: {error}")
    return message


class JsonLineStream:
    """Sends and receives messages over a pair of asyncio's streams. For one reader at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_line_bytes: int) -> None:
        self._reader = reader
        self._writer = writer
        self._lines = JsonLines(max_line_bytes)
        self._received: deque[JsonObject | BadLineError] = deque()

    async def receive(self) -> JsonObject | None:
        """Return the next message; None at the end, a line without its newline not counted.

        Raises BadLineError, after which the next message can be received, and OSError. Cancelled, it loses nothing.
        """
        while not self._received:
            data = await self._reader.read(_READ_BYTES)
            if not data:
                return None
            self._received.extend(self._lines.feed(data))
        return checked(self._received.popleft())

    def send(self, message: Mapping[str, object] | list[int]) -> None:
        """Have it sent. It has no effect once this end is closed."""
        if not self._writer.is_closing():
            self._writer.write(encoded(message))

    async def drain(self) -> None:
        """Return when the other end has taken most of what was sent. Raises OSError."""
        await self._writer.drain()

    @property
    def unsent_bytes(self) -> int:
        """How much the other end has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    @property
    def is_open(self) -> bool:
        """Whether more can be sent, and more may come."""
        return not self._writer.is_closing() and (bool(self._received) or not self._reader.at_eof())

    def close(self) -> None:
        """Send what is to be sent still, and let the other end go."""
        self._writer.close()

    async def wait_closed(self) -> None:
        """Return when it is closed. Raises OSError."""
        await self._writer.wait_closed()
