"""A bus without a server: what is published here is heard here. It keeps what Bus promises of its Carrier half."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fluster_bus.access.address import BusAddress
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import ClosedError, NoRespondersError, RequestTimeoutError, service_error
from fluster_bus.core.names import SYSTEM_NAMESPACE
from fluster_bus.running.coroutines import SpawnedTasks

log = logging.getLogger(__name__)

_NO_RESPONDERS = {"Status": "503"}
_NAME = "the bus in memory"
_USER = "tester"


class MemoryBus:
    """Make it on the event loop that it shall live on."""

    address = BusAddress("nats://memory")  # tells this bus from others; nothing connects to it

    def __init__(self) -> None:
        self._interests: list[MemoryInterest] = []
        self._spawned = SpawnedTasks(_NAME)
        self._closed = False

    async def close(self) -> None:
        """Handle what was published, then end what was spawned."""
        if self._closed:
            return
        for interest in list(self._interests):
            await interest.drain()
        self._closed = True
        await self._spawned.close()

    @property
    def connected(self) -> bool:
        return not self._closed

    @property
    def max_payload(self) -> int:
        return sys.maxsize  # there is no object store for what would be too large

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        self._check_open()
        groups: dict[str, list[MemoryInterest]] = {}
        for interest in self._interests:
            if matches(interest.subject, subject):
                groups.setdefault(interest.queue or f"alone {id(interest)}", []).append(interest)
        for group in groups.values():
            random.choice(group).hear(Delivery(subject, bytes(data), reply, dict(headers) if headers else None))
        if reply and not groups:
            await self.publish(reply, headers=_NO_RESPONDERS)

    async def request(self, subject: str, data: bytes = b"", *, timeout_s: float = 5.0) -> Delivery:
        inbox, answers = self.inbox(), asyncio.Queue[Delivery]()
        interest = await self.subscribe(inbox, answers.put)
        try:
            await self.publish(subject, data, reply=inbox)
            async with asyncio.timeout(timeout_s):
                answer = await answers.get()
        except TimeoutError as error:
            raise RequestTimeoutError(f"no answer on {subject} came within {timeout_s:g} s") from error
        finally:
            await interest.unsubscribe()
        if answer.status is not None:
            raise NoRespondersError(f"no program listens on {subject}")
        if answer.error is not None:
            raise service_error(*answer.error)
        return answer

    async def subscribe(
        self, subject: str, callback: Callable[[Delivery], Awaitable[None] | None], *, queue: str = ""
    ) -> MemoryInterest:
        self._check_open()
        interest = MemoryInterest(self._interests, subject, queue, callback)
        self._interests.append(interest)
        return interest

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{_NAME} is closed")

    async def flush(self) -> None:
        """Return when everything that was sent has been heard: a message to oneself comes after all before it."""
        came_back = asyncio.Event()
        token = self.inbox()
        interest = await self.subscribe(token, lambda _delivery: came_back.set())
        await self.publish(token)
        await came_back.wait()
        await interest.unsubscribe()

    async def wait_connected(self, timeout_s: float | None = None) -> None:  # noqa: ARG002
        self._check_open()

    def inbox(self, namespace: str | None = None) -> str:
        return f"{subjects.inbox_prefix(_USER, namespace or SYSTEM_NAMESPACE)}.{secrets.token_urlsafe(16)}"

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Nothing to do: there is no connection that could be lost."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """The same."""

    def off(self, callback: Callable[[], None]) -> None:
        """The same."""

    def spawn(self, task: Coroutine[Any, Any, None], name: str) -> None:
        self._spawned.spawn(task, name)


class MemoryInterest:
    """Interest in a subject; its callback is given one message after the other."""

    def __init__(
        self,
        interests: list[MemoryInterest],
        subject: str,
        queue: str,
        callback: Callable[[Delivery], Awaitable[None] | None],
    ) -> None:
        self.subject = subject
        self.queue = queue
        self._interests = interests
        self._callback = callback
        self._heard: asyncio.Queue[Delivery] = asyncio.Queue()
        self._handing_on = asyncio.create_task(self._hand_on(), name=f"messages of {subject}")

    def hear(self, delivery: Delivery) -> None:
        self._heard.put_nowait(delivery)

    async def _hand_on(self) -> None:
        while True:
            delivery = await self._heard.get()
            try:
                result = self._callback(delivery)
                if result is not None:
                    await result
            except Exception:
                log.exception("%s: what hears %s failed", _NAME, self.subject)
            finally:
                self._heard.task_done()

    async def drain(self) -> None:
        self._leave()
        await self._heard.join()
        self._handing_on.cancel()

    async def unsubscribe(self) -> None:
        self._leave()
        self._handing_on.cancel()

    def _leave(self) -> None:
        if self in self._interests:
            self._interests.remove(self)


def matches(pattern: str, subject: str) -> bool:
    """True when who listens to `pattern` hears `subject`: `*` is any token, a last `>` is one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == subjects.ANY_TAIL:
        wanted = wanted[:-1]
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(
        token in (subjects.ANY_TOKEN, other) for token, other in zip(wanted, given, strict=True)
    )
