"""Sections of a server's configuration: encryption, and the other servers of its group; and how texts are quoted in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from fluster_bus.access.tls import CA_FILE, SCHEME
from fluster_bus.core.errors import AddressError


def quoted(text: str) -> str:
    """`text` as a string of the server's configuration language."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


SERVER_FILE = "server.pem"  # key and certificate of one server
_GROUP = "fluster"
_ROUTES_ABOVE = 2_000  # the port for clients: 6222 with 4222, as is usual
_MAX_PORT = 65_535
_HANDSHAKE_S = 5


@dataclass(frozen=True)
class Member:
    """One of the servers of a cluster, and where it is reached."""

    name: str
    host: str
    port: int

    @property
    def route(self) -> str:
        """Where the other servers reach it. Raises AddressError."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}://{host}:{self.route_port}"

    @property
    def route_port(self) -> int:
        if self.port + _ROUTES_ABOVE > _MAX_PORT:
            raise AddressError(
                f"the server {self.name} has port {self.port}, and its routes would have {self.port + _ROUTES_ABOVE}: "
                f"choose one below {_MAX_PORT - _ROUTES_ABOVE}"
            )
        return self.port + _ROUTES_ABOVE


def members(servers: Sequence[str]) -> list[Member]:
    """The servers at these URLs, each with a name of its own: that of its host, and its port where several are there."""
    places = [(urlsplit(each).hostname or "", urlsplit(each).port or 0) for each in servers]
    hosts = [host for host, _ in places]
    return [
        Member((host if hosts.count(host) == 1 else f"{host}-{port}").replace(":", "-"), host, port)
        for host, port in dict.fromkeys(places)
    ]


def clients_tls(folder: str) -> str:
    """The lines that have connections of clients encrypted, with the files in `folder` at the server."""
    return f"""\
# Connections are encrypted. `fluster credentials` makes the file, and `fluster credentials certificates --renew` another one before
# it expires; the server reads it at its start, and at `nats-server --signal reload`.
tls {{
  cert_file: {quoted(f"{folder}/{SERVER_FILE}")}
  key_file: {quoted(f"{folder}/{SERVER_FILE}")}
  timeout: {_HANDSHAKE_S}
}}
"""


PLAIN = """\
# Connections are not encrypted, since users address this server by nats://. Keep it on loopback, or on a network that is encrypted
# by other means.
"""


def group(routes: Sequence[str], port: int, folder: str) -> str:
    """The lines that make a server one of a group whose servers are reached at `routes`. Each needs a `server_name` of its own.

    One that has a certificate of the authority is a server of the group, so no user is to have one.
    """
    return "\n".join(
        [
            "cluster {",
            f"  name: {_GROUP}",
            f'  listen: "0.0.0.0:{port}"',
            "  # Addresses of users name all servers, as their certificates do; servers would announce each other by IP address.",
            "  no_advertise: true",
            "  routes: [",
            *(f"    {quoted(each)}" for each in routes),
            "  ]",
            "  # Servers show each other their certificates, in both directions: none else comes in here.",
            "  tls {",
            f"    cert_file: {quoted(f'{folder}/{SERVER_FILE}')}",
            f"    key_file: {quoted(f'{folder}/{SERVER_FILE}')}",
            f"    ca_file: {quoted(f'{folder}/{CA_FILE}')}",
            "    verify: true",
            f"    timeout: {_HANDSHAKE_S}",
            "  }",
            "}",
            "",
        ]
    )
