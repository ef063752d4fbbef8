"""Changes that a worker makes to the records of tasks, each a compare-and-set that is repeated until it is settled."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import retried_when_connected, wait_to_retry
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    HOPELESS,
    BusError,
    FaultLog,
    NoRespondersError,
    RevisionConflictError,
    ServiceError,
    StreamNotFoundError,
    one_bounded_line,
)
from fluster_bus.messages import (
    JobRecord,
    JobStatus,
    Namespace,
    NamespaceReply,
    NamespaceRequest,
    Offer,
    Progress,
    TaskError,
    TaskRecord,
    TaskResult,
    WorkerId,
)
from fluster_bus.messages.namespaces import NAMESPACE_UNKNOWN
from fluster_bus.messages.parts.images import UsedImage
from fluster_bus.messages.parts.wire_range import SPOKEN
from fluster_bus.storage.streams import jobs_table, records_table, tasks_table
from fluster_bus.storage.tables import Row, Table
from fluster_services import lifecycle

log = logging.getLogger(__name__)

_UNREADABLE_PAUSE_S = 0.5
_BRIEF_CHARACTERS = 200
_ASKED_S = 2.0  # for the answer whether a namespace was dropped


class Claims:
    """The records that one worker holds, or wants to."""

    def __init__(self, bus: Bus, worker_id: WorkerId, namespaces: tuple[Namespace, ...]) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._faults = FaultLog(log)
        self._tasks: dict[Namespace, Table[TaskRecord]] = {}
        self._jobs: dict[Namespace, Table[JobRecord]] = {}
        self._records: dict[Namespace, Table[JobRecord | TaskRecord]] = {}
        for namespace in namespaces:
            self.serve(namespace)

    def serve(self, namespace: Namespace) -> None:
        """Have the records of a namespace at hand from now on."""
        self._tasks[namespace] = tasks_table(self._bus, namespace)
        self._jobs[namespace] = jobs_table(self._bus, namespace)
        self._records[namespace] = records_table(self._bus, namespace)

    async def look(self, namespace: Namespace, job_id: str, task: int) -> Row[TaskRecord] | None:
        """The task's record as it is now; None when there is none, or no such namespace here."""
        table = self._tasks.get(namespace)
        if table is None:
            return None
        try:
            return await table.get(buckets.task_key(job_id, task))
        except StreamNotFoundError:
            if await is_gone(self._bus, namespace):
                return None
            raise

    async def job(self, namespace: Namespace, job_id: str) -> JobRecord | None:
        """The record of a job."""
        row = await self._jobs[namespace].get(job_id)
        return row.value if row is not None else None

    async def patiently(self, read: Callable[[], Awaitable[Row[TaskRecord] | None]]) -> Row[TaskRecord] | None:
        """What `read` returns of a record, once the bus lets it be read; None as well for one that cannot be read."""
        try:
            return await retried_when_connected(
                self._bus,
                read,
                on_error=lambda error: log.info("a record cannot be read yet: %s", error),
                unless=HOPELESS,
                pause_s=_UNREADABLE_PAUSE_S,
            )
        except HOPELESS as error:
            self._faults.warning("a record is taken for none: %s", error)
            return None

    async def claim(self, row: Row[TaskRecord], offer: Offer, *, gpus: tuple[str, ...] = ()) -> Row[TaskRecord] | None:
        """Take the task that was offered, with these GPUs; None when it is no longer available.

        Raises BusError when it is not known whether that succeeded: the record tells, once it can be read.
        """
        claimed = lifecycle.claim(
            row.value,
            attempt=offer.attempt,
            worker_id=self._worker_id,
            now=time.time(),
            epoch=offer.epoch,
            stored_at=row.stored_at,
            gpus=gpus,
        )
        if claimed is None:
            return None
        try:
            revision = await self._tasks[offer.namespace].update(row.key, claimed, row.revision)
        except RevisionConflictError:
            return None
        return Row(row.key, claimed, revision)

    async def settle(self, offer: Offer, *, gpus: tuple[str, ...] = ()) -> Row[TaskRecord] | None:
        """The task's record when it is this worker's, after a claim that may have succeeded or not.

        To look is not enough: what was sent may still be on its way to the record. So it is claimed once more. Of the two
        only one can succeed, and None says that neither has or will. Raises BusError when that is not known either.
        """
        seen = -1
        while True:
            row = await self.look(offer.namespace, offer.job_id, offer.task)
            if row is None or row.revision == seen:
                return None
            if self.is_mine(row.value, offer.attempt):
                return row
            claimed = await self.claim(row, offer, gpus=gpus)
            if claimed is not None:
                return claimed
            seen = row.revision

    def is_mine(self, record: TaskRecord, attempt: int) -> bool:
        """True while the attempt is this worker's and not ended."""
        return record.attempt == attempt and record.worker_id == self._worker_id and lifecycle.is_held(record)

    async def change(
        self,
        row: Row[TaskRecord],
        decide: Callable[[TaskRecord], TaskRecord | None],
        *,
        briefly: Callable[[TaskRecord, BusError], TaskRecord | None] | None = None,
    ) -> Row[TaskRecord] | None:
        """The record as `decide` changes it, written; None when it no longer applies.

        Does not give up while the bus is away: an end that happened must be recorded. What can never be stored is not tried
        again: it is recorded as `briefly` has it, where that is given.
        """
        namespace = row.value.namespace
        current: Row[TaskRecord] | None = row
        wanted_state: JobStatus | None = None
        while current is not None:
            wanted = decide(current.value)
            if wanted is None:
                # A write that was not acknowledged may have been done all the same.
                done = current.value.state is wanted_state and current.value.worker_id == self._worker_id
                return current if done and current.value.attempt == row.value.attempt else None
            try:
                revision = await self._tasks[namespace].update(row.key, wanted, current.revision)
                return Row(row.key, wanted, revision)
            except RevisionConflictError:
                pass
            except HOPELESS as error:
                self._faults.warning("what became of %s cannot be stored: %s", row.key, error)
                if briefly is None:
                    return None
                decide, briefly = _told_with(briefly, error), None
            except BusError as error:
                log.info("the record of %s waits: %s", row.key, error)
                if isinstance(error, StreamNotFoundError) and await is_gone(self._bus, namespace):
                    return None
                wanted_state = wanted.state
                await wait_to_retry(self._bus)
            current = await self._read_again(namespace, row.key)
        return None

    async def end(
        self,
        row: Row[TaskRecord],
        state: JobStatus,
        reason: str,
        *,
        exit_code: int | None = None,
        error: TaskError | None = None,
        started_at: float | None = None,
        last_words: str = "",
        result: TaskResult | None = None,
        progress: Progress | None = None,
        is_spared: bool = False,
        filled_disk: bool = False,
        has_output: bool = False,
        image: UsedImage | None = None,
    ) -> bool:
        """Write how the attempt of `row` ended; False when it was superseded meanwhile.

        With `started_at` its process ran, in `image` if that was a container, and the record says so first if it does not yet.
        """
        attempt, now = row.value.attempt, time.time()

        def ended(task: TaskRecord) -> TaskRecord | None:
            if started_at is not None:
                began = lifecycle.run(task, attempt=attempt, worker_id=self._worker_id, now=started_at, image=image)
                task = began or task
            return lifecycle.end(
                task,
                attempt=attempt,
                worker_id=self._worker_id,
                now=now,
                state=state,
                reason=reason,
                exit_code=exit_code,
                error=error,
                last_words=last_words,
                result=result,
                progress=progress,
                is_spared=is_spared,
                filled_disk=filled_disk,
                has_output=has_output,
            )

        def briefly(task: TaskRecord, cause: BusError) -> TaskRecord | None:
            return lifecycle.end(
                task,
                attempt=attempt,
                worker_id=self._worker_id,
                now=now,
                state=state,
                reason=one_bounded_line(f"{reason[:_BRIEF_CHARACTERS]}; the rest could not be stored: {cause}"),
                exit_code=exit_code,
                is_spared=is_spared,
                filled_disk=filled_disk,
                has_output=has_output,
            )

        return await self.change(row, ended, briefly=briefly) is not None

    async def run(
        self, row: Row[TaskRecord], *, started_at: float | None = None, image: UsedImage | None = None
    ) -> Row[TaskRecord]:
        """Write that the attempt of `row` runs; returns the record as it then is, or as it was."""
        attempt, now = row.value.attempt, started_at if started_at is not None else time.time()
        running = await self.change(
            row, lambda task: lifecycle.run(task, attempt=attempt, worker_id=self._worker_id, now=now, image=image)
        )
        return running or row

    async def make_ready(self, row: Row[TaskRecord], *, gang_address: str | None) -> bool:
        """Write that the hold of `row` could start; False when it is no longer this worker's."""
        attempt = row.value.attempt
        ready = await self.change(
            row,
            lambda task: lifecycle.make_ready(
                task, attempt=attempt, worker_id=self._worker_id, gang_address=gang_address
            ),
        )
        return ready is not None

    async def release(self, row: Row[TaskRecord], reason: str) -> None:
        """Write that the hold of `row` is over, so that the task waits again."""
        held, now = row.value, time.time()
        await self.change(
            row,
            lambda task: lifecycle.release(
                task, attempt=held.attempt, worker_id=self._worker_id, epoch=held.epoch, now=now, reason=reason
            ),
        )

    async def _read_again(self, namespace: Namespace, key: str) -> Row[TaskRecord] | None:
        while True:
            try:
                return await self._tasks[namespace].get(key)
            except HOPELESS as error:
                self._faults.warning("the record of %s is taken for none: %s", key, error)
                return None
            except BusError as error:
                log.info("the record of %s cannot be read: %s", key, error)
                if isinstance(error, StreamNotFoundError) and await is_gone(self._bus, namespace):
                    return None
                await wait_to_retry(self._bus)

    async def held(self) -> list[Row[TaskRecord]]:
        """All tasks that this worker holds by their records. Reads every record, so not for every day."""
        found: list[Row[TaskRecord]] = []
        for namespace, table in self._records.items():
            try:
                rows = await table.rows()
            except NoRespondersError:
                if not await is_gone(self._bus, namespace):
                    raise
                log.warning("the cluster has no namespace %s: its jobs are run here once it has", namespace)
                continue
            for row in rows:
                record = row.value
                if isinstance(record, TaskRecord) and self.is_mine(record, record.attempt):
                    found.append(Row(row.key, record, row.revision))
        return found


def _told_with(
    briefly: Callable[[TaskRecord, BusError], TaskRecord | None], cause: BusError
) -> Callable[[TaskRecord], TaskRecord | None]:
    return lambda task: briefly(task, cause)


async def is_gone(bus: Bus, namespace: str) -> bool:
    """True when the controller says that the cluster has no such namespace; False when it has, or does not answer."""
    try:
        await bus.ask(
            subjects.ensure_namespace(namespace), NamespaceRequest(wire=SPOKEN), NamespaceReply, timeout_s=_ASKED_S
        )
    except ServiceError as error:
        return error.code == NAMESPACE_UNKNOWN
    except BusError:
        return False
    return False
