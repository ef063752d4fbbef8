"""What moves messages for actors: the part of a connection that they need, which tests can have without a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol

from fluster_bus.core.delivery import Delivery


class Interest(Protocol):
    """Interest in a subject, until it is drained or dropped."""

    async def drain(self) -> None: ...

    async def unsubscribe(self) -> None: ...


class Carrier(Protocol):
    """Publishes, subscribes, and tells when the connection is lost and back. Bus is one; its methods tell the rest."""

    @property
    def connected(self) -> bool: ...

    @property
    def max_payload(self) -> int: ...

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None: ...

    async def request(self, subject: str, data: bytes = b"", *, timeout_s: float = ...) -> Delivery: ...

    async def subscribe(
        self, subject: str, callback: Callable[[Delivery], Awaitable[None] | None], *, queue: str = ""
    ) -> Interest: ...

    async def flush(self) -> None: ...

    async def wait_connected(self, timeout_s: float | None = None) -> None: ...

    def inbox(self, namespace: str | None = None) -> str: ...

    def on_disconnect(self, callback: Callable[[], None]) -> None: ...

    def on_reconnect(self, callback: Callable[[], None]) -> None: ...

    def off(self, callback: Callable[[], None]) -> None: ...

    def spawn(self, task: Coroutine[object, None, None], name: str) -> None: ...
