"""A server that lets users in by password, or by signed token: what they may do is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fluster_bus.access.address import BusAddress
from fluster_bus.core.roles import Role, User
from fluster_bus.server import EmbeddedServer
from fluster_bus.trust.authority import Authority

KINDS = ("passwords", "tokens")
WORKER = "w1"  # the worker that a token is of


class GuardedServer:
    """The server, and one user of each role and namespace."""

    def __init__(
        self, server: EmbeddedServer, authority: Authority | None = None, namespaces: tuple[str, ...] = ()
    ) -> None:
        self._server = server
        self._namespaces = namespaces
        self._authority = authority
        self._known: dict[User, BusAddress] = {}

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._server.port}"

    def credentials(self, role: Role, namespace: str | None = None, *, serves: tuple[str, ...] = ()) -> BusAddress:
        """The same user each time; `serves` are the namespaces of a worker's token."""
        user = User(role, namespace)
        if self._authority is None:
            return self._server.credentials(role, namespace)
        if user not in self._known:
            name = WORKER if role is Role.WORKER else user.name
            serves = serves or (self._namespaces if role is Role.GATEWAY else ())
            made = self._authority.issue(role, name, serves if namespace is None else (namespace,))
            self._known[user] = BusAddress(self.url, token=made.token, seed=made.seed)
        return self._known[user]


@contextmanager
def guarded_server(kind: str, namespaces: tuple[str, ...], folder: Path) -> Iterator[GuardedServer]:
    """One of KINDS."""
    authority = Authority.of_cluster(folder / "authority") if kind == "tokens" else None
    with EmbeddedServer(namespaces=namespaces, authority=authority) as server:
        yield GuardedServer(server, authority, namespaces)


def plain_options(address: BusAddress) -> dict[str, Any]:
    """What a plain client of nats-py hears."""
    if address.token is None:
        return {"user": address.user, "password": address.password}
    token = address.token.encode()
    return {
        "user_jwt_cb": lambda: bytearray(token),
        "signature_cb": lambda nonce: address.proof(nonce)["sig"].encode(),
    }
