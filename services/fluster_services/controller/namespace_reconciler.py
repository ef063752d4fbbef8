"""Completes what was begun with namespaces: the leader makes their streams, ends their jobs, deletes their streams.

What is to be done follows from the record alone, so nothing is lost when a leader is killed in the middle. What cannot be given
room is taken back: its record goes to DELETING, as if it was dropped, and the reason is returned to the one who asked for it.

On a machine's own cluster it also asks the supervisor to let users of further namespaces in (`fluster_services/local_users.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core.errors import BusError, FaultLog, RevisionConflictError, StorageError, StorageTimeoutError
from fluster_bus.messages import Namespace, NamespaceRecord, NamespaceState
from fluster_bus.running.coroutines import TimeSlices, retried
from fluster_bus.storage.provisioning import delete_namespace
from fluster_services import job_lifecycle
from fluster_services.local_users import ADD, FORGET, JOBS_FOLDER

if TYPE_CHECKING:
    from fluster_bus.storage.tables import Row
    from fluster_services.controller.leading.record_writer import RecordWriter
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.namespaces import NamespaceSet
    from fluster_services.controller.state.job_index import JobIndex, JobKey
    from fluster_services.controller.store_room import StoreSetup

log = logging.getLogger(__name__)

_PAUSE_S = 0.2
_LOOK_S = 0.2
_KEPT_REFUSALS = 1_000
_ANSWERED_S = 1.0


class NamespaceReconciler:
    """Brings each namespace to the state that its record asks for."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        namespaces: NamespaceSet,
        store: StoreSetup,
        job_index: JobIndex,
        writer: RecordWriter,
        server_users: ServerUsers | None,
    ) -> None:
        self._bus = bus
        self._seat = seat
        self._namespaces = namespaces
        self._store = store
        self._job_index = job_index
        self._writer = writer
        self._server_users = server_users
        self._working: dict[Namespace, asyncio.Task[None]] = {}
        self._refusals: dict[tuple[Namespace, str], str] = {}  # {(namespace, request to add it): why it was not}
        self._faults = FaultLog(log)

    def why_refused(self, namespace: Namespace, request: str) -> str | None:
        """Why what that request asked for could not be made; None as long as it was not tried, or when it was."""
        return self._refusals.get((namespace, request))

    def unfinished(self, namespace: Namespace) -> list[JobKey]:
        """The jobs of a namespace that have not ended."""
        return self._job_index.open_jobs(namespace)

    async def run(self) -> None:
        """Complete what is begun, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for record in list(self._namespaces.records()):
                    if record.state is not NamespaceState.ACTIVE and record.name not in self._working:
                        task = self._working[record.name] = tasks.create_task(self._complete(record.name))
                        task.add_done_callback(lambda _task, name=record.name: self._working.pop(name))  # type: ignore[misc]
                await self._namespaces.wait_changed(self._is_any_begun)

    def _is_any_begun(self) -> bool:
        return any(
            each.state is not NamespaceState.ACTIVE and each.name not in self._working
            for each in self._namespaces.records()
        )

    async def _complete(self, namespace: Namespace) -> None:
        while (row := self._namespaces.row(namespace)) is not None and row.value.state is not NamespaceState.ACTIVE:
            await self._seat.wait_sure()
            try:
                match row.value.state:
                    case NamespaceState.ADDING:
                        await self._make(row)
                    case NamespaceState.DROPPING:
                        await self._end_jobs(row)
                    case NamespaceState.DELETING:
                        await self._delete(row)
            except RevisionConflictError:
                await self._read_again(namespace)
            except BusError as error:
                self._faults.warning("namespace %s stays %s for now: %s", namespace, row.value.state, error)
                await wait_to_retry(self._bus)

    async def _read_again(self, namespace: Namespace) -> None:
        try:
            await self._namespaces.read_again(namespace)
        except BusError as error:
            log.info("the record of namespace %s is read later: %s", namespace, error)
        await asyncio.sleep(_PAUSE_S)

    async def _make(self, row: Row[NamespaceRecord]) -> None:
        namespace = row.value.name
        self._namespaces.making(namespace, is_made=True)
        try:
            await self._store.divide()
            await self._move(row, NamespaceState.ACTIVE)
        except StorageTimeoutError:
            raise  # whether there is room is not known yet
        except StorageError as error:
            log.warning("namespace %s is not added: %s", namespace, error)
            self._refusals[namespace, row.value.added_by] = str(error)
            if len(self._refusals) > _KEPT_REFUSALS:
                del self._refusals[next(iter(self._refusals))]
            await self._move(row, NamespaceState.DELETING)
        finally:
            self._namespaces.making(namespace, is_made=False)

    async def _end_jobs(self, row: Row[NamespaceRecord]) -> None:
        """Have its jobs stopped, and return when none is left, or when something else is wanted of it."""
        namespace, slices = row.value.name, TimeSlices()
        await self._namespaces.wait_changed(lambda: self._namespaces.is_acted_on(namespace) or self._is_past(row))
        while True:
            ends = self._namespaces.ends(namespace)
            unfinished = self.unfinished(namespace)
            if not unfinished:
                break
            for key in unfinished:
                await slices.step()
                entry = self._job_index.get(key)
                if entry is None or entry.job is None:
                    continue
                killed = job_lifecycle.request_job_kill(entry.job.value, reason=f"namespace {namespace} is dropped")
                if killed is not None:
                    await self._writer.write(killed, entry.job.revision)
            await self._namespaces.wait_changed(
                lambda ends=ends: self._namespaces.ends(namespace) != ends or self._is_past(row)  # type: ignore[misc]
            )
            if self._is_past(row):
                return
            await asyncio.sleep(_LOOK_S)  # many end together, and each look is at all jobs
        await self._move(row, NamespaceState.DELETING)

    def _is_past(self, row: Row[NamespaceRecord]) -> bool:
        known = self._namespaces.row(row.value.name)
        return known is None or known.revision != row.revision

    async def _delete(self, row: Row[NamespaceRecord]) -> None:
        namespace = row.value.name
        # Nothing here reads or writes it from now on.
        await self._namespaces.wait_changed(
            lambda: not self._namespaces.is_served(namespace) and not self._namespaces.is_closing
        )
        await delete_namespace(self._bus, namespace)
        if (users := self._server_users) is not None:
            users.forget(namespace)  # first: who adds it anew has them let in after that
        await self._namespaces.remove(row)
        log.info("namespace %s is gone", namespace)
        await self._divide_again()

    async def _divide_again(self) -> None:
        """What it had is the others' now."""
        try:
            await self._store.divide()
        except StorageError as error:
            log.warning("the room that a namespace had is left to the next start of a controller: %s", error)

    async def _move(self, row: Row[NamespaceRecord], state: NamespaceState) -> None:
        await self._namespaces.update(row.value.model_copy(update={"state": state}), row.revision)


