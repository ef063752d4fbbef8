"""The bytes of nats-py's connections, at a server that keeps them open."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlparse

import pytest
import trustme

from fluster_bus.connection.tcp_stream import TcpStream

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def _connected(authority: trustme.CA | None = None) -> AsyncIterator[TcpStream]:
    context = None
    if authority is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(context)
    leave = asyncio.Event()

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await leave.wait()
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    stream = TcpStream()
    async with server:
        try:
            await stream.connect(urlparse(f"nats://127.0.0.1:{port}"), 1024, 10)
            if authority is not None:
                trusting = ssl.create_default_context()
                authority.configure_trust(trusting)
                await stream.connect_tls("127.0.0.1", trusting, 1024, 10)
            yield stream
        finally:
            stream.abort()
            leave.set()


async def test_who_stops_to_wait_for_the_end_leaves_the_others_waiting() -> None:
    async with _connected() as stream:
        impatient, patient = (asyncio.create_task(stream.wait_closed()) for _ in range(2))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait({impatient})
        assert not patient.done()
        stream.abort()
        await asyncio.wait_for(patient, 10)
        await stream.wait_closed()


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_stream_that_was_closed_twice_can_be_aborted(*, encrypted: bool) -> None:
    async with _connected(trustme.CA() if encrypted else None) as stream:
        stream.close()
        stream.close()
        stream.abort()
        await asyncio.wait_for(stream.wait_closed(), 10)
        stream.abort()


async def test_what_is_written_to_a_lost_connection_is_an_error_of_the_connection() -> None:
    async with _connected() as stream:
        stream.writelines([b"first"])
        stream.abort()
        await stream.wait_closed()
        with pytest.raises(ConnectionResetError, match="is lost"):
            stream.write(b"second")
        with pytest.raises(ConnectionResetError, match="is lost"):
            stream.writelines([b"second"])


async def test_what_a_client_that_leaves_can_no_longer_send_is_dropped() -> None:
    async with _connected() as stream:
        stream.abort()
        stream.leaving = True
        stream.writelines([b"last"])
        await stream.drain()
        await stream.wait_closed()
        await stream.drain()
