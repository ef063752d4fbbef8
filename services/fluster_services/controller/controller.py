"""The controller: keeps its view of the records up to date and writes what follows from them.

It keeps nothing that it cannot rebuild by reading, so it may be killed at any moment. What it does lies beside it, one
module each: taking in submissions, offering tasks, judging workers, sweeping the registry, answering requests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, DisconnectedError, NamespaceFullError, RevisionConflictError
from fluster_bus.core.fault_log import FaultLog
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import NamespaceBounds
from fluster_bus.messages import JobRecord, JobStatus, Look, Namespace, TaskRecord, WorkerId
from fluster_bus.messages.namespaces import NamespaceRecord
from fluster_bus.provisioning.replication import Replication
from fluster_bus.running.coroutines import TimeSlices, retried
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.stored_messages import SecretStore, remove_secrets
from fluster_bus.storage.streams import workers_table
from fluster_bus.storage.tables import Deleted, Row, Update
from fluster_services import lifecycle
from fluster_services.config import RecordLimits, Timing
from fluster_services.controller.answers.service import ControllerService
from fluster_services.controller.leading.event_log import EventLog
from fluster_services.controller.leading.seat import DeposedError, Seat, wait_no_restore
from fluster_services.controller.leading.store_setup import StoreSetup
from fluster_services.controller.leading.verdicts import Verdicts
from fluster_services.controller.namespaces.job_room import JobRooms
from fluster_services.controller.namespaces.namespaces import NamespaceSet
from fluster_services.controller.namespaces.server_users import ServerUsers
from fluster_services.controller.namespaces.steward import Steward
from fluster_services.controller.rules.reconcile import missing_tasks, next_records
from fluster_services.controller.scheduling.dispatch import Dispatch
from fluster_services.controller.scheduling.explain import why_given_up
from fluster_services.controller.scheduling.gangs import Gangs
from fluster_services.controller.scheduling.judge import Judge
from fluster_services.controller.scheduling.offers import Offers
from fluster_services.controller.state.books import Books, JobKey, record_key
from fluster_services.controller.state.fair_queue import FairQueue
from fluster_services.controller.state.liveness import Liveness
from fluster_services.controller.state.pending_writes import PendingWrites
from fluster_services.controller.state.progress import ProgressBoard
from fluster_services.controller.state.roster import Roster
from fluster_services.controller.state.slim_records import (
    is_left,
    is_slim_end,
    is_slim_request,
    whole_end,
    without_callable,
)
from fluster_services.controller.state.vm_troubles import VMTroubles
from fluster_services.controller.state.waits import Waits, waited_s
from fluster_services.controller.submissions.intake import Intake
from fluster_services.controller.submissions.lost_submissions import settle_lost_submissions
from fluster_services.controller.sweeps.owners import Owners
from fluster_services.controller.sweeps.registry_sweep import RegistrySweep
from fluster_services.controller.sweeps.retention import RecordSweep
from fluster_services.controller.sweeps.secret_sweep import SecretSweep
from fluster_services.gangs import MAX_AT_ONCE

if TYPE_CHECKING:
    from fluster_bus.trust.signer import Signer

log = logging.getLogger(__name__)

_RECONCILED_AT_ONCE = 32
_PAUSE_AFTER_ERROR_S = 0.2
_PAUSE_WHEN_FULL_S = 3.0
_CLOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ControllerConfig:
    """What a controller needs to know.

    `controller_id` is this controller's alone: whoever starts under the id of the leader takes its place at once.
    """

    address: BusAddress
    namespaces: tuple[Namespace, ...] = (Namespace("default"),)
    namespaces_are_fixed: str | None = None  # why none can be added while the cluster runs, and what to do instead
    server_users: ServerUsers | None = None  # None: the operator lets in those of a namespace that is added
    timing: Timing = field(default_factory=Timing)
    records: RecordLimits = field(default_factory=RecordLimits)
    bounds: NamespaceBounds = field(default_factory=NamespaceBounds)
    replication: Replication = field(default_factory=Replication)
    controller_id: str = "controller"
    signers: Mapping[Role, Signer] = field(default_factory=dict)  # of workers and jobs, for those who join by a token


class Controller:
    """One controller on one connection; `run` serves until it is cancelled."""

    def __init__(self, bus: Bus, config: ControllerConfig, *, in_place: bool = True) -> None:
        self.bus = bus
        self.config = config
        self.books = Books()
        timing = config.timing
        beats = int(timing.worker_timeout_s / timing.heartbeat_s)
        self.roster = Roster(self.books, Liveness(timing.worker_timeout_s, beats=beats))
        self.vm_troubles = VMTroubles()
        self.waits = Waits()
        self.namespaces = NamespaceSet(self)
        self.records = self.namespaces.tables
        self.workers_table = workers_table(bus)
        self.job_rooms = JobRooms(self.records)
        self.store = StoreSetup(bus, self.namespaces.division, config.bounds, config.replication)
        self.seat = Seat(
            bus,
            (),
            controller_id=config.controller_id,
            lease_s=config.timing.leader_lease_s,
            in_place=in_place,
        )
        self.pending_writes = PendingWrites()
        self._verdicts = Verdicts(self.records, self.seat)
        self.events = EventLog(bus, self.seat)
        self.intake = Intake(self)
        self.gangs = Gangs(self)
        self.judge = Judge(self)
        self.offers = Offers(self)
        self.registry = RegistrySweep(self)
        self.owners = Owners(self)
        self.progress = ProgressBoard(self)
        self.retention = RecordSweep(self)
        self.steward = Steward(self)
        self._secrets = SecretSweep(self)
        self._service = ControllerService(self)
        self._dirty: FairQueue[JobKey] = FairQueue()
        self._slices = TimeSlices()
        self._deadlines: dict[tuple[JobKey, int], asyncio.TimerHandle] = {}  # {task that waits: when it is given up}
        self._queued: set[JobKey] = set()
        self._busy: set[JobKey] = set()
        self._faults = FaultLog(log)
        self.namespaces.on_changed.append(self.on_namespace)

    @property
    def dispatch(self) -> Dispatch:
        """The tasks that wait, and the offers that are out."""
        return self.offers.dispatch

    async def run(self, ready: Callable[[], None]) -> None:
        """Stand by, and serve from when this controller leads; `ready` is called once it does either.

        Raises DeposedError, in an exception group, when another one leads after that, and RestoringError when the store is being
        restored: then a new Controller is needed.
        """
        await wait_no_restore(self.bus)
        await self.store.make_system()
        await self.namespaces.begin()
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._read(tasks)
                tasks.create_task(self.seat.run())
                await self.seat.wait_seen()
                if not self.seat.leads:
                    leader = self.seat.holder.controller_id if self.seat.holder is not None else "no controller"
                    log.info("%s stands by; %s leads", self.config.controller_id, leader)
                    ready()
                    ready = _nothing
                await self.seat.wait_leads()
                await self.namespaces.wait_led()
                await self._lead(tasks)
                ready()
        finally:
            await self.seat.release()

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to keep up with the records, and return when all that were there are read."""
        read = asyncio.Event()
        tasks.create_task(self._watch_workers(read))
        await self.namespaces.open(tasks)
        await read.wait()

    async def _lead(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to write what follows from the records, and return when requests are answered."""
        loops = (
            self.judge.run,
            self.offers.run,
            self.gangs.run,
            self.intake.run,
            self.retention.run,
            self._secrets.run,
            self.owners.run,
            self.store.run,
            self.steward.run,
        )
        for loop in loops:
            tasks.create_task(loop())
        tasks.create_task(settle_lost_submissions(self))
        tasks.create_task(self.registry.stay_open())
        await self.registry.wait_open()
        for _ in range(_RECONCILED_AT_ONCE):
            tasks.create_task(self._reconcile_forever())
        serving = asyncio.Event()
        tasks.create_task(self._service.run(serving))
        await serving.wait()

    # ---- one namespace, as `namespaces` has it ------------------------------------------------------------

    async def lead_namespace(self, namespace: Namespace, tasks: asyncio.TaskGroup) -> None:
        """Begin to publish, hear and keep clean what belongs to the namespace."""
        await self.events.lead(namespace)
        tasks.create_task(self.events.publish(namespace))
        tasks.create_task(self.registry.run(namespace))
        await self.progress.listen(namespace)
        await self.bus.flush()

    def follow_up_all(self, namespace: Namespace) -> None:
        """Act upon all records of the namespace as they are now."""
        for key, record in self.books.records():
            if key.namespace == namespace:
                self._follow_up(key, record)

    def forget_namespace(self, namespace: Namespace) -> None:
        """The namespace is not served any more: nothing is kept of it."""
        for key in self.books.keys_of(namespace):
            self.dispatch.forget(key)
        for place in [place for place in self._deadlines if place[0].namespace == namespace]:
            self._deadlines.pop(place).cancel()
        self.retention.forget_namespace(namespace)
        self.events.forget_namespace(namespace)
        self.progress.forget(namespace)
        self.registry.forget(namespace)
        self.job_rooms.forget(namespace)
        self._verdicts.forget(namespace)
        self.seat.remove(namespace)

    # ---- reading ----------------------------------------------------------------------------------------

    async def watch_records(self, namespace: Namespace, read: asyncio.Event) -> None:
        """Keep up with the namespace's records; `read` is set when all that were there are read."""

        def is_known(key: str, revision: int) -> bool:
            """True for what this controller wrote itself, so that it need not be read once more."""
            return self.books.has_seen(namespace, key, revision)

        passed = functools.partial(self.seat.on_passed, namespace)
        table, began = self.records[namespace], time.monotonic()
        bus_began = await retried(lambda _left_s: table.time(), on=(BusError,), timeout_s=_CLOCK_TIMEOUT_S)
        async with aclosing(table.watch(is_known=is_known, passed=passed, sure=True)) as changes:
            async for change in changes:
                if isinstance(change, Row):
                    is_new = read.is_set()  # so it waits since now
                    with self._faults.contained("record %s of namespace %s is passed over", change.key, namespace):
                        self.apply(change, since=None if is_new else began - waited_s(change, bus_began))
                elif isinstance(change, Deleted):
                    with self._faults.contained("the removal of %s in namespace %s", change.key, namespace):
                        self.retention.on_deleted(namespace, change)
                elif isinstance(change, CaughtUp):
                    self.events.forget_all_but(namespace, self.books.record_keys(namespace))
                    read.set()

    async def _watch_workers(self, read: asyncio.Event) -> None:
        async with aclosing(self.workers_table.watch(sure=True)) as changes:
            async for change in changes:
                if isinstance(change, CaughtUp):
                    read.set()
                elif isinstance(change, Row):
                    self.roster.on_registered(change.value, now=time.monotonic())
                else:
                    self.roster.on_left(WorkerId(change.key))

    def apply(self, row: Row[JobRecord | TaskRecord], *, since: float | None = None) -> None:
        """Take in a record as it was read or written, with everything that follows from it if this controller leads.

        It stands since now, or `since` that time of the monotonic clock.
        """
        key = self.books.apply(row)
        if key is None:
            return
        is_new = since is None
        since = time.monotonic() if since is None else since
        self.retention.on_record(key, row.value, since=since)
        if isinstance(row.value, TaskRecord):
            self.waits.on_task(key, row.value, since=since)
        # Now, since the books do not keep all of it.
        self.events.on_record(row.value, stored_at=row.stored_at, is_new=is_new)
        if self.namespaces.leads(key.namespace):
            self._follow_up(key, row.value)

    def _follow_up(self, key: JobKey, record: JobRecord | TaskRecord) -> None:
        self.owners.on_record(key, record)
        if isinstance(record, TaskRecord):
            self._apply_task(key, record)
        elif record.state.finished():
            self.dispatch.forget(key)
            for other in (*self.books.children(key), *self.books.dependents(key), *self.books.relieved(key)):
                self.mark(other)
            self.namespaces.on_job_ended(key.namespace)
        self.registry.on_record(key, record)
        self.intake.on_job_changed(key)
        if not self._is_being_recorded(key, record):
            self.mark(key)
            self.gangs.on_job_changed(key)

    def _is_being_recorded(self, key: JobKey, record: JobRecord | TaskRecord) -> bool:
        """True for a task that waits as long as others of its job have no records: nothing follows before the last of them."""
        entry = self.books.get(key)
        if entry is None or entry.job is None or not isinstance(record, TaskRecord):
            return False
        return record.state is JobStatus.PENDING and len(entry.tasks) < entry.job.value.request.replicas

    def _apply_task(self, key: JobKey, task: TaskRecord) -> None:
        self.progress.on_task_changed(key, task)
        if task.state.finished():
            for child in self.books.children(key):
                self.mark(child)
        if lifecycle.is_held(task) and task.worker_id is not None:
            self.judge.on_held(task.worker_id)
        now = time.monotonic()
        self.dispatch.on_task(key, task, pause_s=self.waits.pause_s(key, task, now=now))
        timer = self._deadlines.pop((key, task.task), None)
        if timer is not None:
            timer.cancel()
        left_s = self.waits.left_s(key, task, now=now)
        if left_s is not None and task.state is JobStatus.PENDING:
            self._give_up_later(left_s, key, task)

    def on_namespace(self, record: NamespaceRecord) -> None:
        """What is said of a namespace has changed: its quota and its weight count from now on. What runs goes on."""
        self.dispatch.on_namespace(record)

    def on_namespace_gone(self, namespace: Namespace) -> None:
        """Nothing is said of a namespace any more."""
        self.dispatch.on_namespace_gone(namespace)

    def _give_up_later(self, delay_s: float, key: JobKey, task: TaskRecord) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, self._give_up, key, task)
        self._deadlines[key, task.task] = timer

    def _give_up(self, key: JobKey, task: TaskRecord) -> None:
        self._deadlines.pop((key, task.task), None)
        row = self.books.present(key, task)
        if row is not None and self.dispatch.awaits_turn(key, task.task):
            self._give_up_later(task.scheduling_timeout_s or 0.0, key, task)  # it is not workers that it waits for
        elif row is not None:
            job = self.books.get(key)
            short = self.dispatch.why_short(job.job.value) if job is not None and job.job is not None else None
            reason = why_given_up(task, self.roster.views(), short)
            given_up = lifecycle.give_up(task, now=time.time(), reason=reason)
            if given_up is not None:
                self.bus.spawn(self._end_waiting(key, task, given_up, row.revision), f"end of {key.job_id}.{task.task}")

    async def _end_waiting(self, key: JobKey, task: TaskRecord, given_up: TaskRecord, revision: int) -> None:
        await self.write_verdicts([(given_up, revision)])
        if self.books.present(key, task) is not None:  # it could not be written
            self._give_up_later(_PAUSE_AFTER_ERROR_S, key, task)

    # ---- writing ----------------------------------------------------------------------------------------

    def mark(self, key: JobKey) -> None:
        """Have a job looked at: what follows from its records is written."""
        if key not in self._queued:
            self._queued.add(key)
            self._dirty.put(key.namespace, key)

    async def _reconcile_forever(self) -> None:
        while True:
            if self._dirty.is_empty:
                key = await self._dirty.get()
                self._slices.begin()
            else:
                await self._slices.step()
                key = await self._dirty.get()
            if key in self._busy:  # whoever has it looks again when done: `key` is still queued
                continue
            self._queued.discard(key)
            self._busy.add(key)
            try:
                with self._faults.contained("job %s of namespace %s is left as it is", key.job_id, key.namespace):
                    await self._reconcile(key)
            finally:
                self._busy.discard(key)
                if key in self._queued:
                    self._dirty.put(key.namespace, key)

    async def _reconcile(self, key: JobKey) -> None:
        entry = self.books.get(key)
        if entry is None or entry.job is None:
            return
        parent_id = entry.job.value.request.parent
        parent = self.books.get(JobKey(key.namespace, parent_id)) if parent_id is not None else None
        parent_record = parent.job.value if parent is not None and parent.job is not None else None
        after = self.books.dependencies(key) if lifecycle.awaits_others(entry.job.value) else None
        is_gathering = self.gangs.is_gathering(key)
        wanted = next_records(
            entry,
            now=time.time(),
            parent=parent_record,
            launcher=self.books.launcher(key.namespace, entry.job.value.request),
            after=after,
            is_gathering=is_gathering,
            with_children=self.books.with_children(key),
        )
        # Taken now: while one is written, the books may move on to records that the others were not decided from.
        for record, revision in [(record, entry.revision_of(record)) for record in wanted]:
            await self.write(record, revision)
        for number, task in enumerate(missing_tasks(entry)):
            if number == MAX_AT_ONCE:
                self.mark(key)  # then it is the others' turn
            if number == MAX_AT_ONCE or not await self._record_missing(task):
                return

    async def _record_missing(self, task: TaskRecord) -> bool:
        """Write the first record of a task that was not recorded together with its job; False when that is tried again later."""
        try:
            await self.intake.record_task(task)
        except BusError as error:
            await self._later([task], error)
            return False
        return True

    async def write(self, record: JobRecord | TaskRecord, decided_from: int) -> bool:
        """Replace the record of revision `decided_from` by `record`, decided from it; False when somebody else was first.

        Then nothing is lost: the other's record arrives, and the job is looked at again. This is for what follows from
        records alone; a decision that rests on silence or time as well is for `write_verdicts`.
        """
        await self.seat.wait_sure()
        with self.pending_writes.of([JobKey(record.namespace, record.job_id)]):
            try:
                whole = await self._whole(record, decided_from)
                if whole is None:
                    return False
                record = whole
                revision = await self.records[record.namespace].update(record_key(record), record, decided_from)
            except RevisionConflictError:
                return False
            except BusError as error:
                await self._later([record], error)
                return False
            self.apply(Row(record_key(record), record, revision))
        await self._written(record)
        return True

    async def write_verdicts(self, decided: Sequence[tuple[JobRecord | TaskRecord, int]]) -> None:
        """Replace each record of the given revision by the one decided from it, as long as this controller leads.

        Many at once cost little more than one. One that somebody else changed first is left out: the other's record
        arrives, and the job is looked at again. Nothing is written by a controller that was deposed.
        """
        by_namespace: dict[Namespace, list[tuple[JobRecord | TaskRecord, int]]] = {}
        for record, revision in decided:
            if not self.namespaces.leads(record.namespace):
                continue  # it has no fence of this controller's yet, or is gone
            by_namespace.setdefault(record.namespace, []).append((record, revision))
        for namespace, of_namespace in by_namespace.items():
            try:
                written = await self._write_verdicts(namespace, of_namespace)
            except DeposedError as error:
                log.warning("%d verdicts are void: %s", len(of_namespace), error)
                return  # the seat's keeper is about to learn the same
            for record in written:
                await self._written(record)

    async def _write_verdicts(
        self, namespace: Namespace, decided: Sequence[tuple[JobRecord | TaskRecord, int]]
    ) -> list[JobRecord | TaskRecord]:
        """What was stored of them, and is in the books. Raises DeposedError."""
        with self.pending_writes.of({JobKey(namespace, record.job_id) for record, _ in decided}):
            try:
                wholes = [(await self._whole(record, revision), revision) for record, revision in decided]
                updates = [
                    Update(record_key(whole), whole, revision) for whole, revision in wholes if whole is not None
                ]
                revisions = await self._verdicts.write(namespace, updates)
            except BusError as error:
                await self._later([record for record, _ in decided], error)
                return []
            stored = [
                Row(update.key, update.value, revision)
                for update, revision in zip(updates, revisions, strict=True)
                if revision is not None
            ]
            for row in stored:
                self.apply(row)
        return [row.value for row in stored]

    async def _later(self, records: Sequence[JobRecord | TaskRecord], error: BusError) -> None:
        names = ", ".join(record_key(record) for record in records[:3])
        self._faults.warning("%s could not be written, and %d in all are tried again: %s", names, len(records), error)
        if isinstance(error, NamespaceFullError):
            # What waits for its room keeps none of those who write for all namespaces.
            for record in records:
                key = JobKey(record.namespace, record.job_id)
                asyncio.get_running_loop().call_later(_PAUSE_WHEN_FULL_S, self.mark, key)
            return
        await self.bus.wait_connected()
        await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
        for record in records:
            self.mark(JobKey(record.namespace, record.job_id))

    async def _written(self, record: JobRecord | TaskRecord) -> None:
        """Do what follows from a record that is stored, beside what follows from its being in the books."""
        if isinstance(record, TaskRecord) and lifecycle.is_to_be_stopped(record):
            await self._tell_worker(record)
        if isinstance(record, JobRecord) and record.state.finished():
            self.forget_secrets(record)

    def forget_secrets(self, job: JobRecord) -> None:
        """Nothing of the job runs, or will: remove its secrets."""
        submission = job.request.submission
        if job.request.environment.secrets and submission is not None:
            removal = remove_secrets(SecretStore(self.bus, job.namespace), submission)
            self.bus.spawn(removal, f"removal of the secrets of {job.job_id}")

    async def _whole(self, record: JobRecord | TaskRecord, decided_from: int) -> JobRecord | TaskRecord | None:
        """The record with what is not kept in memory, if that is needed yet; None when it has changed."""
        if isinstance(record, TaskRecord) or not is_slim_request(record.request):
            return record
        if record.state.finished() and not is_slim_end(record) and not is_left(record.request):
            return record
        present = await self.records[record.namespace].get(record.job_id)
        if present is None or present.revision != decided_from or not isinstance(present.value, JobRecord):
            return None
        if is_slim_end(record):
            return whole_end(record, present.value)
        whole = present.value.request
        return record.model_copy(update={"request": without_callable(whole) if record.state.finished() else whole})

    async def _tell_worker(self, task: TaskRecord) -> None:
        if task.worker_id is None:
            return
        look = Look(namespace=task.namespace, job_id=task.job_id, task=task.task)
        try:
            await self.bus.publish(subjects.worker_verb(task.worker_id, "look"), look.to_json())
        except DisconnectedError:
            log.info("%s reads its claims again when it is back", task.worker_id)


def _nothing() -> None:
    """Whoever was to be told has been."""
