"""What moves messages for actors: the part of a connection that they need, which tests can have without a server. And how what
failed on a connection is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol, TypeVar

from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BusError

T = TypeVar("T")

RETRY_PAUSE_S = 0.2


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


async def wait_to_retry(bus: Carrier, pause_s: float = RETRY_PAUSE_S) -> None:
    """Return when `bus` is connected and `pause_s` seconds have passed. Raises ClosedError.

    The pause is there since a server's streams answer a moment later than its connections.
    """
    await bus.wait_connected()
    await asyncio.sleep(pause_s)


async def retried_when_connected(
    bus: Carrier,
    attempt: Callable[[], Awaitable[T]],
    *,
    on_error: Callable[[BusError], Awaitable[None] | None],
    unless: type[BusError] | tuple[type[BusError], ...] = (),
    pause_s: float = RETRY_PAUSE_S,
) -> T:
    """Return what `attempt()` returns, tried again after each BusError, however long that takes; `wait_to_retry` between two attempts.

    `on_error` is called with each of these errors; what it raises ends the attempts. Raises the errors of `unless` at
    once, what `attempt` raises beside BusError, and ClosedError.
    """
    while True:
        try:
            return await attempt()
        except unless:
            raise
        except BusError as error:
            answer = on_error(error)
        if answer is not None:
            await answer
        await wait_to_retry(bus, pause_s)
