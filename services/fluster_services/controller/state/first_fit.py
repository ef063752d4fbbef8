"""Finds workers with room for a task among many, without a look at each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from fluster_bus.messages import Capacity, WorkerId
from fluster_services import capacity


class _Most(NamedTuple):
    """The most that any one worker of a part has left, of each kind by itself."""

    cpu: float
    memory: int
    disk: int
    devices: int
    tasks: float


_NOTHING = _Most(-1.0, -1, -1, -1, -1.0)


class FirstFit:
    """What each worker has left, in a tree over the workers whose nodes know the most that is left below them.

    So a search passes over all parts in which no worker has enough, and a change costs no more than the tree is deep.
    """

    def __init__(self) -> None:
        self._size = 1
        self._most = [_NOTHING, _NOTHING]  # that of node n is the most of 2n and 2n + 1; the last half are the workers
        self._free: list[tuple[WorkerId, Capacity] | None] = [None]
        self._places: dict[WorkerId, int] = {}
        self._unused = [0]

    def put(self, worker_id: WorkerId, free: Capacity) -> None:
        """Note what a worker has left."""
        place = self._places.get(worker_id)
        if place is None:
            if not self._unused:
                self._grow()
            place = self._places[worker_id] = self._unused.pop()
        self._free[place] = (worker_id, free)
        tasks = math.inf if free.tasks is None else free.tasks
        self._set(place, _Most(free.cpu, free.memory, free.disk, capacity.most_of_a_model(free), tasks))

    def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker, if it is known."""
        place = self._places.pop(worker_id, None)
        if place is not None:
            self._free[place] = None
            self._unused.append(place)
            self._set(place, _NOTHING)

    def _set(self, place: int, value: _Most) -> None:
        most = self._most
        node = place + self._size
        while most[node] != value:
            most[node] = value
            node >>= 1
            if not node:
                return
            value = _larger(most[2 * node], most[2 * node + 1])

    def _grow(self) -> None:
        self._unused = list(range(2 * self._size - 1, self._size - 1, -1))
        self._free += [None] * self._size
        most = [*self._most[self._size :], *([_NOTHING] * self._size)]
        self._size *= 2
        self._most = [_NOTHING] * self._size + most
        for node in range(self._size - 1, 0, -1):
            self._most[node] = _larger(self._most[2 * node], self._most[2 * node + 1])

    def with_room(self, need: Capacity) -> Iterator[tuple[WorkerId, Capacity]]:
        """Workers that have room, and what each has left, always in the same order.

        What changes meanwhile is taken into account as far as the search has not passed it.
        """
        place = self._next(need, 0)
        while place is not None:
            found = self._free[place]
            if found is not None:
                yield found
            place = self._next(need, place + 1)

    def _next(self, need: Capacity, start: int) -> int | None:
        """The first place from `start` on with room for `need`."""
        most, size = self._most, self._size
        cpu, memory, disk, devices, tasks = need.cpu, need.memory, need.disk, need.devices, need.tasks or 0
        if start >= size:
            return None
        node = start + size if start else 1
        while True:
            left = most[node]
            if (
                left.cpu >= cpu
                and left.memory >= memory
                and left.disk >= disk
                and left.devices >= devices
                and left.tasks >= tasks
            ):
                if node < size:
                    node *= 2
                    continue
                found = self._free[node - size]
                if found is not None and capacity.fits(need, found[1]):
                    return node - size
            while node & 1:  # all that is below the parent has been looked at
                node >>= 1
            if not node:
                return None
            node += 1


def _larger(one: _Most, other: _Most) -> _Most:
    return _Most(
        max(one.cpu, other.cpu),
        max(one.memory, other.memory),
        max(one.disk, other.disk),
        max(one.devices, other.devices),
        max(one.tasks, other.tasks),
    )
