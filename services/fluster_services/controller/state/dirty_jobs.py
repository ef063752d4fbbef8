"""The jobs that are to be looked at, in an order in which no namespace keeps the others waiting."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from fluster_bus.messages import Namespace
from fluster_bus.running.coroutines import TimeSlices
from fluster_services.controller.state.job_index import JobKey


class DirtyJobs:
    """The jobs whose records have changed since they were looked at last. The namespaces take turns.

    Several tasks may take from them; a job is looked at by one of these at a time.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[Namespace, deque[JobKey]] = (
            OrderedDict()
        )  # of those that have some, the next one first
        self._waiters: deque[asyncio.Future[None]] = deque()  # those that found none, the first one first
        self._queued: set[JobKey] = set()
        self._busy: set[JobKey] = set()
        self._slices = TimeSlices()

    def mark(self, key: JobKey) -> None:
        """Have a job looked at: what follows from its records is written."""
        if key not in self._queued:
            self._queued.add(key)
            self._put(key)

    def _put(self, key: JobKey) -> None:
        self._lines.setdefault(key.namespace, deque()).append(key)
        self._wake_one()

    def _wake_one(self) -> None:
        # Only one: of many that were woken all but one would find nothing, for each change of a record.
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def take(self) -> JobKey:
        """The next job to look at, once there is one; `done` is called for it afterwards."""
        while True:
            is_idle = not self._lines
            if not is_idle:
                await self._slices.step()
            while not self._lines:
                await self._wait_some()
            if is_idle:
                self._slices.begin()
            namespace, line = self._lines.popitem(last=False)
            key = line.popleft()
            if line:
                self._lines[namespace] = line
            if key in self._busy:  # it is looked at again when that is done: `key` is still queued
                continue
            self._queued.discard(key)
            self._busy.add(key)
            return key

    async def _wait_some(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and self._lines:
                self._wake_one()  # it was woken for what another has to take now
            raise

    def done(self, key: JobKey) -> None:
        """A job was looked at. If it was marked meanwhile it is to be looked at again."""
        self._busy.discard(key)
        if key in self._queued:
            self._put(key)
