"""The request that has an engine build an image (https://docs.docker.com/reference/api/engine/, ImageBuild).

On a connection of its own, rather than by the SDK, whose calls cannot be ended from outside: an engine gives a build up when it
finds the connection closed on which it was requested.

What it is sent is a tar with the Dockerfile and the files that it speaks of.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import tarfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlencode

from fluster.json_lines import BadLineError, JsonLines, checked
from fluster_bus.core.json_types import JsonObject
from fluster_services.worker.engine import EngineAwayError, EngineError
from fluster_services.worker.environments.image_install import REQUIREMENTS
from fluster_services.worker.environments.image_recipe import INSTALLER, ImageRecipe

if TYPE_CHECKING:
    import h11

_BLOCK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20  # of what an engine says, and of why it refuses
_GIVE_UP_S = 5.0
_PROJECT_FILES = ("pyproject.toml", "uv.lock")


async def build_image(
    engine: str, api_version: str, context: IO[bytes], parameters: Mapping[str, str]
) -> AsyncGenerator[str, None]:
    """Have `engine` build from `context`; what it says comes in pieces. Raises EngineError when that yields no image.

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
    """Return when the engine has stopped, if it had not: it sees the connection closed for reading, and can still say that it is done."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_GIVE_UP_S):
            writer.write_eof()
            while await reader.read(_BLOCK_BYTES):
                pass


async def _send(http: h11.Connection, writer: asyncio.StreamWriter, context: IO[bytes]) -> None:
    """Send it; that it did not arrive is shown by the answer, or by there being none."""
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
) -> AsyncGenerator[dict[str, object], None]:
    """What it says, line by line, until it has said all."""
    from h11 import Data, Response

    lines = JsonLines(_MAX_LINE_BYTES)
    refusal: int | None = None  # its status
    reason = b""
    async with aclosing(_events(http, reader)) as events:
        async for event in events:
            if isinstance(event, Response):
                # One that builds cannot know how long it will talk; a body up to the end of the connection has no end to be seen.
                if event.status_code != 200 or (b"transfer-encoding", b"chunked") not in event.headers:
                    refusal = event.status_code
            elif isinstance(event, Data):
                if refusal is not None:
                    reason += event.data[: _MAX_LINE_BYTES - len(reason)]
                    continue
                for message in lines.feed(event.data):
                    yield _checked(message, engine)
    if refusal is not None:
        raise EngineError(f"the Docker engine at {engine}: {_reason(reason, refusal)}")
    for message in lines.feed(b"\n"):  # the last line may lack it
        yield _checked(message, engine)


def _checked(message: JsonObject | BadLineError, engine: str) -> JsonObject:
    try:
        return checked(message)
    except BadLineError as cause:
        raise EngineError(f"the Docker engine at {engine} said what is not a message: {cause}") from cause


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


def write_context(
    file: IO[bytes],
    recipe: ImageRecipe,
    dockerfile: str,
    *,
    workspace: Path | None,
    variables: Mapping[str, str],
    authorities: str | None,
    uv: Path | None,
) -> None:
    """Write the tar into `file`, which is at its start then. Raises OSError.

    `authorities` is the text of certificates, which pip is to trust; `uv` is the program that installs what a lock names.
    """
    needs = recipe.needs
    with tarfile.open(fileobj=file, mode="w") as archive:
        _add(archive, "Dockerfile", dockerfile)
        for folder in ("environment", "build", "build/workspace"):
            _add_folder(archive, folder)
        _add(archive, "build/image_install.py", INSTALLER)
        _add(archive, "build/recipe.json", json.dumps(recipe.installation()))
        _add(archive, "build/settings.json", json.dumps(dict(variables)))
        if authorities is not None:
            _add(archive, "build/ca.pem", authorities)
        if workspace is not None and needs.workspace is not None:
            archive.add(workspace, "build/workspace", filter=_plain)
        elif workspace is not None and needs.lock is not None:
            for name in _PROJECT_FILES:
                archive.add(workspace / name, f"build/workspace/{name}", filter=_plain)
        if needs.requirements:
            _add(archive, f"build/workspace/{REQUIREMENTS}", needs.requirements + "\n")
        if uv is not None and needs.lock is not None:
            archive.add(uv.resolve(), "build/uv", filter=_plain)
    file.seek(0)


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    archive.addfile(entry, io.BytesIO(data))


def _add_folder(archive: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(entry)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """As it is for everybody: whose it is here, and since when, is nothing to an image."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    is_executable = entry.isdir() or entry.mode & stat.S_IXUSR
    entry.mode = 0o755 if is_executable else 0o644
    return entry
