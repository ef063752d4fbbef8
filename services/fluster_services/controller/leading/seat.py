"""The leader's seat on the bus: taken, kept, given back, and guarded against the controller that had it before.

The seat is one record for the cluster. Verdicts are fenced where they are written: in each namespace's bucket of jobs lies
a fence, and a verdict is stored only together with a check that the fence is still this leader's. A controller that takes the seat
raises all the fences before it leads:

    write the seat ─► read the fences ─► write the seat again ─► write each fence at the revision that was read

The second write proves that the seat was its own after the fences were read. So one that took it later finds these fences, or
changes them first, and then they are read again. In the end they are those of the last who took the seat.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core import buckets
from fluster_bus.core.errors import BusError, RevisionConflictError, StreamNotFoundError
from fluster_bus.messages import Fence, Leader, Namespace
from fluster_bus.running.coroutines import wait_set
from fluster_bus.running.fence_clock import fence_clock
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.leadership import Leadership, LeadershipState
from fluster_bus.storage.streams import fences_table, leaders_table
from fluster_bus.storage.tables import Guard, Row
from fluster_services.daemon import StartOverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fluster_bus.connection.bus import Bus
    from fluster_bus.storage.tables import Table

log = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR_S, _PAUSE_AFTER_CONFLICT_S = 0.2, 0.05
_LATE_S = 1.0
_RELEASE_TIMEOUT_S = 1.0


class DeposedError(StartOverError):
    """Another controller leads: what this one knows and plans is out of date."""


class RestoringError(StartOverError):
    """The store is being restored: what this controller knows is of streams that are gone."""


async def wait_no_restore(bus: Bus) -> None:
    """Return when the store is not being restored: before that there is nothing to make, to read or to lead."""
    leaders = leaders_table(bus)
    with suppress(StreamNotFoundError):
        row = await leaders.get(buckets.LEADER_KEY)
        if row is None or not row.value.restoring:
            return
        log.warning(
            "the store is being restored: waiting for the end of `fluster backup restore`, which is to be run again with --replace if it "
            "has ended in the middle"
        )
        async with aclosing(leaders.watch(buckets.LEADER_KEY)) as changes:
            is_marked = False
            async for change in changes:
                if isinstance(change, CaughtUp):
                    if is_marked:
                        continue
                elif isinstance(change, Row) and change.value.restoring:
                    is_marked = True
                    continue
                log.info("the store is restored")
                return


class Seat:
    """One controller's place in the line for the lead. `run` takes the seat when it may, and keeps it.

    With `in_place` it takes the seat of a leader with the same id at once: it was started in that one's place.
    `leaders` and `fences` are where they are stored, else the cluster's.
    """

    def __init__(
        self,
        bus: Bus,
        namespaces: Sequence[Namespace],
        *,
        controller_id: str,
        lease_s: float,
        in_place: bool = True,
        clock: Callable[[], float] = fence_clock,
        leaders: Table[Leader] | None = None,
        fences: dict[Namespace, Table[Fence]] | None = None,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self.me = Leader(controller_id=controller_id, instance=secrets.token_hex(8), since=time.time())
        self.leadership = Leadership(
            instance=self.me.instance, lease_s=lease_s, succeeds=controller_id if in_place else None
        )
        self._leaders = leaders if leaders is not None else leaders_table(bus)
        self._fences = fences if fences is not None else {each: fences_table(bus, each) for each in namespaces}
        self._fenced_at: dict[Namespace, int] = {}  # {namespace: the revision of this leader's fence}
        self._passed: defaultdict[Namespace, int] = defaultdict(int)  # how far the records have been read
        self._leads = False
        self._holder: Leader | None = None  # as it was seen last
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()

    # ---- what others ask --------------------------------------------------------------------------------

    @property
    def holder(self) -> Leader | None:
        """Who leads, as far as this controller knows."""
        return self._holder

    @property
    def leads(self) -> bool:
        """True once the seat is its own and the fences of all namespaces that were there then are raised; it may have been
        deposed without knowing.
        """
        return self._leads

    def add(self, namespace: Namespace) -> None:
        """A namespace has come: its fence is raised, now or when this controller takes the lead."""
        if namespace not in self._fences:
            self._fences[namespace] = fences_table(self._bus, namespace)
            self._wake.set()

    def remove(self, namespace: Namespace) -> None:
        """A namespace is gone."""
        self._fences.pop(namespace, None)
        self._fenced_at.pop(namespace, None)
        self._passed.pop(namespace, None)

    async def wait_seen(self) -> None:
        """Return when it leads, or stands by for another."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._leads or self._stands_by())

    def _stands_by(self) -> bool:
        return self._holder is not None and self.leadership.state(self._clock()) is LeadershipState.FOLLOWER

    async def wait_leads(self) -> None:
        """Return when it leads."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._leads)

    async def wait_led(self, namespace: Namespace) -> None:
        """Return when it leads, and has read every record of the namespace that was written under the leader before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._leads and self._has_passed_fence(namespace))

    def _has_passed_fence(self, namespace: Namespace) -> bool:
        fenced_at = self._fenced_at.get(namespace)
        return fenced_at is not None and self._passed[namespace] >= fenced_at

    async def wait_sure(self) -> None:
        """Return when no other can lead; never when one does: then the end of `run` cancels the waiting task."""
        while not (self._leads and self.leadership.is_sure(self._clock())):
            async with self._changed:
                await self._changed.wait()

    async def wait_led_since(self) -> None:
        """Return when it was the leader at some moment since this was called; never when another was by then.

        As `wait_sure`, but also where nothing can be stored, as on a full disk: that the seat still is its own can then be
        read, as long as one server alone keeps it. Others may take the seat a moment later, but what they count begins then.
        """
        while not (self._leads and self.leadership.is_sure(self._clock())):
            if self._leads and await self._stands():
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_AFTER_ERROR_S), self._changed:
                    await self._changed.wait()

    async def _stands(self) -> bool:
        try:
            # A copy at a server that is cut off from the others may tell what was, so there only writing proves anything.
            if await self._leaders.copies() > 1:
                return False
            row = await self._leaders.get(buckets.LEADER_KEY)
        except BusError as error:
            log.info("the leader's seat could not be read: %s", error)
            return False
        return row is not None and row.value.instance == self.me.instance

    def guard(self, namespace: Namespace) -> Guard:
        """What a verdict in the namespace is stored together with."""
        return Guard(buckets.LEADER_KEY, self._fenced_at.get(namespace, 0), buckets.VERDICTS_KEY)

    async def check_fence(self, namespace: Namespace) -> None:
        """Raise DeposedError when another controller's fence stands in the namespace."""
        fences = self._fences.get(namespace) or fences_table(
            self._bus, namespace
        )  # also of one that has gone meanwhile
        row = await fences.get(buckets.LEADER_KEY)
        if row is None or row.value.instance != self.me.instance:
            raise self._deposed()

    def on_passed(self, namespace: Namespace, revision: int) -> None:
        """Every record of the namespace up to this revision has been taken in."""
        self._passed[namespace] = max(revision, self._passed[namespace])
        if namespace in self._fenced_at:
            self._bus.spawn(self._tell(), "word of what was read")

    # ---- taking and keeping it --------------------------------------------------------------------------

    async def run(self) -> None:
        """Take the seat when it may be taken, and keep it, until cancelled. Raises DeposedError."""
        self._bus.on_reconnect(self._on_interruption)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self.keep())
        finally:
            self._bus.off(self._on_interruption)

    async def _watch(self) -> None:
        """See who writes the seat."""
        async with aclosing(self._leaders.watch(buckets.LEADER_KEY)) as changes:
            async for change in changes:
                if isinstance(change, Row):
                    self._on_row(change)
                elif isinstance(change, CaughtUp):
                    if self._holder is None:
                        self.leadership.on_free(0, now=self._clock())
                else:
                    self.leadership.on_free(change.revision, now=self._clock())
                    self._holder = None
                self._wake.set()
                await self._tell()

    def _on_row(self, row: Row[Leader]) -> None:
        if row.value.restoring:
            raise RestoringError("the store is being restored")
        self.leadership.on_seat(
            row.revision, instance=row.value.instance, holder=row.value.controller_id, now=self._clock()
        )
        self._holder = row.value

    def _on_interruption(self) -> None:
        self.leadership.on_interruption(now=self._clock())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def keep(self) -> None:
        """Do what is due, each time that it is, until cancelled; `run` also watches who writes the seat. Raises DeposedError."""
        while True:
            await self.step()
            now = self._clock()
            pause_s = self._pause_s(now)
            if not await wait_set(self._wake, pause_s) and self._clock() - now > pause_s + _LATE_S:
                self._on_interruption()  # this process was stopped, or the machine slept: nothing could be heard
            self._wake.clear()

    def _pause_s(self, now: float) -> float:
        is_any_left = not self._leads or self._fences.keys() != self._fenced_at.keys()
        has_fences_to_raise = is_any_left and self.leadership.state(now) is LeadershipState.LEADER
        return 0.0 if has_fences_to_raise else self.leadership.pause_s(now)

    async def step(self) -> None:
        """Do what is due now. Raises DeposedError."""
        now = self._clock()
        state = self.leadership.state(now)
        if state is LeadershipState.DEPOSED:
            raise self._deposed()
        if state is LeadershipState.FOLLOWER or self._pause_s(now) > 0:
            return
        try:
            await self._write()
            if self.leadership.state(self._clock()) is LeadershipState.LEADER:
                await self._raise_fences()
                if not self._leads:
                    self._leads = True
                    log.info("%s leads", self.me.controller_id)
        except RevisionConflictError:
            await asyncio.sleep(_PAUSE_AFTER_CONFLICT_S)
            await self.look()
        except BusError as error:
            log.info("the leader's seat could not be written, and is tried again: %s", error)
            await wait_to_retry(self._bus)
        await self._tell()

    async def _write(self) -> None:
        sent_at = self._clock()
        revision = await self._leaders.update(buckets.LEADER_KEY, self.me, self.leadership.revision)
        self.leadership.on_written(revision, sent_at=sent_at)
        self._holder = self.me

    async def look(self) -> None:
        """Learn who was first; perhaps it was this controller itself, by a write whose acknowledgement was lost."""
        try:
            row = await self._leaders.get(buckets.LEADER_KEY)
        except BusError as error:
            log.info("the leader's seat could not be read, and is tried again: %s", error)
            return
        if row is not None:
            self._on_row(row)

    async def _raise_fences(self) -> None:
        left = {name: fences for name, fences in self._fences.items() if name not in self._fenced_at}
        if not left:
            return
        present = {namespace: await fences.get(buckets.LEADER_KEY) for namespace, fences in left.items()}
        await self._write()
        fence = Fence.of(self.me)
        for namespace, row in present.items():
            revision = row.revision if row is not None else 0
            fenced_at = await left[namespace].update(buckets.LEADER_KEY, fence, revision)
            if namespace in self._fences:  # else it has gone meanwhile
                self._fenced_at[namespace] = fenced_at

    def _deposed(self) -> DeposedError:
        holder = self._holder.controller_id if self._holder is not None else "no controller"
        return DeposedError(f"{self.me.controller_id} no longer leads, {holder} does")

    # ---- giving it back ---------------------------------------------------------------------------------

    async def release(self) -> None:
        """Have another lead at once; it is not waited for longer than a second."""
        if not self._leads:
            return
        self._leads = False
        try:
            async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                row = await self._leaders.get(buckets.LEADER_KEY)
                if row is not None and row.value.instance == self.me.instance:
                    await self._leaders.delete(buckets.LEADER_KEY, revision=row.revision)
        except (BusError, TimeoutError) as error:
            log.info("the leader's seat is left as it is, to be taken when its lease is over: %s", error)
