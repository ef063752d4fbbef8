"""Several nats-servers as one, of which a test stops, kills and replaces some."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fluster_bus.access.address import BusAddress
from fluster_bus.core.roles import DEFAULT_NAMESPACE, MAX_PAYLOAD_BYTES, Role, User
from fluster_bus.direct.pulse import SERVER_PINGS
from fluster_bus.server_configuration import accounts_configuration
from fluster_bus.server_process import find_binary

SERVERS = 3
PASSWORD = "secret"


class ServerGroup:
    """nats-servers that know each other; all run at first."""

    def __init__(
        self, folder: Path, servers: int = SERVERS, *, store_bytes: int | None = None, server_bytes: int = 64 << 30
    ) -> None:
        self.folder = folder
        self.ports, self._routes = _free_ports(servers), _free_ports(servers)
        self.servers: list[subprocess.Popen[bytes]] = []
        self._store = f", max_file_store: {server_bytes}"  # however large the disk is
        self._accounts = accounts_configuration(
            (DEFAULT_NAMESPACE,), lambda _user: f'"{PASSWORD}"', store_bytes=store_bytes
        )
        for number in range(servers):
            self._configure(number)
            self.servers.append(self._started(number))

    def _configure(self, number: int) -> None:
        known = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        route = f'cluster {{ name: "group", listen: "127.0.0.1:{self._routes[number]}", routes: [{known}] }}\n'
        self._file(number).write_text(
            f'server_name: "s{number}"\nlisten: "127.0.0.1:{self.ports[number]}"\n'
            f"max_payload: {MAX_PAYLOAD_BYTES}\n{SERVER_PINGS}"
            f'jetstream {{ store_dir: "{self._stored(number)}"{self._store} }}\n'
            f"{route if len(self.ports) > 1 else ''}{self._accounts}"
        )

    def _file(self, number: int) -> Path:
        return self.folder / f"server-{number}.conf"

    def _log(self, number: int) -> Path:
        return self.folder / f"server-{number}.log"

    def _stored(self, number: int) -> Path:
        return self.folder / f"store-{number}"

    def _started(self, number: int) -> subprocess.Popen[bytes]:
        with self._log(number).open("ab") as log:
            return subprocess.Popen([find_binary(), "--config", self._file(number)], stderr=log)

    def url(self, number: int) -> str:
        return f"nats://127.0.0.1:{self.ports[number]}"

    def address(self, number: int, role: Role, namespace: str | None = None) -> BusAddress:
        """Of one of them, which names the others."""
        return BusAddress(self.url(number), User(role, namespace).name, PASSWORD)

    def number(self, name: str) -> int:
        """Of the server that has this name at its start."""
        return int(name.removeprefix("s"))

    def kill(self, number: int) -> None:
        self.servers[number].kill()
        self.servers[number].wait()

    def start(self, number: int) -> None:
        """A server that was killed, with the store that it had."""
        self.servers[number] = self._started(number)

    def replace(self, number: int) -> None:
        """Have a server with nothing stored in the place of one that was killed."""
        shutil.rmtree(self._stored(number))
        self.start(number)

    def close(self) -> None:
        for server in self.servers:
            server.send_signal(signal.SIGCONT)
            server.kill()
            server.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def group_of_servers(
    folder: Path, servers: int = SERVERS, *, store_bytes: int | None = None, server_bytes: int = 64 << 30
) -> Iterator[ServerGroup]:
    group = ServerGroup(folder, servers, store_bytes=store_bytes, server_bytes=server_bytes)
    try:
        yield group
    finally:
        group.close()
