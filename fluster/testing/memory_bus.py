"""A bus and a registry without a server: what is published here is heard here, and endpoints are in memory.

The bus keeps what Bus promises of its Carrier half, the registry has the watches that pools live by.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Generic, TypeVar, cast

from fluster_bus.access.address import BusAddress
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import (
    ClosedError,
    NoRespondersError,
    RequestTimeoutError,
    RevisionConflictError,
    service_error,
)
from fluster_bus.core.names import SYSTEM_NAMESPACE
from fluster_bus.messages import ActorSeat, Endpoint, Message
from fluster_bus.running.coroutines import SpawnedTasks
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.registry import LEASE_S, Registry
from fluster_bus.storage.tables import Deleted, Row, Table

Record = TypeVar("Record", bound=Message)

log = logging.getLogger(__name__)

_NO_RESPONDERS = {"Status": "503"}
_NAME = "the bus in memory"
_USER = "tester"


class MemoryBus:
    """Make it on the event loop that it is to live on."""

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

    def spawn(self, task: Coroutine[object, None, None], name: str) -> None:
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


# ---- the registry ----------------------------------------------------------------------------------------


class MemoryTable(Generic[Record]):
    """What registries, pools and seats need of a Table."""

    def __init__(self) -> None:
        self._rows: dict[str, Row[Record]] = {}
        # {what it has not read yet: the keys that it watches}
        self._watches: dict[asyncio.Queue[Row[Record] | Deleted], str] = {}
        self._revision = 0

    async def get(self, key: str) -> Row[Record] | None:
        return self._rows.get(key)

    async def update(self, key: str, value: Record, revision: int) -> int:
        row = self._rows.get(key)
        if revision != (row.revision if row is not None else 0):
            raise RevisionConflictError(f"{key!r} was changed by another writer")
        return await self.put(key, value)

    async def put(self, key: str, value: Record) -> int:
        self._rows.pop(key, None)  # a row stands where it was last written
        self._rows[key] = row = Row(key, value, self._next_revision())
        self._tell(row)
        return row.revision

    async def delete(self, key: str) -> None:
        if self._rows.pop(key, None) is not None:
            self._tell(Deleted(key, self._next_revision()))

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def _tell(self, change: Row[Record] | Deleted) -> None:
        for unread, keys in self._watches.items():
            if matches(keys, change.key):
                unread.put_nowait(change)

    async def rows(self, keys: str = subjects.ANY_TAIL) -> list[Row[Record]]:
        return [row for row in self._rows.values() if matches(keys, row.key)]

    async def each(self, keys: str = subjects.ANY_TAIL) -> AsyncGenerator[Row[Record]]:
        for row in await self.rows(keys):
            yield row

    async def watch(
        self, keys: str = subjects.ANY_TAIL, *, passed: Callable[[int], None] | None = None
    ) -> AsyncGenerator[Row[Record] | Deleted | CaughtUp]:
        del passed  # every record can be read
        unread: asyncio.Queue[Row[Record] | Deleted] = asyncio.Queue()
        self._watches[unread] = keys
        try:
            for row in await self.rows(keys):
                yield row
            yield CaughtUp()
            while True:
                yield await unread.get()
        finally:
            del self._watches[unread]


class MemoryRegistry(Registry):
    """The endpoints of a test's namespace."""

    told_seat_lease_s = LEASE_S

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self.table = cast("Table[Endpoint]", MemoryTable[Endpoint]())
        self.seats = cast("Table[ActorSeat]", MemoryTable[ActorSeat]())
