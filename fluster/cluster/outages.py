"""What waiting callers learn while the connection is lost, and when they stop waiting."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from fluster.errors import ConnectionLostError
from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.running.coroutines import wait_set

T = TypeVar("T")

log = logging.getLogger(__name__)

TOLD_AFTER_S = 5.0
_LOOK_S = 0.5  # that a cluster is gone announces itself by no event


class Step(Enum):
    """What to do about a lost connection."""

    WAIT = auto()
    TELL = auto()
    GIVE_UP = auto()


@dataclass(frozen=True)
class Outage:
    """A connection that is lost: since when, and whether that was reported. Times are seconds of one monotonic clock."""

    since: float
    told: bool = False

    def step(self, now: float, *, patience_s: float | None, is_gone: bool) -> Step:
        """What is to be done now for those who wait. With no `patience_s` they wait until the connection is back."""
        lost_s = now - self.since
        if is_gone or (patience_s is not None and lost_s >= patience_s):
            return Step.GIVE_UP
        return Step.TELL if lost_s >= TOLD_AFTER_S and not self.told else Step.WAIT


class Outages:
    """Those of one client's connection. `tell` is given each line; `is_gone` says that the cluster will not come
    back.
    """

    def __init__(self, bus: Bus, patience_s: float | None) -> None:
        self.patience_s = patience_s
        self.tell: Callable[[str], object] = log.warning
        self.is_gone: Callable[[], bool] = lambda: _is_removed(bus.address)
        self._bus = bus
        self._outage: Outage | None = None
        self._back = asyncio.Event()
        self._why = ""  # the wait is over
        self._limits: set[asyncio.Timeout] = set()  # of those who wait
        bus.on_disconnect(self._on_lost)
        bus.on_reconnect(self._on_back)

    async def bounded(self, wait: Coroutine[object, None, T]) -> T:
        """What `wait` returns. Raises ConnectionLostError when the connection is lost for longer than is waited for."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                return await wait
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ConnectionLostError(self._why) from error
        finally:
            self._limits.discard(limit)

    async def bounded_each(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Each item, waited for as by `bounded`."""
        async with aclosing(items):
            while True:
                try:
                    item = await self.bounded(anext(items))
                except StopAsyncIteration:
                    return
                yield item

    def _on_lost(self) -> None:
        if self._outage is None:
            self._outage = Outage(time.monotonic())
            self._back.clear()
            self._bus.spawn(self._attend(), "word of a lost connection")

    def _on_back(self) -> None:
        self._back.set()

    async def _attend(self) -> None:
        """Tell those who wait, until the connection is back."""
        while self._outage is not None and not self._back.is_set():
            if self._limits:
                self._take_step(self._outage)
            await wait_set(self._back, _LOOK_S)
        if self._outage is not None and self._outage.told:
            self.tell(f"the connection to {self._bus.address} is back after {_lasted(self._outage)}")
        self._outage = None

    def _take_step(self, outage: Outage) -> None:
        is_gone = self.is_gone()
        match outage.step(time.monotonic(), patience_s=self.patience_s, is_gone=is_gone):
            case Step.TELL:
                self.tell(f"the connection to {self._bus.address} is lost: waiting until it is back{self._limit()}")
                self._outage = Outage(outage.since, told=True)
            case Step.GIVE_UP:
                end = "has ended" if is_gone else f"was not reached for {_lasted(outage)}"
                self._why = f"the cluster at {self._bus.address} {end}: it is waited for no longer"
                for limit in list(self._limits):
                    limit.reschedule(asyncio.get_running_loop().time())
            case Step.WAIT:
                pass

    def _limit(self) -> str:
        return "" if self.patience_s is None else f", for {self.patience_s:g} s at most"


def _lasted(outage: Outage) -> str:
    return f"{time.monotonic() - outage.since:.0f} s"


def _is_removed(address: BusAddress) -> bool:
    """Whether the file of the address is not there any more: the cluster that wrote it removes it when it ends."""
    return address.file is not None and not address.file.exists()
