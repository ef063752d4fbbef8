"""The order in which what waits is offered: by priority and submission, then by what its namespace has, and by its quota."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fluster_bus.messages import Capacity, Namespace
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.shares import NOTHING, Amount, Shares

_ORDERS = 1 << 53  # beyond any order of submission


def place_in_line(order: int, priority: int) -> int:
    """Where a task stands: before all of a lower priority, and in the order of submission within its own."""
    return order - priority * _ORDERS


def priority_of(order: int) -> int:
    """The priority with which a place was made."""
    return -(order // _ORDERS)


class Place(NamedTuple):
    """A task in the order in which tasks are offered, as `place_in_line` gives it."""

    order: int
    task: int
    job: JobKey


@dataclass(frozen=True)
class Starving:
    """A task that has been overtaken for too long, or a gang of `count` tasks, by the place of its first."""

    place: Place
    need: Capacity  # of each task
    count: int = 1


class _Kept(NamedTuple):
    """What is left of a namespace's quota for one that others of it have overtaken for too long."""

    place: Place
    amount: Amount


class TurnOrder:
    """Orders what waits in several namespaces, and keeps room in quotas for what has been overtaken within its namespace."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self.kept: dict[Namespace, _Kept] = {}

    def turn(self, place: Place) -> tuple[int, float, Place]:
        """When it is the turn of what stands there: by priority, by what its namespace has, and by the order within that."""
        namespace = place.job.namespace
        return self.band(place), self._shares.weighed(namespace), place

    def band(self, place: Place) -> int:
        """Lower for a higher priority, as far as it counts beside other namespaces."""
        return -min(priority_of(place.order), self._shares.max_priority(place.job.namespace))

    def goes_before(self, one: Place, other: Place) -> bool:
        """True when it is before the other whatever their namespaces have."""
        if one.job.namespace == other.job.namespace:
            return one < other
        return self.band(one) < self.band(other)

    def was_before(self, one: Place, placed: Place) -> bool:
        """True when it was the turn of `one` before that of what was placed, which counts for its namespace already."""
        if one.job.namespace == placed.job.namespace:
            return one < placed
        return self.turn(one)[:2] < self.turn(placed)[:2]

    # ---- quotas -----------------------------------------------------------------------------------------

    def has_quota(self, place: Place, need: Capacity, count: int = 1) -> bool:
        """True when the namespace's quota has room for what stands there, beside what others are to have first."""
        namespace = place.job.namespace
        kept = self.kept.get(namespace)
        beside = kept.amount if kept is not None and place > kept.place else NOTHING
        return self._shares.fits(namespace, need, count, beside=beside)

    def kept_quota(self, namespace: Namespace) -> Place | None:
        """The place for which room in the namespace's quota is kept."""
        kept = self.kept.get(namespace)
        return kept.place if kept is not None else None

    def keep_quota(self, starving: Starving) -> None:
        """What is behind it in its namespace leaves it room in the quota from now on, as long as it waits."""
        namespace = starving.place.job.namespace
        kept = self.kept.get(namespace)
        if namespace in self._shares.bounded and (kept is None or starving.place < kept.place):
            self.kept[namespace] = _Kept(starving.place, Amount.of(starving.need, starving.count))

    def on_quota(self, namespace: Namespace) -> None:
        """The namespace has another quota: what was kept of the one before is not."""
        self.kept.pop(namespace, None)

    def forget_kept(self, job: JobKey, task: int) -> None:
        """What stands there needs no room in the quota any longer."""
        kept = self.kept.get(job.namespace)
        if kept is not None and (kept.place.job, kept.place.task) == (job, task):
            del self.kept[job.namespace]
            self._shares.on_freed()
