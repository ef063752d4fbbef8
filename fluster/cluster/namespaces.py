"""Asks the controller for namespaces, as an operator, until what was asked for is done.

A request may be sent again, to another controller as well: what was begun is written on the bus, and the next leader
goes on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.core.errors import RequestTimeoutError, ServiceError
from fluster_bus.messages import Done, NamespaceQuota, NamespaceRecord
from fluster_bus.messages.namespaces import (
    NAMESPACE_UNKNOWN,
    NamespaceAdd,
    NamespaceChange,
    NamespaceDrop,
    NamespaceList,
    NamespaceSet,
    NamespaceStatus,
    QuotaName,
)

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_bus.messages.parts.model import Message

_PAUSE_S = 0.05
_ALL = NamespaceQuota()


class NamespaceAdmin:
    """What an operator may have done with namespaces. Controllers that are away are waited for as long as
    `patience_s`.
    """

    def __init__(self, bus: Bus, patience_s: float = 60.0) -> None:
        self._bus = bus
        self._patience_s = patience_s

    async def add(self, name: str, quota: NamespaceQuota = _ALL, *, weight: float = 1.0) -> NamespaceRecord:
        """Return when jobs of the new namespace are taken in. Raises ServiceError with the reason, BusError."""
        request = NamespaceAdd(name=name, request_id=secrets.token_hex(8), quota=quota, weight=weight)
        change = await self._until_done("add", request, time.monotonic() + self._patience_s)
        assert change.record is not None  # noqa: S101
        return change.record

    async def set(
        self, name: str, quota: Mapping[QuotaName, int | float | None], *, weight: float | None = None
    ) -> NamespaceRecord:
        """Change what is named of a quota, and the weight if it is given. Raises ServiceError, BusError."""
        request = NamespaceSet(name=name, quota=quota, weight=weight)
        change = await self._ask("set", request)
        assert change.record is not None  # noqa: S101
        return change.record

    async def drop(
        self, name: str, *, force: bool = False, on_waiting: Callable[[int], None] = lambda _unfinished: None
    ) -> None:
        """Return when nothing of the namespace is left. With `force` its jobs are ended first, which may take long:
        `on_waiting` gets how many are left. Raises ServiceError, BusError.
        """
        # What was there and is unknown later has been dropped: by this request, whose answer was lost, or by another's.
        is_begun = any(each.record.name == name for each in await self.list())
        request = NamespaceDrop(name=name, force=force)
        while True:
            try:
                change = await self._ask("drop", request)
            except ServiceError as error:
                if is_begun and error.code == NAMESPACE_UNKNOWN:
                    return
                raise
            if change.done:
                return
            on_waiting(change.unfinished)
            await asyncio.sleep(_PAUSE_S)

    async def list(self) -> list[NamespaceStatus]:
        """All namespaces, by name. Raises BusError."""
        reply = await self._bus.ask(subjects.namespaces_verb("list"), Done(), NamespaceList, timeout_s=self._patience_s)
        return [*reply.namespaces]

    async def _until_done(self, verb: str, request: Message, until: float) -> NamespaceChange:
        while True:
            change = await self._ask(verb, request)
            if change.done:
                return change
            if time.monotonic() >= until:
                raise RequestTimeoutError(
                    f"the namespace was not made within {self._patience_s:g} s: the controllers go on with it, as "
                    "`fluster namespace ls` shows"
                )
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, verb: str, request: Message) -> NamespaceChange:
        return await self._bus.ask(subjects.namespaces_verb(verb), request, NamespaceChange, timeout_s=self._patience_s)
