"""One blocking connection to one nats-server, from its handshake to its loss; and to which of its servers a connection is made."""

from __future__ import annotations

import random
import select
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from fluster_bus.access.address import BusAddress
from fluster_bus.access.tls import HandshakeError, check_offer, client_context, handshake_error, is_address
from fluster_bus.core.errors import AddressError, BusError, ConnectError, CredentialsError, UntrustedServerError
from fluster_bus.core.json_types import JsonObject
from fluster_bus.direct import wire
from fluster_bus.direct.waiting import Eagerness, Waker
from fluster_bus.direct.wire import Info, NumberedDelivery, Parser, Pong, ProtocolError, Refusal, Said
from fluster_bus.running.backoff import Backoff

S = TypeVar("S", Info, Pong)

_READ_BYTES = 64 << 10  # more at once would be memory mapped and given back for each read
_MAX_UNSENT_BYTES = 16 << 20
_STALLED_S = 10.0  # a server that takes nothing for so long is none


class RefusedError(Exception):
    """The server does not take these credentials."""


class _Stream(Protocol):
    """A socket that never blocks, for one thread that reads and another that writes."""

    def read(self) -> bytes | None:
        """What has arrived; None when there is nothing, `b""` at the end."""

    def write(self, data: bytes | memoryview) -> int:
        """How many bytes were taken, 0 when there is no room."""

    def has_read_ahead(self) -> bool:
        """True when there is something to read that the system no longer reports."""


