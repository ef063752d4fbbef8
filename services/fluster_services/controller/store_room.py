"""Room in the store: how it is divided among the namespaces, and how much of it each has for records of jobs.

What is submitted is refused before all of it is used, so that the jobs which are recorded can go on and end: their records grow
by that. Before that the longest finished go earlier than their time, so that what is refused is refused for jobs that are needed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluster_bus.core.errors import BusError, FlusterError
from fluster_bus.core.stream_bounds import namespace_full
from fluster_bus.messages import Namespace
from fluster_bus.running.coroutines import wait_set
from fluster_bus.storage.provisioning import bound_submissions, ensure_namespaces, ensure_system
from fluster_bus.storage.replication import MOST_REPLICAS, Replication, SingleServerError

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_bus.core.stream_bounds import NamespaceBounds
    from fluster_bus.messages import JobRecord, JobRequest, TaskRecord
    from fluster_bus.storage.tables import Table

log = logging.getLogger(__name__)

TASK_BYTES = 2 << 10  # of a task's record, amply, as it is recorded
# For so long an answer of the server counts, and one that says that there is not enough room.
_TOLD_FOR_S, _FULL_FOR_S = 1.0, 0.1
_PATIENCE_S = 10.0  # with servers that start at the same time
_LOOK_S = 30.0  # between two looks whether a group has become large enough


class NoRoomForJobError(FlusterError):
    """The namespace's share of the store has no room for another job's records."""


def record_bytes(request_bytes: int, request: JobRequest) -> int:
    """What the records of a job take when it is recorded."""
    return request_bytes + request.replicas * TASK_BYTES


@dataclass
class Room:
    """What is known of the room of one namespace: as the server told it last, and what was taken in since. Times are monotonic."""

    limit: int = 0
    used: int = 0
    told_at: float = float("-inf")

    def on_told(self, used: int, limit: int, *, now: float) -> None:
        """The server was asked at `now`, and told this."""
        self.used, self.limit, self.told_at = used, limit, now

    def is_old(self, size: int, *, now: float) -> bool:
        """True when the server is to be asked before so much is taken in, or refused."""
        return now - self.told_at > (_TOLD_FOR_S if self._has(size) else _FULL_FOR_S)

    def take(self, size: int) -> bool:
        """Take in so much, if there is room. A fourth is left for what is written as jobs go on and end."""
        if not self._has(size):
            return False
        self.used += size
        return True

    def _has(self, size: int) -> bool:
        return self.used + size <= self.largest

    @property
    def largest(self) -> int:
        """What the records of one job may take, where it is the only one."""
        return self.limit * 3 // 4

    @property
    def is_crowded(self) -> bool:
        """True when finished jobs are to go earlier than their time."""
        return self.limit > 0 and self.used * 2 > self.limit


class JobRooms:
    """The rooms of all namespaces, by asking the server now and then."""

    def __init__(self, tables: Mapping[Namespace, Table[JobRecord | TaskRecord]]) -> None:
        self._tables = tables
        self._rooms: defaultdict[Namespace, Room] = defaultdict(Room)
        self._locks: defaultdict[Namespace, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def take(self, namespace: Namespace, request_bytes: int, request: JobRequest) -> None:
        """Take in the records of a new job. Raises NoRoomForJobError, BusError."""
        room, size = self._rooms[namespace], record_bytes(request_bytes, request)
        async with self._locks[namespace]:
            if room.is_old(size, now=time.monotonic()):
                await self._ask(namespace)
            if room.take(size):
                return
        have = f" ({room.used / (1 << 20):,.1f} of {room.limit / (1 << 20):,.0f} MiB are used, and a fourth is kept for jobs that run)"
        if size > room.largest:
            have += f": this one needs {size / (1 << 20):,.1f} MiB, so it would need fewer tasks or a smaller callable"
        raise NoRoomForJobError(str(namespace_full("the job", "jobs", namespace, have)))

    async def crowded(self, namespaces: Iterable[Namespace]) -> set[Namespace]:
        """Those of which the longest finished jobs are to go. Raises BusError."""
        for namespace in namespaces:
            async with self._locks[namespace]:
                await self._ask(namespace)
        return {namespace for namespace, room in self._rooms.items() if room.is_crowded}

    def forget(self, namespace: Namespace) -> None:
        """The namespace is gone."""
        self._rooms.pop(namespace, None)
        self._locks.pop(namespace, None)

    async def _ask(self, namespace: Namespace) -> None:
        now = time.monotonic()
        used, limit = await self._tables[namespace].room()
        self._rooms[namespace].on_told(used, limit, now=now)


class StoreSetup:
    """The cluster's streams, as this controller's settings say that they are to be."""

    def __init__(
        self,
        bus: Bus,
        division: Callable[[], tuple[Sequence[Namespace], int]],
        bounds: NamespaceBounds,
        replication: Replication,
    ) -> None:
        """`division()` tells which namespaces are to have streams, and how many others take a part of the store."""
        self._bus = bus
        self._division = division
        self._turn = asyncio.Lock()  # two at once would make room for each other
        self._bounds = bounds
        self._replication = replication
        self._replicas = 0
        self._reconnected = asyncio.Event()
        self.shares: Mapping[str, int] = {}  # of each namespace, once they are made

    async def make_system(self) -> None:
        """Make what the whole cluster needs. Raises TooFewServersError, StorageError."""
        self._replicas = await ensure_system(self._bus, self._replication, patience_s=_PATIENCE_S)
        log.info("streams have %d copies", self._replicas)

    async def divide(self) -> None:
        """Make what is missing of the namespaces, and give each its part of the store. Raises TooFewServersError, StorageError."""
        async with self._turn:
            namespaces, beside = self._division()
            await bound_submissions(self._bus, len(namespaces) + beside)
            if namespaces:
                self.shares = await ensure_namespaces(
                    self._bus, namespaces, self._bounds, self._replication, beside=beside
                )

    async def run(self) -> None:
        """Where nothing else is asked for, have three copies as soon as the group has three servers; the leader does it."""
        if self._replication.replicas is not None:
            return
        self._bus.on_reconnect(self._reconnected.set)
        pause_s: float | None = _LOOK_S
        try:
            while self._replicas < MOST_REPLICAS:
                pause_s = await self._look_after(pause_s)
        finally:
            self._bus.off(self._reconnected.set)

    async def _look_after(self, pause_s: float | None) -> float | None:
        """Look again after that time, or a reconnect, and return after how long to look next; None: after a reconnect alone."""
        await wait_set(self._reconnected, pause_s)
        self._reconnected.clear()
        try:
            await ensure_system(self._bus, Replication(MOST_REPLICAS))
            await self.make_system()
            await self.divide()
        except SingleServerError:
            return None  # it has to be started anew to be in a group
        except BusError as error:
            log.info("streams have %d copies: %s", self._replicas, error)
        return _LOOK_S
