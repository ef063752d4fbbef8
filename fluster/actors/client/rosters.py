"""The members of the pools that a client uses, kept up by watching the registry."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from fluster.actors.protocol.members import Member
from fluster.errors import ActorNotFoundError
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import BusError, ClosedError, FaultLog, InvalidMessageError
from fluster_bus.messages import Endpoint, JobId
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.tables import Deleted, Row

log = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR_S = 0.5


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is new or has changed."""

    member: Member


@dataclass(frozen=True, slots=True)
class Left:
    """A member has ended."""

    endpoint_id: str
    reason: str = ""  # as far as it is known


@dataclass(frozen=True, slots=True)
class Synced:
    """All present members were reported. When there are none, whether calls are stored for the next one."""

    is_durable: bool = False


@dataclass(frozen=True, slots=True)
class WatchFailed:
    """The registry cannot be read."""

    error: BusError


Change = Joined | Left | Synced | WatchFailed


@dataclass
class Roster:
    """The members of one name. Its task tells `on_change` what happens, and wakes who waits."""

    name: str
    on_change: Callable[[str, Change], None]
    members: dict[str, Member] = field(default_factory=dict)  # {endpoint id: member}
    # {method: how often}, as told last, if by one that is gone.
    retries: Mapping[str, int] = field(default_factory=dict[str, int])
    is_synced: bool = False
    users: int = 0  # pools that need it
    error: BusError | None = None
    closed: Exception | None = None  # why nothing changes from now on
    _last_jobs: set[JobId] = field(default_factory=set)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _faults: FaultLog = field(default_factory=lambda: FaultLog(log))

    @property
    def jobs(self) -> set[JobId]:
        """Whose tasks the members are; when there are none, whose the last ones were."""
        return {member.job_id for member in self.members.values() if member.job_id is not None} or self._last_jobs

    def present(self) -> list[Member]:
        """Who takes calls, the oldest first."""
        return [member for member in self.members.values() if not member.leaving]

    async def change(self) -> None:
        """Return after the next change. Raises why there will be none."""
        if self.closed is None:
            await self._changed.wait()
        if self.closed is not None:
            raise copy.copy(self.closed)

    def tell(self, change: Change) -> None:
        match change:
            case Joined(member):
                if self.members.get(member.endpoint_id) == member:
                    return  # a lease was renewed
                self.members[member.endpoint_id] = member
                self.retries = member.retries or {}
            case Left(endpoint_id):
                self._last_jobs = self.jobs
                if self.members.pop(endpoint_id, None) is None:
                    return
            case Synced():
                self.is_synced, self.error = True, None
            case WatchFailed(error):
                self.error = error
        self.on_change(self.name, change)
        self._wake()

    def close(self, error: Exception) -> None:
        """Nothing changes from now on: those that wait for a change get the error."""
        self.closed = error
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def watch(self, registry: Registry) -> None:
        """Keep up with the registry until cancelled, or the connection has ended."""
        while self.closed is None:
            try:
                await self._follow(registry)
            except BusError as error:
                log.info("the members of %s cannot be read: %s", self.name, error)
                if not self.is_synced:  # else what is known has to do until it can be read again
                    self.tell(WatchFailed(error))
                if isinstance(error, ClosedError):
                    self.close(error)
                else:
                    await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _follow(self, registry: Registry) -> None:
        keys = buckets.endpoints_named(self.name)
        async with aclosing(registry.table.watch(keys)) as changes:
            async for change in changes:
                if isinstance(change, CaughtUp):
                    # Members that ended while the connection was lost, and whose marks are gone, are not reported otherwise.
                    there = {subjects.last_token(row.key) for row in await registry.table.rows(keys)}
                    for endpoint_id in self.members.keys() - there if self.members else ():
                        self.tell(Left(endpoint_id))
                    self.tell(
                        Synced(is_durable=not (self.is_synced or self.members) and await registry.is_durable(self.name))
                    )
                elif isinstance(change, Deleted):
                    self.tell(Left(subjects.last_token(change.key), change.reason))
                else:
                    self._learn(change)

    def _learn(self, row: Row[Endpoint]) -> None:
        try:
            self.tell(Joined(Member.of(row.value)))
        except InvalidMessageError as error:
            self._faults.warning("%s is not a member of %s: %s", row.key, self.name, error)
            self.tell(Left(subjects.last_token(row.key)))


class Rosters:
    """The rosters of the pools that a client has open, each with the task that keeps it up. For the loop alone."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, registry: Registry, on_change: Callable[[str, Change], None]
    ) -> None:
        self._loop = loop
        self._registry = registry
        self._on_change = on_change
        self._rosters: dict[str, Roster] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._closed: Exception | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._rosters

    def get(self, name: str) -> Roster | None:
        return self._rosters.get(name)

    async def known(self, name: str) -> Roster:
        """The roster of an open pool, once it is known. Raises the BusError that keeps it from being read."""
        roster = self._rosters.get(name)
        if roster is None:
            raise was_shut_down(name)
        while not roster.is_synced and roster.error is None:
            await roster.change()
        error = roster.closed or (None if roster.is_synced else roster.error)
        if error is not None:
            raise copy.copy(error)
        return roster

    def open(self, name: str) -> bool:
        """One more pool needs the roster of that name; True for the first, after which it is to be filled."""
        is_new = name not in self._rosters
        if is_new:
            self._rosters[name] = Roster(name, self._on_change, closed=self._closed)
        self._rosters[name].users += 1
        return is_new

    def watch(self, name: str) -> None:
        """Fill a roster from the registry, and keep it up."""
        watch = self._rosters[name].watch(self._registry)
        self._watches[name] = self._loop.create_task(watch, name=f"members of {name}")

    def fill(self, name: str, members: Iterable[Member]) -> None:
        """Fill a roster with these, for good."""
        roster = self._rosters[name]
        for member in members:
            roster.tell(Joined(member))
        roster.tell(Synced())

    def close(self, name: str) -> bool:
        """A pool needs the roster no more; True for the last, with whom it is gone."""
        roster = self._rosters.get(name)
        if roster is None or self._closed is not None:
            return False
        roster.users -= 1
        if roster.users:
            return False
        del self._rosters[name]
        roster.close(was_shut_down(name))
        watch = self._watches.pop(name, None)
        if watch is not None:
            watch.cancel()
        return True

    def close_all(self, error: Exception) -> None:
        """Watch no more; who waits for a roster is given the error."""
        self._closed = error
        for task in self._watches.values():
            task.cancel()
        for roster in self._rosters.values():
            roster.close(error)


def was_shut_down(name: str) -> ActorNotFoundError:
    return ActorNotFoundError(f"the pool {name!r} was shut down: make another")
