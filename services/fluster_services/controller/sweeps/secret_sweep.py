"""Removes the secrets that a controller left which died between the end of their job and their removal."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from fluster_bus.core.errors import BusError
from fluster_bus.messages import JobRecord, Namespace
from fluster_bus.storage.stored_messages import SecretStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from fluster_bus.connection.bus import Bus
    from fluster_services.config import RecordLimits
    from fluster_services.controller.leading.record_writer import RecordTables
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.state.books import Books

log = logging.getLogger(__name__)


class SecretSweep:
    """Looks for secrets of no unfinished job. Those of a submission that is on its way are among them, so it looks twice."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        books: Books,
        tables: RecordTables,
        limits: RecordLimits,
        has_parked: Callable[[], bool],
    ) -> None:
        """`has_parked()` tells whether submissions wait that have no records yet."""
        self._bus = bus
        self._seat = seat
        self._books = books
        self._tables = tables
        self._limits = limits
        self._has_parked = has_parked
        self._orphans: dict[tuple[Namespace, str], float] = {}  # {secrets: since when they belong to no job}

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._limits.secrets_sweep_s)
            for namespace in list(self._tables):
                try:
                    await self._look(namespace)
                except BusError as error:
                    log.info("left secrets are removed later: %s", error)

    async def _look(self, namespace: Namespace) -> None:
        store = SecretStore(self._bus, namespace)
        kept = await store.names()
        wanted = self._wanted(store, namespace) if kept else set()
        if self._has_parked():  # they have no records yet, and may wait for long
            wanted |= kept
        now, orphans = time.monotonic(), kept - wanted
        self._orphans = {key: since for key, since in self._orphans.items() if key[0] != namespace or key[1] in orphans}
        for name in orphans:
            if now - self._orphans.setdefault((namespace, name), now) >= self._limits.secrets_orphaned_s:
                await self._seat.wait_sure()
                await store.remove_named(name)

    def _wanted(self, store: SecretStore, namespace: Namespace) -> set[str]:
        records = (record for key, record in self._books.records() if key.namespace == namespace)
        jobs = [record for record in records if isinstance(record, JobRecord)]
        return {
            store.name_of(job.request.submission)
            for job in jobs
            if job.request.environment.secrets and job.request.submission is not None and not job.state.finished()
        }
