"""The streams and buckets that a controller makes at its start, and their copies, which can be made once servers are there for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fluster_bus.core.errors import BusError
from fluster_bus.running.coroutines import wait_set
from fluster_bus.storage.provisioning import bound_submissions, ensure_namespaces, ensure_system
from fluster_bus.storage.replication import MOST_REPLICAS, Replication, SingleServerError

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_bus.core.stream_bounds import NamespaceBounds
    from fluster_bus.messages import Namespace

log = logging.getLogger(__name__)

_PATIENCE_S = 10.0  # with servers that start at the same time
_LOOK_S = 30.0  # between two looks whether a group has become large enough


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
