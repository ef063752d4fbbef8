"""The bytes of nats-py's connections: it is noted when some arrive, and a dead connection is let go at once."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any
from urllib.parse import ParseResult

from nats.aio.transport import Transport

_ROOM = 64 << 10  # bytes: with more of them unsent asyncio, too, has its writers wait


class TcpStream(Transport):
    """As nats-py's TcpTransport. That one waits, when it closes, until what is unsent is sent: for a quarter of an hour
    when the cable is broken.
    """

    def __init__(self) -> None:
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard = False
        self.leaving = False
        """Whether the client closes: what can no longer be sent is then dropped without an error."""

    # ---- life ---------------------------------------------------------------------------------------------

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: Any) -> None:
        """Raises OSError, TimeoutError."""
        self.abort()  # nats-py tries again without a word where a server took the connection and did not greet
        self.leaving = False
        async with asyncio.timeout(connect_timeout):
            self._reader, self._writer = await asyncio.open_connection(uri.hostname, uri.port, limit=buffer_size)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: Any
    ) -> None:
        """Raises OSError, TimeoutError."""
        del buffer_size  # it is that of `connect`
        async with asyncio.timeout(connect_timeout):
            await self._open().start_tls(ssl_context, server_hostname=uri if isinstance(uri, str) else uri.hostname)

    def certificate_end(self) -> float | None:
        """When the certificate ends that the server has shown, as Unix time; None for a connection that is not encrypted."""
        shown = self._writer.get_extra_info("peercert") if self._writer is not None else None
        return ssl.cert_time_to_seconds(shown["notAfter"]) if shown else None

    def _open(self) -> asyncio.StreamWriter:
        if self._writer is None:
            raise ConnectionError("there is no connection to a server")
        return self._writer

    def abort(self) -> None:
        """End the connection at once; what waits in it sees that it is lost."""
        if self._writer is not None:
            self._writer.transport.abort()

    def close(self) -> None:
        """Also more than once: nats-py does, after which an encrypted stream of Python 3.11.2 could not be aborted."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.close()

    async def wait_closed(self) -> None:
        """Returns in each task that waits: asyncio has one future for them all, which the first to be cancelled would
        cancel for the others.
        """
        if self._writer is not None:
            await asyncio.shield(self._writer.wait_closed())

    def __bool__(self) -> bool:
        """True: else nats-py would take a transport of its own instead, before this one is connected."""
        return True

    # ---- bytes --------------------------------------------------------------------------------------------

    def take_heard(self) -> bool:
        """Whether anything arrived since this was last asked."""
        heard, self._heard = self._heard, False
        return heard

    async def read(self, buffer_size: int) -> bytes:
        if self._reader is None:
            return b""
        data = await self._reader.read(buffer_size)
        self._heard = True
        return data

    async def readline(self) -> bytes:
        if self._reader is None:
            return b""
        line = await self._reader.readline()
        self._heard = True
        return line

    def at_eof(self) -> bool:
        return self._reader is None or self._reader.at_eof()

    def write(self, payload: bytes) -> None:
        """Raises OSError where the connection is lost: so does `writelines`."""
        self._writable().write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        if not (self.leaving and self._open().is_closing()):
            self._writable().writelines(payload)

    def write_if_room(self, payload: list[bytes], size: int) -> bool:
        """Write what has `size` bytes in all, if the connection stands and little waits to be sent; whether it was written."""
        if self._writer is None:
            return False
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size() >= _ROOM:
            return False
        if size < _ROOM:
            transport.write(b"".join(payload))  # in half the steps, and the copy is short
        else:
            transport.writelines(payload)
        return True

    def _writable(self) -> asyncio.StreamWriter:
        writer = self._open()
        if writer.is_closing():  # asyncio would drop it, or raise a TypeError or AttributeError out of its own parts
            raise ConnectionResetError("the connection to the server is lost")
        return writer

    async def drain(self) -> None:
        try:
            await self._open().drain()
        except OSError:
            if not self.leaving:
                raise
