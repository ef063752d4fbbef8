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
from typing import IO, Any
from urllib.parse import urlencode

from fluster_services.worker.engine import EngineError

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20
_GIVE_UP_S = 5.0


async def build_image(
    engine: str, api_version: str, context: IO[bytes], parameters: Mapping[str, str]
) -> AsyncGenerator[str, None]:
    """Have `engine` build from `context`; what it says comes in pieces. Raises EngineError when there is no image at the end.

    Left before its end (`aclose`, a cancellation), the build ends first, unless the engine does not answer.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(engine.removeprefix("unix://"), limit=_MAX_LINE_BYTES)
    except OSError as cause:
        raise EngineError(f"the Docker engine at {engine} cannot be reached: {cause.strerror}") from cause
    try:
        size = os.fstat(context.fileno()).st_size
        writer.write(
            f"POST /v{api_version}/build?{urlencode(parameters)} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n"
            f"Content-Type: application/x-tar\r\nContent-Length: {size}\r\n\r\n".encode()
        )
        sending = asyncio.create_task(_send(writer, context))
        try:
            async with aclosing(_messages(reader, engine)) as messages:
                async for message in messages:
                    if "error" in message:
                        raise EngineError(f"the Docker engine at {engine}: {message['error']}")
                    if "stream" in message:
                        yield str(message["stream"])
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            await _give_up(reader, writer)
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as cause:
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


async def _send(writer: asyncio.StreamWriter, context: IO[bytes]) -> None:
    """Send it; that it did not arrive is told by the answer, or by there being none."""
    try:
        while block := await asyncio.to_thread(context.read, _BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
    except ConnectionError:
        return
    except OSError:  # it cannot be read, and the engine would wait for the rest
        writer.close()


async def _messages(reader: asyncio.StreamReader, engine: str) -> AsyncGenerator[dict[str, Any], None]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status = int(head.split(" ", 2)[1])
    if "transfer-encoding: chunked" not in head.lower():
        raise EngineError(f"the Docker engine at {engine}: {_reason(await reader.read(_MAX_LINE_BYTES), status)}")
    rest = b""
    async with aclosing(_chunks(reader)) as chunks:
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.strip():
                    yield json.loads(line)
    if status != 200:
        raise EngineError(f"the Docker engine at {engine}: {_reason(rest, status)}")
    if rest.strip():
        yield json.loads(rest)


def _reason(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


async def _chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
