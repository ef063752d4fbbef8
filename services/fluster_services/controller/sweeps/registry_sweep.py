"""Removes endpoints of attempts that are over, and those whose lease has run out."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core.errors import BusError, RevisionConflictError
from fluster_bus.messages import Endpoint, JobRecord, Namespace, TaskRecord
from fluster_bus.running.coroutines import TimeSlices
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.tables import Deleted, Row, Unreadable
from fluster_services.controller.state.job_index import JobIndex, JobKey
from fluster_services.controller.state.reconcile import is_stale, last_attempt_over
from fluster_services.controller.sweeps.endpoint_index import MAX_ENDPOINTS, EndpointIndex
from fluster_services.controller.sweeps.unreadable_records import UnreadableRecords

if TYPE_CHECKING:
    from fluster_services.controller.leading.event_log import EventLog
    from fluster_services.controller.leading.seat import Seat

log = logging.getLogger(__name__)

_TICK_S = 1.0
_LATE_S = 2.0
# A watcher that was away this long has met the dead endpoint by calling it, so it needs no mark of the deletion.
_MARK_KEPT_S = 600.0


@dataclass
class _Namespace:
    registry: Registry
    unreadable: UnreadableRecords
    index: EndpointIndex = field(default_factory=EndpointIndex)
    has_stale: asyncio.Event = field(default_factory=asyncio.Event)


class RegistrySweep:
    """The registries of all namespaces, as far as removal goes.

    They have a connection of their own: jobs write there as they like, and heartbeats and records do not come behind that.
    """

    def __init__(self, bus: Bus, seat: Seat, job_index: JobIndex, events: EventLog) -> None:
        self._shared_bus = bus
        self._seat = seat
        self._job_index = job_index
        self._events = events
        self._namespaces: dict[Namespace, _Namespace] = {}
        self._bus: Bus | None = None
        self._is_open = asyncio.Event()

    async def stay_open(self) -> None:
        """Connect, as soon as that is possible, until cancelled."""
        self._bus = await self._shared_bus.connect_beside(f"{self._shared_bus.name}-registry")
        self._is_open.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self._bus.close()

    async def wait_open(self) -> None:
        """Return when it is connected."""
        await self._is_open.wait()

    def index(self, namespace: Namespace) -> EndpointIndex:
        """What is known of a namespace that is kept clean. Raises KeyError for another."""
        return self._namespaces[namespace].index

    def forget(self, namespace: Namespace) -> None:
        """The namespace is gone."""
        self._namespaces.pop(namespace, None)

    async def run(self, namespace: Namespace) -> None:
        """Keep a namespace's registry clean, until cancelled. It begins when it is open."""
        await self._is_open.wait()
        assert self._bus is not None  # noqa: S101
        registry = Registry(self._bus, namespace)
        unreadable = UnreadableRecords(registry, namespace, self._shared_bus, self._seat, self._events)
        state = self._namespaces[namespace] = _Namespace(registry, unreadable)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(namespace, state))
            tasks.create_task(self._remove_stale(state))
            tasks.create_task(state.unreadable.remove_forever())
            tasks.create_task(self._tick(self._bus, state))

    async def _watch(self, namespace: Namespace, state: _Namespace) -> None:
        async with aclosing(state.registry.table.watch_whole()) as changes:
            async for change in changes:
                if isinstance(change, CaughtUp):
                    continue
                if isinstance(change, Row) and not state.index.has_room(change.key):
                    why = f"namespace {namespace!r} has {MAX_ENDPOINTS:,} endpoints already"
                    change = Unreadable(change.key, change.revision, why)  # noqa: PLW2901
                if isinstance(change, Unreadable):
                    state.index.forget(change.key)  # what was there before is gone
                    state.unreadable.add(change)
                    continue
                state.unreadable.drop(change.key)
                if isinstance(change, Deleted):
                    state.index.on_deleted(change, now=time.monotonic())
                else:
                    self._learn(namespace, state, change)

    def _learn(self, namespace: Namespace, state: _Namespace, row: Row[Endpoint]) -> None:
        state.index.learn(row, now=time.monotonic())
        endpoint = row.value
        if endpoint.job_id is not None and is_stale(endpoint, self._job_index.get(JobKey(namespace, endpoint.job_id))):
            self._mark_stale(state, row.key)

    @staticmethod
    def _mark_stale(state: _Namespace, *keys: str) -> None:
        for key in keys:
            state.index.mark_stale(key)
        state.has_stale.set()

    def on_record(self, key: JobKey, record: JobRecord | TaskRecord) -> None:
        """A record has changed: those endpoints that have no living attempt by it go."""
        state = self._namespaces.get(key.namespace)
        if state is None:
            return
        index, entry = state.index, self._job_index.get(key)
        for task in [record.task] if isinstance(record, TaskRecord) else index.tasks_of(key.job_id):
            row = entry.tasks.get(task) if entry is not None else None
            upto = last_attempt_over(row.value) if row is not None else None
            self._mark_stale(state, *index.of_task(key.job_id, task, upto=upto))

    async def _remove_stale(self, state: _Namespace) -> None:
        while True:
            await state.has_stale.wait()
            await self._seat.wait_sure()
            found = state.index.next_stale()
            if found is None:
                state.has_stale.clear()
                continue
            key, revision = found
            try:
                # By its key, which may be another than its content claims, and only if it was not renewed meanwhile.
                await state.registry.table.delete(key, revision=revision)
            except RevisionConflictError:
                state.index.spare(key, revision)  # its newer record arrives, and is judged then
            except BusError as error:
                log.warning("endpoint %s is removed later: %s", key, error)
                state.index.put_back(key)
                await wait_to_retry(self._shared_bus, _TICK_S)
            else:
                state.index.remove(key, revision)

    async def _tick(self, bus: Bus, state: _Namespace) -> None:
        """Leases and old marks go by time. Both are counted from when this controller saw them, by its own clock."""
        slices, looked_at = TimeSlices(), time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            # Since the last look, not since the sleep began: a process can be stopped while it looks, too.
            is_late, looked_at = now - looked_at > _TICK_S + _LATE_S, now
            if is_late or not (bus.connected and self._shared_bus.connected):
                # Nothing could be renewed, or this process was stopped and heard nothing: all have their full time again.
                state.index.renew_all(now=now)
                continue
            for key in state.index.leased():
                await slices.step()
                if state.index.is_over(key, now=now):
                    self._mark_stale(state, key)
            while (deleted := state.index.take_mark(now=now, kept_s=_MARK_KEPT_S)) is not None:
                await self._forget_mark(state, deleted)

    async def _forget_mark(self, state: _Namespace, deleted: Deleted) -> None:
        try:
            await state.registry.table.forget_deleted(deleted)
        except BusError as error:
            log.info("the mark of the deleted endpoint %s stays: %s", deleted.key, error)
