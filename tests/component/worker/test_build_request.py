"""What is made of an engine's answer, whole or cut short. That of a real engine is in tests/system/test_environment_images.py."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from fluster_services.worker.engine import EngineError
from fluster_services.worker.environments import build_request
from fluster_services.worker.environments.build_request import build_image

pytestmark = pytest.mark.anyio

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
REFUSED = b'{"message":"no such builder"}\n'
CONTEXT = bytes(3 << 20)  # more than one block


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


def said(*texts: str) -> bytes:
    return b"".join(json.dumps({"stream": text}).encode() + b"\r\n" for text in texts)


class Engine:
    """Answers with these bytes, if any, when it has read the whole request, or at once; goes when its client has gone."""

    def __init__(self, folder: Path, parts: Sequence[bytes], *, listens: bool) -> None:
        self.url = f"unix://{folder}/engine.sock"
        self.request = b""
        self.asked, self.over = asyncio.Event(), asyncio.Event()
        self._parts = parts
        self._listens = listens

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = await reader.readuntil(b"\r\n\r\n")
        if self._listens:
            self.request += await reader.readexactly(len(CONTEXT))
        self.asked.set()
        for part in self._parts:
            writer.write(part)
            await writer.drain()
        if self._parts:
            writer.write_eof()
        # To close before all was read would be to take back what was said.
        with suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.over.set()


@asynccontextmanager
async def engine(folder: Path, *parts: bytes, listens: bool = True) -> AsyncIterator[Engine]:
    running = Engine(folder, parts, listens=listens)
    async with await asyncio.start_unix_server(running.on_connection, running.url.removeprefix("unix://")):
        yield running
        async with asyncio.timeout(60):
            await running.over.wait()


async def heard(url: str) -> str:
    with tempfile.TemporaryFile() as context:
        context.write(CONTEXT)
        context.seek(0)
        return "".join([piece async for piece in build_image(url, "1.44", context, {"t": "a b"})])


async def test_what_it_says_is_heard_however_it_is_cut(tmp_path: Path) -> None:
    lines = said("Step 1/2", " ---> über\n") + b'{"aux":{"ID":"sha256:0"}}\r\n\r\n' + said("done")[:-2]
    answer = HEAD + chunked(*(lines[place : place + 7] for place in range(0, len(lines), 7))) + END
    async with engine(tmp_path, *(answer[place : place + 3] for place in range(0, len(answer), 3))) as running:
        assert await heard(running.url) == "Step 1/2 ---> über\ndone"
    assert running.request.startswith(b"POST /v1.44/build?t=a+b HTTP/1.1\r\n")
    assert running.request.endswith(b"\r\n\r\n" + CONTEXT)


@pytest.mark.parametrize("listens", [True, False], ids=["after the context", "before it was sent"])
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (HEAD + chunked(said("a"), b'{"error":"no space left"}\n') + END, "no space left"),
        (b"HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n%s" % (len(REFUSED), REFUSED), "no such builder"),
        (b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(REFUSED) + END, "no such builder"),
        (b"HTTP/1.1 502 No\r\nConnection: close\r\n\r\n<html>", "status 502"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + said("a"), "status 200"),  # whose end could be any
        (HEAD + chunked(b"x" * (3 << 20)), r"said what is not a message: .* is longer than 1,048,576 bytes"),
        (HEAD + chunked(said("a")), "went away"),
        (HEAD + chunked(b"x" * 99)[:50], "went away"),
        (HEAD + b"what?\r\n", "went away"),
        (HEAD + chunked(b"what?\n") + END, r"said what is not a message: the line b'what\?' is not a JSON object"),
        (HEAD[:20], "went away"),
        (b"SSH-2.0-OpenSSH\r\n", "went away"),
    ],
)
async def test_that_there_is_no_image_is_told(tmp_path: Path, listens: bool, answer: bytes, told: str) -> None:
    async with engine(tmp_path, answer, listens=listens) as running:
        with pytest.raises(EngineError, match=f"the Docker engine at {running.url}:? {told}"):
            await heard(running.url)


async def test_an_engine_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"none\.sock cannot be reached: No such file or directory"):
        await heard(f"unix://{tmp_path}/none.sock")


async def test_whoever_leaves_hangs_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_request, "_GIVE_UP_S", 0.01)
    async with engine(tmp_path) as running:
        listening = asyncio.create_task(heard(running.url))
        async with asyncio.timeout(60):
            await running.asked.wait()
            listening.cancel()
            await running.over.wait()
            with pytest.raises(asyncio.CancelledError):
                await listening


async def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h11", None)
    with pytest.raises(EngineError, match=r"pip install 'fluster\[docker\]'"):
        async for _ in build_image("unix:///nowhere", "1.44", io.BytesIO(), {}):
            pass
