"""The registry of a test: endpoints in memory, with the watches that pools live by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Generic, TypeVar, cast

from fluster.testing.memory_bus import matches
from fluster_bus.core import subjects
from fluster_bus.core.errors import RevisionConflictError
from fluster_bus.messages import ActorSeat, Endpoint, Message
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.registry import LEASE_S, Registry
from fluster_bus.storage.tables import Deleted, Row, Table

Record = TypeVar("Record", bound=Message)


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
