"""The namespaces that a controller serves: what runs for each begins and ends as its record comes and goes.

The bucket of namespaces is the truth. What a controller is started with is added to it unless it was there before, also when
that was dropped since. A namespace is served from when its streams are made until they are to be deleted:

    (nothing) ─► ADDING ─► ACTIVE ─► DROPPING ─► DELETING ─► (nothing)
                           └──── served ────┘

Each step is written before it is made, so that whichever controller leads completes what another had begun (`namespace_reconciler.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fluster_bus.core.errors import NoRespondersError, RevisionConflictError, StreamNotFoundError
from fluster_bus.messages import JobRecord, Namespace, NamespaceRecord, NamespaceState, TaskRecord
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.streams import namespaces_table, records_table
from fluster_bus.storage.tables import Row, Table

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

log = logging.getLogger(__name__)

SERVED = (NamespaceState.ACTIVE, NamespaceState.DROPPING)


class RecordTables(dict[Namespace, Table[JobRecord | TaskRecord]]):
    """The records of each namespace that is served.

    One that is served no longer has a table too, for what is under way: writing there fails as the bus has it.
    """

    def __init__(self, bus: Bus) -> None:
        super().__init__()
        self._bus = bus

    def __missing__(self, namespace: Namespace) -> Table[JobRecord | TaskRecord]:
        return records_table(self._bus, namespace)


class NamespaceWork(Protocol):
    """What a controller does for the namespaces that it serves."""

    def on_namespace(self, record: NamespaceRecord, /) -> None:
        """The record of a namespace is new, or has changed."""

    def on_namespace_gone(self, namespace: Namespace, /) -> None:
        """The record of a namespace was taken away."""

    async def load_namespace(self, namespace: Namespace, /) -> None:
        """Learn what is needed to read the records. Raises NoRespondersError, StreamNotFoundError."""

    async def watch_records(self, namespace: Namespace, read: asyncio.Event, /) -> None:
        """Keep up with the records, until cancelled; `read` is set when all that were there are read."""

    async def lead_namespace(self, namespace: Namespace, tasks: asyncio.TaskGroup, /) -> None:
        """Begin to publish, hear and keep clean what belongs to the namespace, once this controller leads."""

    def follow_up_all(self, namespace: Namespace, /) -> None:
        """Act upon all records of the namespace as they are now."""

    def forget_namespace(self, namespace: Namespace, /) -> None:
        """The namespace is no longer served: nothing is kept of it."""


@dataclass
class _Served:
    """What runs for one namespace."""

    task: asyncio.Task[None] | None = None
    opened: asyncio.Event = field(default_factory=asyncio.Event)  # its records are read, or it has ended
    led: asyncio.Event = field(default_factory=asyncio.Event)  # this controller acts on them, or it has ended


class NamespaceSet:
    """The namespaces of the cluster, and what this controller runs for each."""

    def __init__(self, bus: Bus, work: NamespaceWork) -> None:
        self._bus = bus
        self._work = work
        self._table = namespaces_table(bus)
        self._rows: dict[Namespace, Row[NamespaceRecord]] = {}
        self._gone: dict[Namespace, int] = {}  # {namespace: the revision at which it was taken away}
        self._served: dict[Namespace, _Served] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._led: set[Namespace] = set()
        self._ends: Counter[Namespace] = Counter()
        self._making: set[Namespace] = set()  # those of which this controller makes the streams
        self._tasks: asyncio.TaskGroup | None = None
        self._changed = asyncio.Condition()
        self.tables = RecordTables(bus)  # of those that are served

    # ---- what others ask --------------------------------------------------------------------------------

    def row(self, namespace: Namespace) -> Row[NamespaceRecord] | None:
        """The namespace's record, as it was read or written last."""
        return self._rows.get(namespace)

    def record(self, namespace: Namespace) -> NamespaceRecord | None:
        """The same without its revision."""
        row = self._rows.get(namespace)
        return row.value if row is not None else None

    def records(self) -> Iterator[NamespaceRecord]:
        """Those of all namespaces, by name."""
        for namespace in sorted(self._rows):
            yield self._rows[namespace].value

    def leads(self, namespace: Namespace) -> bool:
        """True while this controller acts on the namespace's records."""
        return namespace in self._led

    def why_closed(self, namespace: Namespace) -> str | None:
        """Why no job of the namespace is taken in; None where jobs are."""
        record = self.record(namespace)
        if record is None:
            return f"the cluster has no namespace {namespace!r}: an operator adds it with `fluster namespace add {namespace}`"
        if record.state in (NamespaceState.DROPPING, NamespaceState.DELETING):
            return f"namespace {namespace!r} is being dropped"
        return None

    def is_served(self, namespace: Namespace) -> bool:
        return namespace in self._served

    def is_acted_on(self, namespace: Namespace) -> bool:
        """True once requests about it are answered here."""
        return namespace in self._led and namespace in self.tables

    def division(self) -> tuple[list[Namespace], int]:
        """(those that are to have streams, how many others take a part of the store)."""
        has = [each.name for each in self.records() if each.state in SERVED or each.name in self._making]
        return has, len(self._rows) - len(has)

    def ends(self, namespace: Namespace) -> int:
        """How many jobs of it have ended while it is being dropped."""
        return self._ends[namespace]

    async def wait_changed(self, is_so: Callable[[], bool]) -> None:
        """Return when `is_so()`: it is looked at whenever a namespace's record, or what runs for it, has changed."""
        async with self._changed:
            await self._changed.wait_for(is_so)

    # ---- beginning --------------------------------------------------------------------------------------

    async def begin(self, given: Iterable[Namespace], make: Callable[[], Awaitable[None]]) -> None:
        """Learn which namespaces there are, and make those `given` to this controller that are new.

        `make()` makes the streams that are missing. Raises StorageError.
        """
        self._rows = {row.value.name: row for row in await self._table.rows()}
        seeds = await asyncio.gather(*(self._seed(each) for each in given))
        mine = [row for row in seeds if row is not None]
        self._making = {row.value.name for row in mine}
        try:
            await make()
            await asyncio.gather(*(self._finish_seed(row) for row in mine))
        finally:
            self._making.clear()

    async def _seed(self, namespace: Namespace) -> Row[NamespaceRecord] | None:
        """The record of a namespace that is to be made here; None for one that is there."""
        row = self._rows.get(namespace)
        if row is None:
            record = NamespaceRecord(name=namespace, state=NamespaceState.ADDING, created_at=time.time())
            try:
                revision = await self._table.update(namespace, record, 0)
            except RevisionConflictError:
                row = await self._table.get(namespace)
                if row is None:
                    log.warning(
                        "namespace %s was dropped: start controllers without it, or add it again (`fluster namespace add %s`)",
                        namespace,
                        namespace,
                    )
                    return None
            else:
                row = Row(namespace, record, revision)
            self._rows[namespace] = row
        return row if row.value.state is NamespaceState.ADDING else None

    async def _finish_seed(self, row: Row[NamespaceRecord]) -> None:
        active = row.value.model_copy(update={"state": NamespaceState.ACTIVE})
        try:
            self._rows[row.value.name] = Row(row.key, active, await self._table.update(row.key, active, row.revision))
        except RevisionConflictError:  # the leader was quicker
            newer = await self._table.get(row.key)
            if newer is not None:
                self._rows[row.value.name] = newer

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to serve all that there are, and to follow which come and go; return when their records are read."""
        self._tasks = tasks
        caught_up = asyncio.Event()
        tasks.create_task(self._watch(caught_up))
        rows, self._rows = self._rows, {}
        for row in rows.values():
            self.apply(row)
        await caught_up.wait()
        for served in list(self._served.values()):
            await served.opened.wait()

    async def wait_led(self) -> None:
        """Return when this controller acts on the records of all that were there when it took the lead."""
        for served in list(self._served.values()):
            await served.led.wait()

    async def _watch(self, caught_up: asyncio.Event) -> None:
        async with aclosing(self._table.watch(sure=True)) as changes:
            async for change in changes:
                if isinstance(change, CaughtUp):
                    caught_up.set()
                elif isinstance(change, Row):
                    self.apply(change)
                else:
                    self.on_gone(Namespace(change.key), change.revision)

    # ---- records that come and go -----------------------------------------------------------------------

    async def create(self, record: NamespaceRecord) -> None:
        """Write the record of a new namespace. Raises KeyExistsError, BusError."""
        self.apply(Row(record.name, record, await self._table.create(record.name, record)))

    async def update(self, record: NamespaceRecord, revision: int) -> None:
        """Replace the record that was read at `revision`. Raises RevisionConflictError, BusError."""
        self.apply(Row(record.name, record, await self._table.update(record.name, record, revision)))

    async def remove(self, row: Row[NamespaceRecord]) -> None:
        """Take the record away, the last of a namespace. Raises RevisionConflictError, BusError."""
        await self._table.delete(row.key, revision=row.revision)
        self.on_gone(row.value.name, row.revision)

    async def read_again(self, namespace: Namespace) -> None:
        """Learn what another wrote. Raises BusError."""
        row = await self._table.get(namespace)
        if row is not None:
            self.apply(row)

    def apply(self, row: Row[NamespaceRecord]) -> None:
        """Take in a record as it was read or written."""
        namespace, known = row.value.name, self._rows.get(row.value.name)
        if (known is not None and known.revision >= row.revision) or self._gone.get(namespace, 0) > row.revision:
            return
        self._rows[namespace] = row
        if row.value.state in SERVED:
            self._open(namespace)
        else:
            self._close(namespace)
        self._work.on_namespace(row.value)
        self._tell()

    def on_gone(self, namespace: Namespace, revision: int) -> None:
        """The record was taken away."""
        known = self._rows.get(namespace)
        if known is not None and known.revision > revision:
            return
        self._gone[namespace] = max(revision, self._gone.get(namespace, 0))
        self._rows.pop(namespace, None)
        self._ends.pop(namespace, None)
        self._close(namespace)
        self._work.on_namespace_gone(namespace)
        self._tell()

    def on_job_ended(self, namespace: Namespace) -> None:
        """A job of the namespace has ended: it may have been the last that kept it."""
        record = self.record(namespace)
        if record is not None and record.state is NamespaceState.DROPPING:
            self._ends[namespace] += 1
            self._tell()

    def making(self, namespace: Namespace, *, is_made: bool) -> None:
        """This controller makes its streams, or has made them, or does not."""
        (self._making.add if is_made else self._making.discard)(namespace)

    def _tell(self) -> None:
        self._bus.spawn(self._notify(), "word of a namespace")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---- what runs for each -----------------------------------------------------------------------------

    def _open(self, namespace: Namespace) -> None:
        if namespace not in self._served:
            assert self._tasks is not None  # noqa: S101
            served = self._served[namespace] = _Served()
            served.task = self._tasks.create_task(self._serve(namespace, served, list(self._closing)))

    def _close(self, namespace: Namespace) -> None:
        served = self._served.pop(namespace, None)
        if served is not None and served.task is not None:
            self._closing.add(served.task)
            served.task.add_done_callback(self._on_closed)
            served.task.cancel()

    def _on_closed(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        self._tell()

    @property
    def is_closing(self) -> bool:
        """True while something runs yet for one that is served no longer."""
        return bool(self._closing)

    async def _serve(self, namespace: Namespace, served: _Served, before: list[asyncio.Task[None]]) -> None:
        """Keep up with a namespace's records, and act on them once this controller leads, until cancelled."""
        try:
            if before:
                await asyncio.wait(before)  # the namespace of this name that was there before may be among them
            async with asyncio.TaskGroup() as tasks:
                await self._work.load_namespace(namespace)
                self.tables[namespace] = records_table(self._bus, namespace)
                read = asyncio.Event()
                tasks.create_task(self._work.watch_records(namespace, read))
                await read.wait()
                served.opened.set()
                await self._work.lead_namespace(namespace, tasks)
                self._led.add(namespace)
                self._work.follow_up_all(namespace)
                served.led.set()
                self._tell()
        except* (StreamNotFoundError, NoRespondersError) as errors:
            if self._served.get(namespace) is served:
                raise
            log.info("namespace %s was deleted while it was read: %s", namespace, errors.exceptions[0])
        finally:
            self._led.discard(namespace)
            self.tables.pop(namespace, None)
            self._work.forget_namespace(namespace)
            served.opened.set()
            served.led.set()
