"""Verdicts: what the leader writes because of what it believes, and not because of what the records say.

That a worker is lost, that a task or a gang will never fit: such a decision rests on silence and on time, so one who was
stopped and continues would decide it wrongly. It is stored in one batch with a check that this controller's fence stands,
and nothing of a batch is stored when it does not. What follows from records alone (a retry, a kill wish passed on, the end of
a job) is right whoever writes it, and is a plain compare-and-set: a batch costs the server some milliseconds. So is what
becomes of a gang's holds: the job's record decides each epoch once, and calling one off costs nobody anything.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fluster_bus.core.errors import RevisionConflictError
from fluster_bus.messages import JobRecord, Namespace, TaskRecord
from fluster_bus.storage.tables import Table, Update

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fluster_services.controller.leading.seat import Seat

_IN_A_BATCH = 100

RecordUpdate = Update[JobRecord | TaskRecord]


class Verdicts:
    """Writes verdicts, many at once where there are many."""

    def __init__(self, tables: Mapping[Namespace, Table[JobRecord | TaskRecord]], seat: Seat) -> None:
        self._tables = tables
        self._seat = seat
        # One batch of a namespace at a time: servers that replicate refuse a second whose guard is that of one under way.
        self._turns: defaultdict[Namespace, asyncio.Lock] = defaultdict(asyncio.Lock)

    def forget(self, namespace: Namespace) -> None:
        """The namespace is not there any more."""
        self._turns.pop(namespace, None)

    async def write(self, namespace: Namespace, updates: Sequence[RecordUpdate]) -> list[int | None]:
        """The new revisions; None for what somebody else changed first. Raises DeposedError, and then none is stored."""
        written: list[int | None] = []
        for start in range(0, len(updates), _IN_A_BATCH):
            async with self._turns[namespace]:
                written += await self._write(namespace, updates[start : start + _IN_A_BATCH])
        return written

    async def _write(self, namespace: Namespace, updates: Sequence[RecordUpdate]) -> list[int | None]:
        await self._seat.wait_sure()
        try:
            return [*await self._tables[namespace].update_all(updates, self._seat.guard(namespace))]
        except RevisionConflictError:
            await self._seat.check_fence(namespace)
        if len(updates) == 1:
            return [None]
        # One that is out of date voids all: each for itself.
        return [revision for each in updates for revision in await self._write(namespace, [each])]
