"""The request that has an engine build an image (https://docs.docker.com/reference/api/engine/, ImageBuild).

On a connection of its own, rather than by the SDK, whose calls cannot be ended from outside: an engine gives a build up when it
finds the connection of whoever asked for it closed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlencode

from fluster_services.worker.engine.engine import EngineAwayError, EngineError

if TYPE_CHECKING:
    import h11

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20  # of what an engine says, and of why it refuses
_GIVE_UP_S = 5.0


async def build_image(
    engine: str, api_version: str, context: IO[bytes], parameters: Mapping[str, str]
) -> AsyncGenerator[str, None]:
    """Have `engine` build from `context`; what it says comes in pieces. Raises EngineError when there is no image at the end.

    Left before its end (`aclose`, a cancellation), the build ends first, unless the engine does not answer.
    """
    try:
        import h11
    except ImportError as cause:
        raise EngineError("to have images built needs h11: pip install 'fluster[docker]'") from cause
    try:
        reader, writer = await asyncio.open_unix_connection(engine.removeprefix("unix://"))
    except OSError as cause:
        raise EngineAwayError(f"the Docker engine at {engine} cannot be reached: {cause.strerror}") from cause
    http = h11.Connection(h11.CLIENT)
    try:
        request = h11.Request(
            method="POST",
            target=f"/v{api_version}/build?{urlencode(parameters)}",
            headers=[
                ("Host", "docker"),
                ("Connection", "close"),
                ("Content-Type", "application/x-tar"),
                ("Content-Length", str(os.fstat(context.fileno()).st_size)),
            ],
        )
        writer.write(http.send(request) or b"")
        sending = asyncio.create_task(_send(http, writer, context))
        try:
            async with aclosing(_messages(http, reader, engine)) as messages:
                async for message in messages:
                    if "error" in message:
                        raise EngineError(f"the Docker engine at {engine}: {message['error']}")
                    if "stream" in message:
                        yield str(message["stream"])
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            await _give_up(reader, writer)
    except (OSError, ValueError, h11.RemoteProtocolError) as cause:
        raise EngineError(f"the Docker engine at {engine} went away while it built") from cause
    finally:
        writer.close()


async def _give_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Return when the engine has stopped, if it had not: it sees that nobody is there any more, and can still say that it is done."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_GIVE_UP_S):
            writer.write_eof()
            while await reader.read(_BLOCK_BYTES):
                pass


async def _send(http: h11.Connection, writer: asyncio.StreamWriter, context: IO[bytes]) -> None:
    """Send it; that it did not arrive is told by the answer, or by there being none."""
    from h11 import Data, EndOfMessage, LocalProtocolError

    try:
        while block := await asyncio.to_thread(context.read, _BLOCK_BYTES):
            writer.write(http.send(Data(data=block)) or b"")
            await writer.drain()
        http.send(EndOfMessage())
    except ConnectionError:
        return
    except (OSError, LocalProtocolError):  # it cannot be read, or not all of it, and the engine would wait for the rest
        writer.close()


async def _messages(
    http: h11.Connection, reader: asyncio.StreamReader, engine: str
) -> AsyncGenerator[dict[str, Any], None]:
    """What it says, line by line, until it has said all."""
    from h11 import Data, Response

    rest = b""
    refusal: int | None = None  # its status
    async with aclosing(_events(http, reader)) as events:
        async for event in events:
            if isinstance(event, Response):
                # One that builds cannot know how long it will talk; a body up to the end of the connection has no end to be seen.
                if event.status_code != 200 or (b"transfer-encoding", b"chunked") not in event.headers:
                    refusal = event.status_code
            elif isinstance(event, Data):
                rest += event.data
                if refusal is None:
                    *lines, rest = rest.split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield json.loads(line)
                if len(rest) > _MAX_LINE_BYTES:
                    raise EngineError(
                        f"the Docker engine at {engine} said more than {_MAX_LINE_BYTES:,} bytes in one line"
                    )
    if refusal is not None:
        raise EngineError(f"the Docker engine at {engine}: {_reason(rest, refusal)}")
    if rest.strip():
        yield json.loads(rest)


async def _events(http: h11.Connection, reader: asyncio.StreamReader) -> AsyncGenerator[h11.Event, None]:
    """What comes, up to the end of the answer. Raises RemoteProtocolError where the connection ends before."""
    from h11 import NEED_DATA, EndOfMessage, Event

    while not isinstance(event := http.next_event(), EndOfMessage):
        if event is NEED_DATA:
            http.receive_data(await reader.read(_BLOCK_BYTES))
        elif isinstance(event, Event):
            yield event


def _reason(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
