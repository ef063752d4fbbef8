"""The controller: keeps its view of the records up to date and writes what follows from them.

It keeps nothing that it cannot rebuild by reading, so it may be killed at any moment. What it does lies beside it, one
module each: taking in submissions, offering tasks, judging workers, sweeping the registry, answering requests.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import BusError, FaultLog, NoRespondersError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import NamespaceBounds
from fluster_bus.messages import JobRecord, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_bus.messages.namespaces import NamespaceRecord
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.replication import Replication
from fluster_bus.storage.streams import workers_table
from fluster_bus.storage.tables import Deleted, Row
from fluster_services import lifecycle
from fluster_services.config import RecordLimits, Timing
from fluster_services.controller.answers.explain_requests import ExplainRequests
from fluster_services.controller.answers.job_requests import JobRequests
from fluster_services.controller.answers.joining import Joining
from fluster_services.controller.answers.namespace_requests import NamespaceRequests
from fluster_services.controller.answers.service import ControllerService
from fluster_services.controller.leading.event_log import EventLog
from fluster_services.controller.leading.record_writer import RecordWriter
from fluster_services.controller.leading.seat import Seat, wait_no_restore
from fluster_services.controller.namespace_reconciler import NamespaceReconciler, ServerUsers
from fluster_services.controller.namespaces import NamespaceSet
from fluster_services.controller.reconciler import Reconciler
from fluster_services.controller.scheduling.gangs import Gangs
from fluster_services.controller.scheduling.offers import Offers
from fluster_services.controller.scheduling.wait_times import Deadlines, WaitTimes, waited_s
from fluster_services.controller.scheduling.worker_monitor import WorkerMonitor
from fluster_services.controller.state.dirty_jobs import DirtyJobs
from fluster_services.controller.state.job_index import JobIndex, JobKey
from fluster_services.controller.state.liveness import Liveness
from fluster_services.controller.state.reports import ProgressBoard, VMTroubles
from fluster_services.controller.state.worker_index import WorkerIndex
from fluster_services.controller.store_room import JobRooms, StoreSetup
from fluster_services.controller.submissions.intake import Intake, settle_lost_submissions
from fluster_services.controller.sweeps.owners import Owners
from fluster_services.controller.sweeps.registry_sweep import RegistrySweep
from fluster_services.controller.sweeps.retention import RecordSweep, SecretSweep

if TYPE_CHECKING:
    from fluster_bus.trust.signer import Signer

log = logging.getLogger(__name__)

_RECONCILED_AT_ONCE = 32
_STREAM_PATIENCE_S = 5.0
_CLOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ControllerConfig:
    """What a controller needs to know.

    `controller_id` is this controller's alone: a controller that starts under the id of the leader takes its place at once.
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
        timing = config.timing
        # What it knows.
        job_index = self.job_index = JobIndex()
        beats = int(timing.worker_timeout_s / timing.heartbeat_s)
        worker_index = self.worker_index = WorkerIndex(job_index, Liveness(timing.worker_timeout_s, beats=beats))
        wait_times = self.wait_times = WaitTimes()
        self.vm_troubles = VMTroubles()
        self.progress = ProgressBoard(bus, job_index)
        dirty = self.dirty = DirtyJobs()
        # What it reads, writes and leads.
        self.namespaces = NamespaceSet(bus, self)
        tables = self.records = self.namespaces.tables
        self.workers_table = workers_table(bus)
        self.job_rooms = JobRooms(tables)
        self.store = StoreSetup(bus, self.namespaces.division, config.bounds, config.replication)
        seat = self.seat = Seat(
            bus, (), controller_id=config.controller_id, lease_s=timing.leader_lease_s, in_place=in_place
        )
        self.events = EventLog(bus, seat)
        writer = self.writer = RecordWriter(bus, tables, seat, dirty, leads=self.namespaces.leads, apply=self.apply)
        # What it does as the leader.
        offers = self.offers = Offers(bus, seat, job_index, worker_index, timing, on_room=self._on_room)
        dispatch = self.dispatch = offers.dispatch
        self.gangs = Gangs(
            bus,
            seat,
            job_index=job_index,
            worker_index=worker_index,
            wait_times=wait_times,
            dispatch=dispatch,
            writer=writer,
            dirty=dirty,
            timing=timing,
        )
        self.monitor = WorkerMonitor(
            bus,
            seat,
            job_index=job_index,
            worker_index=worker_index,
            workers=self.workers_table,
            vm_troubles=self.vm_troubles,
            dispatch=dispatch,
            gangs=self.gangs,
            writer=writer,
            timing=timing,
        )
        self._deadlines = Deadlines(
            bus, job_index, worker_index, wait_times=wait_times, dispatch=dispatch, writer=writer
        )
        self._reconciler = Reconciler(job_index, dirty, self.gangs, writer)
        self.registry = RegistrySweep(bus, seat, job_index, self.events)
        self.owners = Owners(bus, seat, job_index, writer, lease_s=timing.owner_lease_s)
        self.retention = RecordSweep(
            bus,
            seat,
            job_index=job_index,
            tables=tables,
            job_rooms=self.job_rooms,
            limits=config.records,
            on_removed=self._on_removed,
        )
        self.intake = Intake(
            bus,
            seat,
            job_index=job_index,
            tables=tables,
            namespaces=self.namespaces,
            job_rooms=self.job_rooms,
            writer=writer,
            dirty=dirty,
            events=self.events,
            owners=self.owners,
            retention=self.retention,
        )
        self._secrets = SecretSweep(
            bus,
            seat,
            job_index=job_index,
            tables=tables,
            limits=config.records,
            has_parked=lambda: self.intake.has_parked,
        )
        self.namespace_reconciler = NamespaceReconciler(
            bus,
            seat,
            namespaces=self.namespaces,
            store=self.store,
            job_index=job_index,
            writer=writer,
            server_users=config.server_users,
        )
        self._service = self._make_service()
        self._faults = FaultLog(log)

    def _make_service(self) -> ControllerService:
        jobs = JobRequests(
            self.bus,
            job_index=self.job_index,
            tables=self.records,
            writer=self.writer,
            outcomes=self.intake.outcomes,
            progress=self.progress,
        )
        explanations = ExplainRequests(
            job_index=self.job_index,
            worker_index=self.worker_index,
            wait_times=self.wait_times,
            dispatch=self.dispatch,
            gangs=self.gangs,
            progress=self.progress,
            vm_troubles=self.vm_troubles,
        )
        operators = NamespaceRequests(
            self.bus,
            self.seat,
            namespaces=self.namespaces,
            namespace_reconciler=self.namespace_reconciler,
            store=self.store,
            job_index=self.job_index,
            namespaces_are_fixed=self.config.namespaces_are_fixed,
            server_users=self.config.server_users,
        )
        return ControllerService(
            self.bus,
            self.seat,
            controller_id=self.config.controller_id,
            timing=self.config.timing,
            namespaces=self.namespaces,
            store=self.store,
            owners=self.owners,
            monitor=self.monitor,
            jobs=jobs,
            explanations=explanations,
            operators=operators,
            joining=Joining(self.bus, self.seat, self.worker_index, self.config.signers),
        )

    async def run(self, ready: Callable[[], None]) -> None:
        """Stand by, and serve from when this controller leads; `ready` is called once it does either.

        Raises DeposedError, in an exception group, when another one leads after that, and RestoringError when the store is being
        restored: then a new Controller is needed.
        """
        await wait_no_restore(self.bus)
        await self.store.make_system()
        await self.namespaces.begin(self.config.namespaces, self.store.divide)
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
            self.monitor.run,
            self.offers.run,
            self.gangs.run,
            self.intake.run,
            self.retention.run,
            self._secrets.run,
            self.owners.run,
            self.store.run,
            self.namespace_reconciler.run,
        )
        for loop in loops:
            tasks.create_task(loop())
        tasks.create_task(settle_lost_submissions(self.bus, self.job_index, self.writer))
        tasks.create_task(self.registry.stay_open())
        await self.registry.wait_open()
        for _ in range(_RECONCILED_AT_ONCE):
            tasks.create_task(self._reconciler.run())
        serving = asyncio.Event()
        tasks.create_task(self._service.run(serving))
        await serving.wait()

    # ---- one namespace, as `namespaces` has it ------------------------------------------------------------

    async def load_namespace(self, namespace: Namespace) -> None:
        """Learn what is needed to read the namespace's records. Raises NoRespondersError, StreamNotFoundError."""
        await retried(
            lambda _left_s: self.events.load(namespace), on=(NoRespondersError,), timeout_s=_STREAM_PATIENCE_S
        )
        self.seat.add(namespace)

    async def lead_namespace(self, namespace: Namespace, tasks: asyncio.TaskGroup) -> None:
        """Begin to publish, hear and keep clean what belongs to the namespace, once this controller leads."""
        await self.seat.wait_led(namespace)
        await self.events.lead(namespace)
        tasks.create_task(self.events.publish(namespace))
        tasks.create_task(self.registry.run(namespace))
        await self.progress.listen(namespace)
        await self.bus.flush()

    def follow_up_all(self, namespace: Namespace) -> None:
        """Act upon all records of the namespace as they are now."""
        for key, record in self.job_index.records():
            if key.namespace == namespace:
                self._follow_up(key, record)

    def forget_namespace(self, namespace: Namespace) -> None:
        """The namespace is no longer served: nothing is kept of it."""
        for key in self.job_index.keys_of(namespace):
            self.dispatch.forget(key)
        self._deadlines.forget(namespace)
        self.retention.forget_namespace(namespace)
        self.events.forget_namespace(namespace)
        self.progress.forget(namespace)
        self.registry.forget(namespace)
        self.job_rooms.forget(namespace)
        self.writer.forget(namespace)
        self.seat.remove(namespace)

    # ---- reading ----------------------------------------------------------------------------------------

    async def watch_records(self, namespace: Namespace, read: asyncio.Event) -> None:
        """Keep up with the namespace's records; `read` is set when all that were there are read."""

        def is_known(key: str, revision: int) -> bool:
            """True for what this controller wrote itself, so that it need not be read once more."""
            return self.job_index.has_seen(namespace, key, revision)

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
                    self.events.forget_all_but(namespace, self.job_index.record_keys(namespace))
                    read.set()

    async def _watch_workers(self, read: asyncio.Event) -> None:
        async with aclosing(self.workers_table.watch(sure=True)) as changes:
            async for change in changes:
                if isinstance(change, CaughtUp):
                    read.set()
                elif isinstance(change, Row):
                    self.worker_index.on_registered(change.value, now=time.monotonic())
                else:
                    self.worker_index.on_left(WorkerId(change.key))

    def apply(self, row: Row[JobRecord | TaskRecord], *, since: float | None = None) -> None:
        """Take in a record as it was read or written, with everything that follows from it if this controller leads.

        It stands since now, or `since` that time of the monotonic clock.
        """
        key = self.job_index.apply(row)
        if key is None:
            return
        is_new = since is None
        since = time.monotonic() if since is None else since
        self.retention.on_record(key, row.value, since=since)
        if isinstance(row.value, TaskRecord):
            self.wait_times.on_task(key, row.value, since=since)
        # Now, since the index does not keep all of it.
        self.events.on_record(row.value, stored_at=row.stored_at, is_new=is_new)
        if self.namespaces.leads(key.namespace):
            self._follow_up(key, row.value)

    def _follow_up(self, key: JobKey, record: JobRecord | TaskRecord) -> None:
        self.owners.on_record(key, record)
        if isinstance(record, TaskRecord):
            self._apply_task(key, record)
        elif record.state.finished():
            self.dispatch.forget(key)
            for other in (
                *self.job_index.children(key),
                *self.job_index.dependents(key),
                *self.job_index.relieved(key),
            ):
                self.dirty.mark(other)
            self.namespaces.on_job_ended(key.namespace)
        self.registry.on_record(key, record)
        self.intake.on_job_changed(key)
        if not self._is_being_recorded(key, record):
            self.dirty.mark(key)
            self.gangs.on_job_changed(key)

    def _is_being_recorded(self, key: JobKey, record: JobRecord | TaskRecord) -> bool:
        """True for a task that waits as long as others of its job have no records: nothing follows before the last of them."""
        entry = self.job_index.get(key)
        if entry is None or entry.job is None or not isinstance(record, TaskRecord):
            return False
        return record.state is JobStatus.PENDING and len(entry.tasks) < entry.job.value.request.replicas

    def _apply_task(self, key: JobKey, task: TaskRecord) -> None:
        self.progress.on_task_changed(key, task)
        if task.state.finished():
            for child in self.job_index.children(key):
                self.dirty.mark(child)
        if lifecycle.is_held(task) and task.worker_id is not None:
            self.monitor.on_held(task.worker_id)
        now = time.monotonic()
        self.dispatch.on_task(key, task, pause_s=self.wait_times.pause_s(key, task, now=now))
        self._deadlines.on_task(key, task, now=now)

    def _on_room(self) -> None:
        self.gangs.on_room()

    def _on_removed(self, key: JobKey, records: list[JobRecord | TaskRecord]) -> None:
        """Records of a job are gone."""
        self.events.forget(records)
        self.wait_times.forget(key)
        self.owners.forget(key)
        self.gangs.on_job_changed(key)

    def on_namespace(self, record: NamespaceRecord) -> None:
        """What is said of a namespace has changed: its quota and its weight count from now on. What runs goes on."""
        self.dispatch.on_namespace(record)

    def on_namespace_gone(self, namespace: Namespace) -> None:
        """The record of a namespace was taken away."""
        self.dispatch.on_namespace_gone(namespace)


def _nothing() -> None:
    """`ready` was called already."""