class LocalUsers:
    """The users of a local cluster's server."""

    def __init__(self, store_dir: Path, wishes: int) -> None:
        self._folder = store_dir / JOBS_FOLDER
        self._wishes = wishes

    async def let_in(self, namespace: str) -> bool:
        """Whether the server lets in the users of that namespace, within a second: it is to be asked again if it does not yet."""
        file = self._folder / f"{namespace}.json"
        self._wish(ADD, namespace)

        async def connect(_left_s: float) -> None:
            bus = await Bus.connect(BusAddress.parse(str(file)), name="looks-whether-it-is-let-in")
            await bus.close()

        try:
            # There is no file yet, or the server reads its configuration at this moment.
            await retried(connect, on=(BusError,), timeout_s=_ANSWERED_S)
        except BusError:
            return False
        return True

    def forget(self, namespace: str) -> None:
        """The namespace is gone: its users need not be let in at the next start."""
        self._wish(FORGET, namespace)

    def _wish(self, verb: str, namespace: str) -> None:
        with suppress(BlockingIOError):  # the supervisor is stopped: what is asked again is wished again
            os.write(self._wishes, f"{verb} {namespace}\n".encode())


class ServerUsers(Protocol):
    """The users of a server with passwords that the cluster's own supervisor keeps."""

    async def let_in(self, namespace: str, /) -> bool:
        """Have the users of a namespace let in; False when that takes longer, and is to be asked again."""

    def forget(self, namespace: str, /) -> None:
        """The namespace is gone: have its users let in no more from the cluster's next start on."""
