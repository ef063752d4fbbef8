"""Writes records for the leader, and does what follows from each that is stored.

A **verdict** is what the leader writes because of what it believes, and not because of what the records say: that a worker is
lost, that a task or a gang will never fit. Such a decision rests on silence and on time, so one who was stopped and continues
would decide it wrongly. It is stored in one batch with a check that this controller's fence stands, and nothing of a batch is
stored when it does not. What follows from records alone (a retry, a kill wish passed on, the end of a job) is right whichever
controller writes it, and is a plain compare-and-set: a batch costs the server some milliseconds. So is what becomes of a gang's
holds: the job's record decides each epoch once, and calling one off costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core import subjects
from fluster_bus.core.errors import (
    BusError,
    DisconnectedError,
    FaultLog,
    KeyExistsError,
    NamespaceFullError,
    RevisionConflictError,
)
from fluster_bus.messages import JobRecord, Namespace, RecordChanged, TaskRecord
from fluster_bus.storage.stored_messages import SecretStore, remove_secrets
from fluster_bus.storage.tables import Row, Table, Update
from fluster_services import lifecycle
from fluster_services.controller.leading.seat import DeposedError
from fluster_services.controller.state import conflicts
from fluster_services.controller.state.job_index import JobKey, record_key
from fluster_services.controller.state.slim_records import (
    is_left,
    is_slim_end,
    is_slim_request,
    whole_end,
    without_callable,
)

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.state.dirty_jobs import DirtyJobs

log = logging.getLogger(__name__)

_IN_A_BATCH = 100
_PAUSE_WHEN_FULL_S = 3.0

RecordTables = Mapping[Namespace, Table[JobRecord | TaskRecord]]
RecordRow = Row[JobRecord | TaskRecord]
RecordUpdate = Update[JobRecord | TaskRecord]


class PendingWrites:
    """Which jobs have records that are being written.

    The server may have stored such a record, and have republished it to those who watch, before the index have it. An
    answer from the index alone would be older than what was published before the question came.
    """

    def __init__(self) -> None:
        self._of: dict[JobKey, set[asyncio.Future[None]]] = {}

    @contextmanager
    def of(self, keys: Collection[JobKey]) -> Iterator[None]:
        """Records of the jobs are written inside, and applied to the index."""
        done = asyncio.get_running_loop().create_future()
        for key in keys:
            self._of.setdefault(key, set()).add(done)
        try:
            yield
        finally:
            done.set_result(None)
            for key in keys:
                others = self._of[key]
                others.discard(done)
                if not others:
                    del self._of[key]

    async def wait_settled(self, keys: Collection[JobKey], *, until: float) -> None:
        """Return when the index has what was being written of the jobs when this was called.

        Raises TimeoutError at `until` of the loop's clock.
        """
        pending = {done for key in keys for done in self._of.get(key, ())}
        if not pending:
            return
        async with asyncio.timeout_at(until):
            await asyncio.wait(pending)


class Verdicts:
    """Writes verdicts, many at once where there are many."""

    def __init__(self, tables: Mapping[Namespace, Table[JobRecord | TaskRecord]], seat: Seat) -> None:
        self._tables = tables
        self._seat = seat
        # One batch of a namespace at a time: servers that replicate refuse a second whose guard is that of one under way.
        self._locks: defaultdict[Namespace, asyncio.Lock] = defaultdict(asyncio.Lock)

    def forget(self, namespace: Namespace) -> None:
        """The namespace is gone."""
        self._locks.pop(namespace, None)

    async def write(self, namespace: Namespace, updates: Sequence[RecordUpdate]) -> list[int | None]:
        """The new revisions; None for what another changed first. Raises DeposedError, and then none is stored."""
        written: list[int | None] = []
        for start in range(0, len(updates), _IN_A_BATCH):
            async with self._locks[namespace]:
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


class RecordWriter:
    """Writes records of jobs and tasks. `apply` takes in a record as it was read or written, `leads` tells whether this
    controller acts on the records of a namespace.
    """

    def __init__(
        self,
        bus: Bus,
        tables: RecordTables,
        seat: Seat,
        dirty: DirtyJobs,
        *,
        leads: Callable[[Namespace], bool],
        apply: Callable[[RecordRow], None],
    ) -> None:
        self.apply = apply
        self.pending = PendingWrites()
        self._bus = bus
        self._tables = tables
        self._seat = seat
        self._dirty = dirty
        self._leads = leads
        self.verdicts = Verdicts(tables, seat)
        self._faults = FaultLog(log)

    def forget(self, namespace: Namespace) -> None:
        """The namespace is gone."""
        self.verdicts.forget(namespace)

    # ---- new records --------------------------------------------------------------------------------------

    async def record_task(self, task: TaskRecord) -> None:
        """Write the first record of a task, if it is not there yet. Raises BusError."""
        table, key = self._tables[task.namespace], record_key(task)
        while True:
            try:
                return await self.create(task)
            except KeyExistsError:
                row = await table.get(key)
            if row is None or not isinstance(row.value, TaskRecord):
                continue
            if row.value.order >= task.order:
                return None  # written before this controller, or the one before it, was stopped
            first = conflicts.task_successor(row.value, task)
            try:
                revision = await table.update(key, first, row.revision)
            except RevisionConflictError:
                continue
            return self.apply(Row(key, first, revision))

    async def create(self, record: JobRecord | TaskRecord) -> None:
        """Write a record that is new. Raises KeyExistsError, BusError."""
        key = record_key(record)
        revision = await self._tables[record.namespace].create(key, record)
        self.apply(Row(key, record, revision))

    # ---- records that change ------------------------------------------------------------------------------

    async def write(self, record: JobRecord | TaskRecord, decided_from: int) -> bool:
        """Replace the record of revision `decided_from` by `record`, decided from it; False when another was first.

        Then nothing is lost: the other's record arrives, and the job is looked at again. This is for what follows from
        records alone; a decision that rests on silence or time as well is for `write_verdicts`.
        """
        await self._seat.wait_sure()
        with self.pending.of([JobKey(record.namespace, record.job_id)]):
            try:
                whole = await self.whole(record, decided_from)
                if whole is None:
                    return False
                record = whole
                revision = await self._tables[record.namespace].update(record_key(record), record, decided_from)
            except RevisionConflictError:
                return False
            except BusError as error:
                await self.try_later([record], error)
                return False
            self.apply(Row(record_key(record), record, revision))
        await self._written(record)
        return True

    async def write_verdicts(self, decided: Sequence[tuple[JobRecord | TaskRecord, int]]) -> None:
        """Replace each record of the given revision by the one decided from it, as long as this controller leads.

        Many at once cost little more than one. One that another changed first is left out: the other's record
        arrives, and the job is looked at again. Nothing is written by a controller that was deposed.
        """
        by_namespace: dict[Namespace, list[tuple[JobRecord | TaskRecord, int]]] = {}
        for record, revision in decided:
            if not self._leads(record.namespace):
                continue  # it has no fence of this controller's yet, or is gone
            by_namespace.setdefault(record.namespace, []).append((record, revision))
        for namespace, of_namespace in by_namespace.items():
            try:
                written = await self._write_verdicts(namespace, of_namespace)
            except DeposedError as error:
                log.warning("%d verdicts are void: %s", len(of_namespace), error)
                return  # `Seat.run` is about to learn the same
            for record in written:
                await self._written(record)

    async def _write_verdicts(
        self, namespace: Namespace, decided: Sequence[tuple[JobRecord | TaskRecord, int]]
    ) -> list[JobRecord | TaskRecord]:
        """What was stored of them, and is in the index. Raises DeposedError."""
        with self.pending.of({JobKey(namespace, record.job_id) for record, _ in decided}):
            try:
                wholes = [(await self.whole(record, revision), revision) for record, revision in decided]
                updates = [
                    Update(record_key(whole), whole, revision) for whole, revision in wholes if whole is not None
                ]
                revisions = await self.verdicts.write(namespace, updates)
            except BusError as error:
                await self.try_later([record for record, _ in decided], error)
                return []
            stored = [
                Row(update.key, update.value, revision)
                for update, revision in zip(updates, revisions, strict=True)
                if revision is not None
            ]
            for row in stored:
                self.apply(row)
        return [row.value for row in stored]

    async def try_later(self, records: Sequence[JobRecord | TaskRecord], error: BusError) -> None:
        """These could not be written: have their jobs looked at again after a pause."""
        names = ", ".join(record_key(record) for record in records[:3])
        self._faults.warning("%s could not be written, and %d in all are tried again: %s", names, len(records), error)
        if isinstance(error, NamespaceFullError):
            # What waits for its room holds up none of what is written for other namespaces.
            for record in records:
                key = JobKey(record.namespace, record.job_id)
                asyncio.get_running_loop().call_later(_PAUSE_WHEN_FULL_S, self._dirty.mark, key)
            return
        await wait_to_retry(self._bus)
        for record in records:
            self._dirty.mark(JobKey(record.namespace, record.job_id))

    async def _written(self, record: JobRecord | TaskRecord) -> None:
        """Do what follows from a record that is stored, beside what follows from its being in the index."""
        if isinstance(record, TaskRecord) and lifecycle.is_to_be_stopped(record):
            await self._tell_worker(record)
        if isinstance(record, JobRecord) and record.state.finished():
            self.forget_secrets(record)

    def forget_secrets(self, job: JobRecord) -> None:
        """Nothing of the job runs, or will: remove its secrets."""
        submission = job.request.submission
        if job.request.environment.secrets and submission is not None:
            removal = remove_secrets(SecretStore(self._bus, job.namespace), submission)
            self._bus.spawn(removal, f"removal of the secrets of {job.job_id}")

    async def whole(self, record: JobRecord | TaskRecord, decided_from: int) -> JobRecord | TaskRecord | None:
        """The record with what is not kept in memory, if that is needed yet; None when it has changed."""
        if isinstance(record, TaskRecord) or not is_slim_request(record.request):
            return record
        if record.state.finished() and not is_slim_end(record) and not is_left(record.request):
            return record
        present = await self._tables[record.namespace].get(record.job_id)
        if present is None or present.revision != decided_from or not isinstance(present.value, JobRecord):
            return None
        if is_slim_end(record):
            return whole_end(record, present.value)
        whole = present.value.request
        return record.model_copy(update={"request": without_callable(whole) if record.state.finished() else whole})

    async def _tell_worker(self, task: TaskRecord) -> None:
        if task.worker_id is None:
            return
        look = RecordChanged(namespace=task.namespace, job_id=task.job_id, task=task.task)
        try:
            await self._bus.publish(subjects.worker_verb(task.worker_id, "look"), look.to_json())
        except DisconnectedError:
            log.info("%s reads its claims again when it is back", task.worker_id)
