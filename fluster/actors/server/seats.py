"""The seat of an actor that has one live instance: taken and kept by writing it again and again.

Who may, and for how long, is decided by `fluster_bus.storage.leadership`. An instance writes a seat only at the revision that it saw
last, so of several that try one succeeds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from fluster.errors import ActorNameTakenError, SupersededError
from fluster_bus.connection.carrier import Carrier, wait_to_retry
from fluster_bus.core import buckets
from fluster_bus.core.errors import BusError, ClosedError, CredentialsError, RevisionConflictError, StreamNotFoundError
from fluster_bus.messages import ActorSeat
from fluster_bus.running.coroutines import wait_set
from fluster_bus.running.fence_clock import fence_clock
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.leadership import Leadership, LeadershipState
from fluster_bus.storage.registry import LEASE_S
from fluster_bus.storage.tables import Row

if TYPE_CHECKING:
    from fluster_bus.storage.tables import Table

log = logging.getLogger(__name__)

_LONGEST_LEASE_S = 3_600.0  # also where a tenant wrote more
_PAUSE_AFTER_ERROR_S = 0.2
_RELEASE_TIMEOUT_S = 1.0


class Seat:
    """One instance's place behind a name. `me.holder` may take it at once from an instance that had the same holder.

    Lives on the loop of the cluster's connection, but for `fence`.
    """

    def __init__(
        self,
        bus: Carrier,
        table: Table[ActorSeat],
        name: str,
        me: ActorSeat,
        *,
        loop: asyncio.AbstractEventLoop,
        lease_s: Callable[[], Awaitable[float]],
        clock: Callable[[], float] = fence_clock,
    ) -> None:
        self._bus = bus
        self._table = table
        self._name = name
        self._key = buckets.seat_key(name)
        self._me = me
        self._clock = clock
        self._loop = loop
        self._ask_lease_s = lease_s
        self._view = self._new_view(LEASE_S)
        self._other: ActorSeat | None = None  # who was seen there last
        self._is_alive = False  # that one has written since it was looked at first
        self._caught_up = False
        self._unseen: BusError | None = None  # why it could not be watched
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._over: SupersededError | None = None

    def _new_view(self, lease_s: float) -> Leadership:
        return Leadership(instance=self._me.instance, lease_s=lease_s, succeeds=self._me.holder or None)

    # ---- taking and keeping it --------------------------------------------------------------------------

    async def take(self, on_lost: Callable[[SupersededError], None]) -> None:
        """Return when the seat is its own, and keep it from then on; `on_lost` is called when another instance has it.

        One whose holder is silent for its lease is taken then. Raises ActorNameTakenError as soon as the holder is seen
        alive, ClosedError, and CredentialsError or StreamNotFoundError where the cluster has no place for seats.
        """
        lease_s = await self._ask_lease_s()
        self._me = self._me.model_copy(update={"lease_s": lease_s})  # the others wait for as long as this one counts on
        self._view = self._new_view(lease_s)
        self._bus.on_reconnect(self._on_interruption)
        self._tasks.append(asyncio.create_task(self._watch(), name=f"seat of {self._name}"))
        try:
            while self._view.state(self._clock()) is not LeadershipState.LEADER:
                if isinstance(self._unseen, CredentialsError | StreamNotFoundError) and not self._caught_up:
                    raise self._unseen
                if self._is_alive and self._view.state(self._clock()) is LeadershipState.FOLLOWER:
                    raise self._taken()
                await self._step()
        except BaseException:
            self._stop()
            raise
        self._tasks.append(asyncio.create_task(self._keep(on_lost), name=f"lease of the seat of {self._name}"))

    def _taken(self) -> ActorNameTakenError:
        who = self._other.who if self._other is not None else "another one"
        return ActorNameTakenError(
            f"{self._name!r} has one live instance only, and that is {who}: choose another name, or end that one first"
        )

    async def _watch(self) -> None:
        """See who writes the seat."""
        while True:
            try:
                async with aclosing(self._table.watch(self._key, passed=self._on_unreadable)) as changes:
                    async for change in changes:
                        if isinstance(change, Row):
                            self._on_row(change)
                        elif not isinstance(change, CaughtUp):
                            self._view.on_free(change.revision, now=self._clock())
                        elif not self._caught_up:
                            self._caught_up = True
                            self._view.on_free(0, now=self._clock())  # of no effect when the seat was seen
                        self._tell()
            except ClosedError:
                return
            except BusError as error:
                log.warning("the seat of %s cannot be watched: %s", self._name, error)
                self._unseen = error
                self._tell()
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    def _on_row(self, row: Row[ActorSeat]) -> None:
        seat = row.value
        if not seat.instance:
            self._other = None
            self._view.on_free(row.revision, now=self._clock())
            return
        lease_s = LEASE_S if seat.lease_s is None else min(_LONGEST_LEASE_S, seat.lease_s)
        self._view.on_seat(row.revision, instance=seat.instance, holder=seat.holder, lease_s=lease_s, now=self._clock())
        if seat.instance != self._me.instance:
            self._is_alive = self._caught_up
            self._other = seat

    def _on_unreadable(self, revision: int) -> None:
        """What was written there is not a seat, so it belongs to no instance: else it would hold the name forever."""
        self._other = None
        self._view.on_free(revision, now=self._clock())
        self._tell()

    def _on_interruption(self) -> None:
        self._view.on_interruption(now=self._clock())

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _step(self) -> None:
        """Write the seat when that is due, else wait until it is, or until another instance wrote it."""
        pause_s = self._view.pause_s(self._clock())
        if pause_s > 0:
            await wait_set(self._changed, pause_s)
            return
        try:
            sent_at = self._clock()
            revision = await self._table.update(self._key, self._me, self._view.revision)
            self._view.on_written(revision, sent_at=sent_at)
        except RevisionConflictError:
            await self._look()
        except ClosedError:
            raise
        except BusError as error:
            log.info("the seat of %s could not be written, and is tried again: %s", self._name, error)
            await wait_to_retry(self._bus)
        self._tell()

    async def _look(self) -> None:
        """Learn who was first; perhaps it was this one itself, by a write whose acknowledgement was lost."""
        try:
            row = await self._table.get(self._key)
        except BusError as error:
            log.info("the seat of %s could not be read: %s", self._name, error)
            row = None
        if row is not None:
            self._on_row(row)
        else:
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)  # it was taken away, as the watch will tell

    async def _keep(self, on_lost: Callable[[SupersededError], None]) -> None:
        try:
            while self._view.state(self._clock()) is not LeadershipState.DEPOSED:
                await self._step()
        except ClosedError:
            return
        except Exception:  # an instance that cannot keep it must not go on as if it did
            log.exception("the seat of %s cannot be kept", self._name)
        self._over = self._superseded()
        self._tell()
        log.warning("%s", self._over)
        on_lost(self._over)

    def _superseded(self) -> SupersededError:
        by = f": {self._other.who} has taken its place" if self._other is not None else ""
        return SupersededError(f"this instance of {self._name!r} did not tell in time that it is alive{by}")

    @property
    def predecessor(self) -> str | None:
        """The instance that had the seat last, if it did not give it back."""
        return self._other.instance if self._other is not None else None

    # ---- whether it still is its own --------------------------------------------------------------------

    @property
    def is_sure(self) -> bool:
        """True while no other instance can have taken it. From any thread."""
        return self._view.is_sure(self._clock())

    async def wait_sure(self) -> None:
        """Return when no other instance can have taken it. Raises SupersededError when one has."""
        while not self.is_sure:
            if self._over is not None:
                raise self._over
            await self._changed.wait()

    def fence(self) -> SupersededError | None:
        """None when no other instance can have taken the seat, which may have to be found out first. For other threads."""
        if self.is_sure:
            return None
        try:
            asyncio.run_coroutine_threadsafe(self.wait_sure(), self._loop).result()
        except SupersededError as error:
            return error
        except (RuntimeError, asyncio.CancelledError):  # the loop is closed, or about to be
            return self._superseded()
        return None

    # ---- giving it back ---------------------------------------------------------------------------------

    async def release(self) -> None:
        """Have another take it at once; it is not waited for longer than a second."""
        had_it = self._view.state(self._clock()) is LeadershipState.LEADER
        self._stop()
        self._over = self._over or self._superseded()
        self._tell()
        if not had_it:
            return
        free = ActorSeat(is_durable=self._me.is_durable)
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                await self._table.update(self._key, free, self._view.revision)
        except (BusError, TimeoutError) as error:
            log.info("the seat of %s is left as it is, to be taken when its lease is over: %s", self._name, error)

    def _stop(self) -> None:
        self._bus.off(self._on_interruption)
        for task in self._tasks:
            task.cancel()
