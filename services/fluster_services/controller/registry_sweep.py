"""Removes endpoints that nobody stands behind any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fluster_bus.errors import BusError, RevisionConflictError
from fluster_bus.feeds import CaughtUp
from fluster_bus.messages import Endpoint, JobId, Namespace
from fluster_bus.registry import Registry
from fluster_bus.tables import Deleted, Row, Unreadable
from fluster_services.controller.books import JobKey
from fluster_services.controller.reconcile import is_stale
from fluster_services.controller.unreadable_records import UnreadableRecords

if TYPE_CHECKING:
    from fluster_services.controller.controller import Controller

log = logging.getLogger(__name__)

_TICK_S = 1.0
_LATE_S = 2.0
# A watcher that was away this long has met the dead endpoint by calling it, so it needs no mark of the deletion.
_MARK_KEPT_S = 600.0


@dataclass
class _Namespace:
    registry: Registry
    endpoints: dict[str, tuple[Row[Endpoint], float]] = field(default_factory=dict)  # {key: (record, last written at)}
    marks: deque[tuple[float, Deleted]] = field(default_factory=deque)  # of deletions, the oldest first
    by_job: dict[JobId, set[str]] = field(default_factory=dict)
    stale: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    unreadable: UnreadableRecords = field(init=False)

    def __post_init__(self) -> None:
        self.unreadable = UnreadableRecords(self.registry)


class RegistrySweep:
    """The registries of all namespaces, as far as removal goes."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._namespaces = {
            namespace: _Namespace(Registry(controller.bus, namespace)) for namespace in controller.config.namespaces
        }

    def registry(self, namespace: Namespace) -> Registry:
        return self._namespaces[namespace].registry

    async def run(self, namespace: Namespace) -> None:
        """Keep a namespace's registry clean, until cancelled."""
        state = self._namespaces[namespace]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(namespace, state))
            tasks.create_task(self._remove_stale(state))
            tasks.create_task(state.unreadable.remove_forever(self._controller, namespace))
            tasks.create_task(self._tick(state))

    async def _watch(self, namespace: Namespace, state: _Namespace) -> None:
        async with aclosing(state.registry.table.watch_whole()) as changes:
            async for change in changes:
                if isinstance(change, CaughtUp):
                    continue
                if isinstance(change, Unreadable):
                    self._forget(state, change.key)  # what was there before is not there any more
                    state.unreadable.add(change)
                    continue
                state.unreadable.drop(change.key)
                if isinstance(change, Deleted):
                    self._forget(state, change.key)
                    state.marks.append((time.monotonic(), change))
                    continue
                self._learn(namespace, state, change)

    def _learn(self, namespace: Namespace, state: _Namespace, row: Row[Endpoint]) -> None:
        endpoint = row.value
        self._forget(state, row.key)  # it may have been another job's before
        state.endpoints[row.key] = (row, time.monotonic())
        if endpoint.job_id is not None:
            state.by_job.setdefault(endpoint.job_id, set()).add(row.key)
            self.on_job_changed(JobKey(namespace, endpoint.job_id))

    def _forget(self, state: _Namespace, key: str) -> None:
        known = state.endpoints.pop(key, None)
        job_id = known[0].value.job_id if known is not None else None
        if job_id is not None:
            keys = state.by_job.get(job_id, set())
            keys.discard(key)
            if not keys:
                state.by_job.pop(job_id, None)

    def on_job_changed(self, key: JobKey) -> None:
        """A job's records changed: those of its endpoints that have no living attempt go."""
        state = self._namespaces[key.namespace]
        for endpoint_key in state.by_job.get(key.job_id, ()):
            known = state.endpoints.get(endpoint_key)
            if known is not None and is_stale(known[0].value, self._controller.books.get(key)):
                state.stale.put_nowait(endpoint_key)

    async def _remove_stale(self, state: _Namespace) -> None:
        while True:
            key = await state.stale.get()
            await self._controller.seat.wait_sure()
            known = state.endpoints.get(key)
            if known is None:
                continue
            try:
                # By its key, which may be another than its content claims, and only if it was not renewed meanwhile.
                await state.registry.table.delete(key, revision=known[0].revision)
            except RevisionConflictError:
                continue  # its newer record arrives, and is judged then
            except BusError as error:
                log.warning("endpoint %s is removed later: %s", key, error)
                await self._controller.bus.wait_connected()
                await asyncio.sleep(_TICK_S)
                state.stale.put_nowait(key)
            else:
                self._forget(state, key)

    async def _tick(self, state: _Namespace) -> None:
        """Leases and old marks go by time. Both are counted from when this controller saw them, by its own clock."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if not self._controller.bus.connected or now - started > _TICK_S + _LATE_S:
                # Nobody could renew, or this process was stopped and heard nobody: all have their full time again.
                state.endpoints = {key: (row, now) for key, (row, _) in state.endpoints.items()}
                continue
            for key, (row, written_at) in list(state.endpoints.items()):
                if row.value.lease_s is not None and now - written_at > row.value.lease_s:
                    state.stale.put_nowait(key)
            while state.marks and now - state.marks[0][0] > _MARK_KEPT_S:
                _, deleted = state.marks.popleft()
                await self._forget_mark(state, deleted)

    async def _forget_mark(self, state: _Namespace, deleted: Deleted) -> None:
        try:
            await state.registry.table.forget_deleted(deleted)
        except BusError as error:
            log.info("the mark of the deleted endpoint %s stays: %s", deleted.key, error)
