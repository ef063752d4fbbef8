"""A way to a server that can break as cables do: nothing is closed, and nothing arrives any more."""

import contextlib
import socket
import threading
from collections.abc import Iterator

_READ_BYTES = 1 << 16


class Cable:
    """Listens on `port` of this machine and carries each connection to the server's. Use `laid`."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._broken = threading.Event()  # of the connections that there are
        self._sockets: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """What is connected hears nothing more and is not told; new connections work."""
        self._broken.set()
        self._broken = threading.Event()

    def close(self) -> None:
        self._broken.set()
        self._end(self._listener)
        self._accepting.join()  # it may be about to carry one more connection
        for each in self._sockets:
            self._end(each)
        for pump in self._pumps:
            pump.join()

    @staticmethod
    def _end(each: socket.socket) -> None:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:  # the server is away; as a client without a cable would see
                    client.close()
                    continue
                self._sockets.append(server)
                for one, other in ((client, server), (server, client)):
                    pump = threading.Thread(target=self._pump, args=(one, other, self._broken))
                    self._pumps.append(pump)
                    pump.start()

    @staticmethod
    def _pump(one: socket.socket, other: socket.socket, broken: threading.Event) -> None:
        with contextlib.suppress(OSError):  # one end was reset: the other sees it
            while data := one.recv(_READ_BYTES):
                if broken.is_set():
                    return
                other.sendall(data)
        if not broken.is_set():
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def laid(server_port: int) -> Iterator[Cable]:
    cable = Cable(server_port)
    try:
        yield cable
    finally:
        cable.close()