class _Plain:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def read(self) -> bytes | None:
        try:
            return self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return None

    def write(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0

    def has_read_ahead(self) -> bool:
        return False


class _Tls:
    """OpenSSL's state of a connection is one for both directions, and bears one thread at a time."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def read(self) -> bytes | None:
        with self._lock:
            try:
                return self._sock.recv(_READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None

    def write(self, data: bytes | memoryview) -> int:
        with self._lock:
            try:
                return self._sock.send(data)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return 0

    def has_read_ahead(self) -> bool:
        with self._lock:
            return self._sock.pending() > 0


class Line:
    """Make one with `Line.dial`. One thread reads at a time; any thread may write.

    Its socket is closed when the last thread has let go of it: before that its number could be another's.
    """

    def __init__(self, sock: socket.socket, info: JsonObject) -> None:
        self._sock = sock
        self._stream: _Stream = _Tls(sock) if isinstance(sock, ssl.SSLSocket) else _Plain(sock)
        self._parser = Parser(wire.message)
        self._descriptor = sock.fileno()
        self._reads_ahead = isinstance(sock, ssl.SSLSocket)
        self.info: JsonObject = {}  # what the server said about itself
        self.max_payload = 0  # of a message, in bytes
        self.learn(info)
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._lock = threading.Lock()  # over what is unsent
        self._writing = threading.Lock()  # held by the thread that writes
        self._to_read, self._to_write = select.poll(), select.poll()
        self._to_read_beside: dict[Waker, select.poll] = {}  # {another: for both}
        self._to_read.register(sock, select.POLLIN)
        self._to_write.register(sock, select.POLLOUT)
        # By a finalizer: where this goes as a part of a cycle, `__del__` could come after the socket's own, which complains.
        weakref.finalize(self, sock.close).atexit = False

    # ---- handshake --------------------------------------------------------------------------------------

    @classmethod
    def dial(
        cls, server: str, address: BusAddress, name: str, *, timeout_s: float, tls_name: str | None = None
    ) -> Self:
        """A connection to `server`, one of the servers of `address`, whose certificate is for `tls_name` if it is not for its host.

        Raises OSError (HandshakeError when it cannot be trusted), ProtocolError, and RefusedError when it does not take the credentials.
        """
        parts = urlsplit(server)
        deadline = time.monotonic() + timeout_s
        host: Any = (parts.hostname or "").encode()  # of a str it would import what tells about all of Unicode: 0.6 MiB
        sock = socket.create_connection((host, parts.port or 0), timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            parser = Parser(wire.message)
            info = _expect(sock, parser, deadline, Info)
            if check_offer(server, info.values):
                sock.settimeout(max(deadline - time.monotonic(), 0.01))
                sock = client_context(address.ca).wrap_socket(sock, server_hostname=tls_name or parts.hostname)
            options = {"verbose": False, "pedantic": False, "protocol": 1, "headers": True, "no_responders": True}
            sock.sendall(
                wire.connect(
                    **options, **address.proof(info.values.get("nonce")), name=name, lang="python-fluster", version="1"
                )
                + wire.PING
            )
            _expect(sock, parser, deadline, Pong)
            sock.setblocking(False)
            return cls(sock, info.values)
        except ssl.SSLError as error:
            sock.close()
            raise handshake_error(server, error) from error
        except BaseException:
            sock.close()
            raise

    def learn(self, info: JsonObject) -> None:
        """The server has said something about itself."""
        self.info = {**self.info, **info}
        self.max_payload = int(self.info.get("max_payload", 1 << 20))

    # ---- reading ----------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> bool:
        """True when there is something to read, its end included."""
        return self._stream.has_read_ahead() or bool(self._to_read.poll(_milliseconds(timeout_s)))

    def wait_beside(self, waker: Waker, timeout_s: float | None, eagerness: Eagerness | None = None) -> bool:
        """As `wait`; returns as well when `waker` wakes. It sleeps as late as `eagerness` wants."""
        if self._reads_ahead and self._stream.has_read_ahead():
            return True
        both = self._to_read_beside.get(waker)
        if both is None:
            both = self._to_read_beside[waker] = select.poll()
            both.register(self._sock, select.POLLIN)
            both.register(waker.fileno(), select.POLLIN)
        readable = False
        found = eagerness.look(lambda: both.poll(0)) if eagerness is not None else []
        for descriptor, _events in found or both.poll(None if timeout_s is None else _milliseconds(timeout_s)):
            if descriptor == self._descriptor:
                readable = True
            else:
                waker.on_readable()
        return readable

    def has_arrived(self) -> bool:
        """Whether there is something to read. For any thread, also while another one waits."""
        poll = select.poll()  # one of its own: two threads may not wait by the same
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def read(self) -> list[Said]:
        """What has arrived and is complete. Raises OSError at the end of the connection, ProtocolError."""
        data = self._stream.read()
        if data is None:
            return []
        if not data:
            raise ConnectionResetError("the server closed the connection")
        return self._parser.feed(data)

    # ---- writing ----------------------------------------------------------------------------------------

    def add(self, data: bytes) -> None:
        """Have `data` sent by the next `flush`, after all that was added before."""
        with self._lock:
            self._unsent.append(data)
            self._unsent_bytes += len(data)

    def flush(self, *, wait: bool = True) -> None:
        """Send what was added. When another thread is sending, it sends this too, and this call does not wait for it, unless
        there is too much and `wait` allows it. Raises OSError.
        """
        while self._unsent:
            if not self._writing.acquire(blocking=wait and self._unsent_bytes > _MAX_UNSENT_BYTES):
                return  # the thread that holds it looks again after giving it back
            try:
                while self._unsent:
                    with self._lock:
                        data = b"".join(self._unsent)  # of one piece, that piece itself
                        self._unsent.clear()
                    size = len(data)
                    if (sent := self._stream.write(data)) < size:
                        self._write_rest(memoryview(data)[sent:])
                    with self._lock:
                        self._unsent_bytes -= size
            finally:
                self._writing.release()

    def _write_rest(self, data: memoryview) -> None:
        while data:
            if not self._to_write.poll(_STALLED_S * 1000):
                raise TimeoutError(f"the server has taken nothing for {_STALLED_S:g} s")
            data = data[self._stream.write(data) :]

    def shut(self) -> None:
        """End it, and wake the threads that wait in it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was first
            return


def _expect(sock: socket.socket, parser: Parser[NumberedDelivery], deadline: float, wanted: type[S]) -> S:
    while True:
        sock.settimeout(max(deadline - time.monotonic(), 0.01))
        data = sock.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the server closed the connection before it had answered")
        for said in parser.feed(data):
            if isinstance(said, wanted):
                return said
            if isinstance(said, Refusal):
                raise (RefusedError if "authorization" in said.text.lower() else ProtocolError)(said.text)


def _milliseconds(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else max(timeout_s, 0.0) * 1000


_random = random.Random()  # not the one that programs seed: connections are made in threads of their own

_TIMEOUT_S = 2.0  # for each server
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class Dialler:
    """Of one connection, which is known to its servers by `name`. They announce others that are in their cluster."""

    def __init__(self, address: BusAddress, name: str) -> None:
        self._address = address
        self._name = name
        self._servers = list(address.servers)
        self._tls_names: dict[
            str, str | None
        ] = {}  # {server: whose certificate it shows, if only its address was announced}
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def attempts(self) -> Iterator[Line | BusError]:
        """Try one server after the other, in an order of chance: the line, with which it ends, or why there is none."""
        for server in _random.sample(self._servers, len(self._servers)):
            try:
                line = self._dial(server)
            except RefusedError as error:
                yield CredentialsError(f"{self._address} refused the credentials: {error}")
            except HandshakeError as error:
                yield UntrustedServerError(str(error))
            except AddressError as error:  # its certificates are damaged
                yield error
            except (OSError, ProtocolError) as error:
                yield ConnectError(f"no nats-server answers at {server}: {str(error) or type(error).__name__}")
            else:
                self._backoff.reset()
                self._learn(line, server)
                yield line
                return

    def _dial(self, server: str) -> Line:
        believed, refused = self._address.refusals_believed, 0
        while True:
            try:
                return Line.dial(
                    server, self._address, self._name, timeout_s=_TIMEOUT_S, tls_name=self._tls_names.get(server)
                )
            except RefusedError:
                refused += 1
                if refused >= believed:
                    raise

    def _learn(self, line: Line, server: str) -> None:
        scheme = self._servers[0].partition("://")[0]
        others = [f"{scheme}://{each}" for each in line.info.get("connect_urls", ())]
        name = self._tls_names.get(server) or urlsplit(server).hostname
        # Servers announce each other by addresses, and certificates are for names: one of the group shows that of the group.
        self._tls_names = {each: name for each in others if is_address(urlsplit(each).hostname or "")}
        self._servers = list(dict.fromkeys([*self._address.servers, *others]))

    def next_pause_s(self) -> float:
        """How long to rest before the next attempts: about twice as long each time, until there is a line."""
        pause_s = self._backoff.pause_s
        self._backoff.lengthen()
        return pause_s * _random.uniform(0.75, 1.25)
