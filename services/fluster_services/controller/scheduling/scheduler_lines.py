"""What waits to be offered: tasks in lines, one for each need, and gangs, each as a whole; and for whom workers are kept free."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fluster_bus.messages import Capacity, Namespace
from fluster_services.capacity import has_counts
from fluster_services.controller.scheduling.order import FairOrder, Position, Starving
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.shares import Shares

MAX_WINDOW = 32


@dataclass
class Line:
    """Tasks with the same need, and so of one namespace, the oldest first; those that are out or gone stay in the heap
    until they come up.
    """

    need: Capacity
    namespace: Namespace
    heap: list[Position] = field(default_factory=list)
    closed: bool = False
    out: int = 0
    # Tasks of it that may be out at once. Where room is scarce it is one: of two that are out the later may come upon the
    # room that the earlier just missed.
    window: int = MAX_WINDOW
    accepted: int = 0  # in a row
    taken: Position | None = None  # the last
    rank: tuple[int, float] | None = None  # at which that was taken, where namespaces share
    # Since when tasks behind its first one were placed, which found no room itself.
    overtaken_since: float | None = None


@dataclass
class Gang:
    """A gang that waits, or is held."""

    position: Position
    need: Capacity  # of each task
    count: int
    is_held: bool = False  # all its tasks are claimed; whether they start is not decided yet
    overtaken_since: float | None = None
    out: set[int] = field(default_factory=set)  # tasks that are offered, or claimed and not yet known to be held


class GangLine:
    """The gangs, and which of them have been overtaken. Times are seconds of a monotonic clock."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.by_job: dict[JobKey, Gang] = {}
        # {namespace: heap of gangs}; those that are held or gone stay until they come up
        self.not_overtaken: dict[Namespace, list[Position]] = {}
        self._overtaken: list[Position] = []  # in the order; also those that are held

    def put(self, gang: Gang) -> None:
        """A gang waits, for the first time or again after it was held."""
        self.by_job[gang.position.job] = gang
        heapq.heappush(self.not_overtaken.setdefault(gang.position.job.namespace, []), gang.position)

    def remove(self, gang: Gang) -> None:
        """A gang no longer waits."""
        del self.by_job[gang.position.job]
        if gang.overtaken_since is not None:
            del self._overtaken[bisect.bisect_left(self._overtaken, gang.position)]

    def on_gathering(self, job: JobKey) -> None:
        """All its tasks are about to be offered."""
        gang = self.by_job.get(job)
        if gang is None:
            return
        for task in set(range(gang.count)) - gang.out:
            gang.out.add(task)
            self._shares.take(job.namespace, gang.need)

    def on_no_offer(self, job: JobKey, task: int) -> None:
        """The offer of a gang's task was declined, or its record says that it is held."""
        gang = self.by_job.get(job)
        if gang is not None and task in gang.out:
            gang.out.discard(task)
            self._shares.give_back(job.namespace, gang.need)

    def is_offered(self, job: JobKey) -> bool:
        """True while tasks of a gang are offered, or claimed and not yet known to be held."""
        gang = self.by_job.get(job)
        return gang is not None and bool(gang.out)

    def note_overtaken(self, is_overtaken: Callable[[Position], bool], *, now: float) -> None:
        """Something was placed: the gangs before it for which `is_overtaken(position)` have been overtaken."""
        for heap in self.not_overtaken.values():
            while heap and is_overtaken(heap[0]):
                passed = heapq.heappop(heap)
                gang = self.by_job.get(passed.job)
                if gang is None or gang.position != passed:
                    continue  # it is gone, and its job may have another position by now
                if not gang.is_held and gang.overtaken_since is None:
                    gang.overtaken_since = now
                    bisect.insort(self._overtaken, gang.position)

    def starving(self, *, now: float, reserve_after_s: float) -> Iterator[Starving]:
        """Those that have been overtaken for too long, in the order."""
        return (
            Starving(gang.position, gang.need, gang.count)
            for gang in (self.by_job[position.job] for position in self._overtaken)
            if gang.overtaken_since is not None and not gang.is_held and now - gang.overtaken_since >= reserve_after_s
        )

    def sanity_check(self) -> None:
        """Raise AssertionError when the overtaken ones are not those that say so, in the order."""
        overtaken = [gang.position for gang in self.by_job.values() if gang.overtaken_since is not None]
        assert self._overtaken == sorted(overtaken)  # noqa: S101


class Reservation:
    """The task, or the first of the gang, for which workers are kept free; at most one at a time."""

    def __init__(self, order: FairOrder) -> None:
        self._order = order
        self.position: Position | None = None
        self.need: Capacity | None = None  # of a task
        self.last: Position | None = None  # for which they were before

    def make(self, position: Position, need: Capacity | None) -> None:
        """Workers are kept free for it; `need` is None for a gang."""
        self.position, self.need = position, need

    def end(self) -> None:
        """No worker is kept free from now on."""
        self.last, self.position, self.need = self.position, None, None

    def is_before(self, position: Position) -> bool:
        """True when that task may not be offered to workers that are kept free."""
        reserved = self.position
        if reserved is None:
            return False
        if position.job.namespace == reserved.job.namespace:
            return position > reserved
        # Also for one that has less, until the one that is reserved for is placed: else it might never be.
        return self._order.band(position) >= self._order.band(reserved)


def is_at_least(need: Capacity, other: Capacity) -> bool:
    """True when a worker that has no room for `other` has none for `need` either."""
    is_of_same = need.namespaces == other.namespaces or set(need.namespaces) >= set(other.namespaces)
    return is_of_same and is_as_large(need, other)


def is_as_large(need: Capacity, other: Capacity) -> bool:
    """The same, where both are of one namespace."""
    return (
        need.cpu >= other.cpu
        and need.memory >= other.memory
        and need.disk >= other.disk
        and set(need.labels) >= set(other.labels)
        and has_counts(other.resources, need.resources)
        and set(need.elsewhere) >= set(other.elsewhere)
        and (other.devices == 0 or ((need.device, need.variant) == (other.device, other.variant)))
        and need.devices >= other.devices
    )
