"""Removes what lies in a registry and is not a record: jobs may write there what they like."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core import buckets
from fluster_bus.core.errors import BusError, FaultLog, InvalidNameError, one_bounded_line
from fluster_bus.core.names import check_name
from fluster_bus.messages import Namespace
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.tables import Unreadable
from fluster_services.controller.leading.event_log import refusal

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.leading.event_log import EventLog
    from fluster_services.controller.leading.seat import Seat

log = logging.getLogger(__name__)

_MAX_KNOWN = 200  # at once; more are looked for when these are gone
_PAUSE_S = 1.0
_EVENTS_A_MINUTE = 20  # of one namespace: what its jobs write there without end must not push out all its other events
_MINUTE_S = 60.0
_NO_JOB = "refused"  # in the place of a job's id, in events
_REASON = "refused: it is not a record of an endpoint"


class UnreadableRecords:
    """Those of one namespace's registry."""

    def __init__(self, registry: Registry, namespace: Namespace, bus: Bus, seat: Seat, events: EventLog) -> None:
        self._table = registry.table
        self._namespace = namespace
        self._bus = bus
        self._seat = seat
        self._events = events
        self._known: dict[str, Unreadable] = {}  # {key: what lies there}
        self._are_more = False
        self._wake = asyncio.Event()
        self._faults = FaultLog(log)
        self._counted_since = -_MINUTE_S
        self._told = 0

    def add(self, found: Unreadable) -> None:
        """Have it removed."""
        if len(self._known) < _MAX_KNOWN or found.key in self._known:
            self._known[found.key] = found
        else:
            self._are_more = True
        self._wake.set()

    def drop(self, key: str) -> None:
        """Something else is there by now, or nothing."""
        self._known.pop(key, None)

    async def remove_forever(self) -> None:
        """Remove what is found, as long as this controller leads, until cancelled."""
        while True:
            await self._wake.wait()
            await self._seat.wait_sure()
            self._wake.clear()
            try:
                while self._known:
                    await self._remove(next(iter(self._known.values())))
                if self._are_more:
                    self._are_more = False
                    async with aclosing(self._table.unreadable()) as others:
                        async for other in others:
                            await self._remove(other)
            except BusError as error:
                self._faults.warning(
                    "what is not a record of %s's registry is removed later: %s", self._namespace, error
                )
                self._wake.set()
                await wait_to_retry(self._bus, _PAUSE_S)

    async def _remove(self, found: Unreadable) -> None:
        await self._seat.wait_sure()
        await self._table.remove(found, reason=_REASON)
        if self._known.get(found.key) == found:
            del self._known[found.key]
        if self._may_tell():
            reason = one_bounded_line(f"the registry record under {found.key} is removed: {found.why}")
            event = refusal(found.revision, _job_of(found.key), reason, now=time.time())
            self._events.refuse(self._namespace, event)

    def _may_tell(self) -> bool:
        now = time.monotonic()
        if now - self._counted_since >= _MINUTE_S:
            self._counted_since, self._told = now, 0
        self._told += 1
        return self._told <= _EVENTS_A_MINUTE


def _job_of(key: str) -> str:
    """Whose record it would be, as its key says; that is its writer's word."""
    job = key.partition(".")[2].partition(".")[0]
    try:
        return check_name("job", job) if job != buckets.NO_JOB else _NO_JOB
    except InvalidNameError:
        return _NO_JOB
