"""Keeps every controller from leading while the store is restored.

The program that restores takes the leader's seat, as a controller would, and marks it. A controller that sees the mark starts over and waits until it is
gone, as does one that starts meanwhile; it stays when a restore ends in the middle, since a controller must not lead what is only partly there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import (
    BackupError,
    BusError,
    KeyExistsError,
    NoRespondersError,
    RequestTimeoutError,
    RevisionConflictError,
    ServiceError,
)
from fluster_bus.core.roles import DEFAULT_NAMESPACE
from fluster_bus.messages.records import Leader
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.provisioning import ensure_seat
from fluster_bus.storage.streams import leaders_table
from fluster_bus.storage.tables import Row

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

log = logging.getLogger(__name__)

_RENEWED_EACH_S = 1.0
_SILENT_S = 4 * _RENEWED_EACH_S  # after which another restore has ended, in the middle
_UNANSWERED = 5
_TAKEN_WITHIN_S, _LEFT_WITHIN_S, _PAUSE_S = 10.0, 30.0, 0.1


class RestoringLead:
    """The leader's seat, held by the restoring program. Make one with `RestoringLead.take`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._leaders = leaders_table(bus)
        self._me = Leader(
            controller_id="fluster backup restore", instance=secrets.token_hex(8), since=time.time(), restoring=True
        )
        self._revision = 0
        self._lost = False
        self.found_half = False  # another restore had ended in the middle
        self._renewing: asyncio.Task[None] | None = None

    @classmethod
    async def take(cls, bus: Bus) -> RestoringLead:
        """Return once no controller leads. Raises BackupError, StorageError, BusError."""
        lead = cls(bus)
        await ensure_seat(bus)
        await lead._take()
        lead._renewing = asyncio.create_task(lead._renew())
        try:
            await lead._wait_alone()
        except BaseException:
            await lead.end(is_whole=not lead.found_half)
            raise
        return lead

    async def _take(self) -> None:
        deadline = time.monotonic() + _TAKEN_WITHIN_S
        while True:
            row = await self._leaders.get(buckets.LEADER_KEY)
            if row is not None and row.value.restoring:
                await self._wait_silent(row)
                self.found_half = True
            try:
                if row is None:
                    self._revision = await self._leaders.create(buckets.LEADER_KEY, self._me)
                else:
                    self._revision = await self._leaders.update(buckets.LEADER_KEY, self._me, row.revision)
            except (RevisionConflictError, KeyExistsError) as error:  # the leader renewed it at this moment
                if time.monotonic() >= deadline:
                    raise BackupError(
                        "the leader's seat could not be taken: stop the controllers, and try again"
                    ) from error
            else:
                return

    async def _wait_silent(self, row: Row[Leader]) -> None:
        """Return when the program that marked the seat has ended. Raises BackupError when it goes on."""
        await asyncio.sleep(_SILENT_S)
        now = await self._leaders.get(buckets.LEADER_KEY)
        if now is None or now.revision != row.revision:
            raise BackupError("this cluster is being restored at this moment: wait for the end of that")

    async def _renew(self) -> None:
        while not self._lost:
            await asyncio.sleep(_RENEWED_EACH_S)
            try:
                self._revision = await self._leaders.update(buckets.LEADER_KEY, self._me, self._revision)
            except RevisionConflictError:
                row = await self._leaders.get(buckets.LEADER_KEY)
                if row is not None and row.value.instance == self._me.instance:
                    self._revision = row.revision  # a write that was not acknowledged
                else:
                    self._lost = True
            except BusError as error:
                log.info("the leader's seat is renewed later: %s", error)

    async def _wait_alone(self) -> None:
        """Return when no controller answers requests: the leader has seen that it no longer leads."""
        deadline = time.monotonic() + _LEFT_WITHIN_S
        where = subjects.ensure_namespace(DEFAULT_NAMESPACE)  # which none but a leader hears
        unanswered = 0
        while unanswered < _UNANSWERED:
            try:
                await self._bus.request(where, b"{}", timeout_s=_RENEWED_EACH_S)
            except NoRespondersError:
                return
            except RequestTimeoutError:
                unanswered += 1  # one that is stopped leads nothing when it goes on
            except ServiceError:
                pass  # it knows no such namespace
            if time.monotonic() >= deadline:
                raise BackupError(
                    "a controller goes on though the store is to be restored: is it of an older release? Stop all controllers, and "
                    "try again"
                )
            await asyncio.sleep(_PAUSE_S)

    async def copies(self) -> int:
        """How many copies the servers can have of a stream."""
        return await self._leaders.copies()

    def check(self) -> None:
        """Raise BackupError when another process has taken the seat."""
        if self._lost:
            raise BackupError(
                "another one took the leader's seat while this restored: stop all controllers, and try again"
            )

    async def end(self, *, is_whole: bool) -> None:
        """Have controllers lead again what is there, or leave the mark where only a part of a cluster is there."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        if is_whole:
            await retried(lambda _left_s: self._give_back(), on=(BusError,), timeout_s=_TAKEN_WITHIN_S)

    async def _give_back(self) -> None:
        row = await self._leaders.get(buckets.LEADER_KEY)
        if row is not None and row.value.instance == self._me.instance:
            with suppress(RevisionConflictError):
                await self._leaders.delete(buckets.LEADER_KEY, revision=row.revision)
