"""Answers operators, who have namespaces added, changed, dropped and listed. Tenants cannot ask: their users may not send there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from pydantic import ValidationError

from fluster_bus.core import subjects
from fluster_bus.core.errors import KeyExistsError, RevisionConflictError, ServiceError
from fluster_bus.core.names import check_namespace
from fluster_bus.messages import Done, JobStatus, Namespace, NamespaceQuota, NamespaceRecord, NamespaceState
from fluster_bus.messages.namespaces import (
    NAMESPACE_IN_USE,
    NAMESPACE_REFUSED,
    NAMESPACE_UNKNOWN,
    NamespaceAdd,
    NamespaceChange,
    NamespaceDrop,
    NamespaceList,
    NamespaceSet,
    NamespaceStatus,
)
from fluster_bus.storage.provisioning import used_bytes
from fluster_services.controller.answers.requests import present_pace
from fluster_services.job_lifecycle import job_status

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_services.controller.answers.requests import Requests
    from fluster_services.controller.leading.seat import Seat
    from fluster_services.controller.namespace_reconciler import NamespaceReconciler, ServerUsers
    from fluster_services.controller.namespaces import NamespaceSet as Namespaces
    from fluster_services.controller.state.job_index import JobIndex
    from fluster_services.controller.store_room import StoreSetup

_ANSWERED_S = 1.0  # by then it is said how far it is: who asks sends the request again, to learn when it is done
_TRIES = 20  # of those who change a namespace at the same time, each try lets one through
_WAITING, _RUNNING = (JobStatus.PENDING,), (JobStatus.BUILDING, JobStatus.RUNNING)
_LINE = "operators of the cluster"  # with a blank, which no namespace has
_NAMED_JOBS = 3


def why_not_added(known: NamespaceRecord, request: NamespaceAdd) -> str | None:
    """Why a request cannot have the namespace, which is there; None when it is the one that made it."""
    if known.state in (NamespaceState.DROPPING, NamespaceState.DELETING):
        if known.added_by == request.request_id:
            return None  # it is being taken back, and then the reason is returned
        return f"namespace {known.name!r} is being dropped: add it again when it is gone (`fluster namespace ls`)"
    if known.added_by == request.request_id:
        return None
    return f"there is a namespace {known.name!r} already: `fluster namespace set {known.name}` changes its quota and weight"


def with_changes(known: NamespaceRecord, request: NamespaceSet) -> NamespaceRecord:
    """The record as it is asked for. Raises ValueError."""
    quota = NamespaceQuota.model_validate_json(json.dumps({**known.quota.model_dump(), **request.quota}))
    weight = known.weight if request.weight is None else request.weight
    return known.model_copy(update={"quota": quota, "weight": weight})


class NamespaceRequests:
    """What operators ask for."""

    def __init__(
        self,
        bus: Bus,
        seat: Seat,
        *,
        namespaces: Namespaces,
        namespace_reconciler: NamespaceReconciler,
        store: StoreSetup,
        job_index: JobIndex,
        namespaces_are_fixed: str | None,
        server_users: ServerUsers | None,
    ) -> None:
        self._bus = bus
        self._seat = seat
        self._namespaces = namespaces
        self._reconciler = namespace_reconciler
        self._store = store
        self._job_index = job_index
        self._namespaces_are_fixed = namespaces_are_fixed
        self._server_users = server_users

    async def serve(self, bus: Bus, requests: Requests) -> None:
        """Answer on that connection from now on, in turn with other requests."""
        queue = requests.queue(lambda _subject: _LINE)
        await bus.serve(subjects.namespaces_verb("add"), NamespaceAdd, self._add, request_queue=queue)
        await bus.serve(subjects.namespaces_verb("set"), NamespaceSet, self._set, request_queue=queue)
        await bus.serve(subjects.namespaces_verb("drop"), NamespaceDrop, self._drop, request_queue=queue)
        await bus.serve(subjects.namespaces_verb("list"), Done, self._list, request_queue=queue)

    async def _add(self, request: NamespaceAdd, _asked: str) -> NamespaceChange:
        await self._seat.wait_sure()
        name = Namespace(check_namespace(request.name))
        if (fixed := self._namespaces_are_fixed) is not None:
            raise ServiceError(NAMESPACE_REFUSED, f"namespace {name!r} cannot be added: {fixed}")
        if self._namespaces.record(name) is None:
            self._raise_refusal(name, request)
            users = self._server_users
            if users is not None and not await users.let_in(name):
                return NamespaceChange(done=False)
            await self._begin(name, request)
        known = self._namespaces.record(name)
        if known is not None and (why := why_not_added(known, request)) is not None:
            raise ServiceError(NAMESPACE_REFUSED, why)
        is_done = await self._wait(lambda: self._namespaces.is_acted_on(name) or self._namespaces.record(name) is None)
        known = self._namespaces.record(name)
        if known is None:
            self._raise_refusal(name, request)
        return NamespaceChange(done=is_done and known is not None, record=known)

    async def _begin(self, name: Namespace, request: NamespaceAdd) -> None:
        record = NamespaceRecord(
            name=name,
            quota=request.quota,
            weight=request.weight,
            state=NamespaceState.ADDING,
            created_at=time.time(),
            added_by=request.request_id,
        )
        try:
            await self._namespaces.create(record)
        except KeyExistsError:  # by a controller that is being started with it
            await self._namespaces.read_again(name)

    def _raise_refusal(self, name: Namespace, request: NamespaceAdd) -> None:
        why = self._reconciler.why_refused(name, request.request_id)
        if why is not None:
            raise ServiceError(NAMESPACE_REFUSED, f"namespace {name!r} cannot be added: {why}")

    async def _set(self, request: NamespaceSet, _asked: str) -> NamespaceChange:
        await self._seat.wait_sure()
        name = Namespace(check_namespace(request.name))
        for _ in range(_TRIES):
            row = self._namespaces.row(name)
            if row is None:
                raise _unknown(name)
            try:
                record = with_changes(row.value, request)
            except ValidationError as error:
                problem = error.errors(include_url=False, include_context=False)[0]
                place = ".".join(str(each) for each in problem["loc"])
                why = f"{place} of namespace {name!r} cannot be {problem['input']!r}: {problem['msg']}"
                raise ServiceError(NAMESPACE_REFUSED, why) from error
            try:
                await self._namespaces.update(record, row.revision)
            except RevisionConflictError:
                await self._namespaces.read_again(name)
                continue
            return NamespaceChange(record=record)
        raise ServiceError(NAMESPACE_REFUSED, f"namespace {name!r} is changed by too many at once: try again")

    async def _drop(self, request: NamespaceDrop, _asked: str) -> NamespaceChange:
        await self._seat.wait_sure()
        name = Namespace(check_namespace(request.name))
        row = self._namespaces.row(name)
        if row is None:
            raise _unknown(name)
        if row.value.state is NamespaceState.ADDING:
            raise ServiceError(NAMESPACE_REFUSED, f"namespace {name!r} is being added: drop it when that is done")
        if row.value.state is NamespaceState.ACTIVE:
            if not request.force:
                self._check_unused(name)
            with suppress(RevisionConflictError):  # who asks sends it again
                await self._namespaces.update(
                    row.value.model_copy(update={"state": NamespaceState.DROPPING}), row.revision
                )
        is_gone = await self._wait(lambda: self._namespaces.record(name) is None)
        unfinished = len(self._reconciler.unfinished(name))
        return NamespaceChange(done=is_gone, record=self._namespaces.record(name), unfinished=unfinished)

    def _check_unused(self, name: Namespace) -> None:
        unfinished = self._reconciler.unfinished(name)
        if unfinished:
            some = ", ".join(key.job_id for key in unfinished[:_NAMED_JOBS])
            more = f" and {len(unfinished) - _NAMED_JOBS} more" if len(unfinished) > _NAMED_JOBS else ""
            raise ServiceError(
                NAMESPACE_IN_USE,
                f"namespace {name!r} has unfinished jobs: {some}{more}; wait for them or stop them, or have them ended with "
                f"it (`fluster namespace drop {name} --force`)",
            )

    async def _list(self, _request: Done, _asked: str) -> NamespaceList:
        await self._seat.wait_sure()
        counts = await self._counts()
        share = sum(self._store.shares.values())
        found = []
        for record in self._namespaces.records():
            waiting, running = counts.get(record.name, (0, 0))
            used = await used_bytes(self._bus, record.name)
            found.append(
                NamespaceStatus(
                    record=record, waiting_jobs=waiting, running_jobs=running, store_used=used, store_share=share
                )
            )
        return NamespaceList(namespaces=tuple(found))

    async def _counts(self) -> dict[Namespace, tuple[int, int]]:
        """{namespace: (jobs that wait, jobs that run)}."""
        pace, job_index = present_pace(), self._job_index
        counts: dict[Namespace, tuple[int, int]] = {}
        for key in job_index.keys():  # noqa: SIM118 - it is not a dict
            await pace.step()
            entry = job_index.get(key)
            if entry is None or entry.job is None or entry.job.value.is_over:
                continue
            status = job_status(entry.job.value, entry.task_records())
            waiting, running = counts.get(key.namespace, (0, 0))
            counts[key.namespace] = (waiting + (status in _WAITING), running + (status in _RUNNING))
        return counts

    async def _wait(self, is_so: Callable[[], bool]) -> bool:
        try:
            async with asyncio.timeout(_ANSWERED_S):
                await self._namespaces.wait_changed(is_so)
        except TimeoutError:
            return False
        return True


def _unknown(name: Namespace) -> ServiceError:
    return ServiceError(
        NAMESPACE_UNKNOWN, f"the cluster has no namespace {name!r}: `fluster namespace ls` lists those that there are"
    )
