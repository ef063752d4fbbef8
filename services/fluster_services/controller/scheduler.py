"""Which waiting task is offered next: first fit, in the order of submission.

Tasks that need the same wait in one line. A line whose first task found no worker with room is closed until a worker
says that it has room again, and with it every line that needs at least as much. So the cost of an offer depends on
the number of different needs, not on how many tasks wait.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from fluster_bus.messages import Capacity
from fluster_services.controller.books import JobKey


class Place(NamedTuple):
    """A task in the order of submission."""

    order: int
    task: int
    job: JobKey


MAX_WINDOW = 32
_WIDENS_AFTER = 8  # offers that are accepted in a row


@dataclass
class _Line:
    """Tasks with the same need, the oldest first; those that are out or gone stay in the heap until they come up."""

    need: Capacity
    heap: list[Place] = field(default_factory=list)
    closed: bool = False
    out: int = 0
    # Tasks of it that may be out at once. Where room is scarce it is one: of two that are out the later may come upon the
    # room that the earlier just missed.
    window: int = MAX_WINDOW
    accepted: int = 0  # in a row


class Scheduler:
    """The waiting tasks. It decides which to offer; offering is for others."""

    def __init__(self) -> None:
        self._lines: dict[Capacity, _Line] = {}
        self._waiting: dict[tuple[JobKey, int], Capacity] = {}
        self._needing: dict[Capacity, set[tuple[JobKey, int]]] = {}  # {need: who waits for it, also while out}
        self._out: dict[tuple[JobKey, int], Capacity] = {}  # {task: the need with which it was offered}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, place: Place, need: Capacity) -> None:
        """A task waits; it may be told again."""
        task = (place.job, place.task)
        if self._waiting.get(task) == need:
            return
        self._forget_need(task)
        self._waiting[task] = need
        self._needing.setdefault(need, set()).add(task)
        self._push(place, need)

    def _forget_need(self, task: tuple[JobKey, int]) -> None:
        need = self._waiting.pop(task, None)
        if need is not None:
            self._needing[need].discard(task)
            if not self._needing[need]:
                del self._needing[need]

    def _push(self, place: Place, need: Capacity) -> None:
        line = self._lines.get(need)
        if line is None:
            line = self._lines[need] = _Line(need)
            line.closed = any(other.closed and _at_least(need, other.need) for other in self._lines.values())
        heapq.heappush(line.heap, place)

    def remove(self, job: JobKey, task: int) -> None:
        """A task does not wait any more."""
        self._forget_need((job, task))
        self._bring_in((job, task))

    def _bring_in(self, task: tuple[JobKey, int]) -> None:
        need = self._out.pop(task, None)
        if need is not None and need in self._lines:
            self._lines[need].out -= 1

    def take(self, limit: int) -> list[tuple[Place, Capacity]]:
        """Up to `limit` tasks to offer now; each is out until `on_declined` or `remove`."""
        taken: list[tuple[Place, Capacity]] = []
        while len(taken) < limit:
            first = min(
                (line for line in list(self._lines.values()) if self._may_offer(line)),
                key=lambda line: line.heap[0],
                default=None,
            )
            if first is None:
                break
            place = heapq.heappop(first.heap)
            self._out[(place.job, place.task)] = first.need
            first.out += 1
            taken.append((place, first.need))
        return taken

    def is_full(self, need: Capacity) -> bool:
        """True while as many tasks with that need are out as may be at once."""
        line = self._lines.get(need)
        return line is not None and line.out >= line.window

    def _may_offer(self, line: _Line) -> bool:
        return not line.closed and line.out < line.window and self._has_task(line)

    def _has_task(self, line: _Line) -> bool:
        while line.heap:
            task = (line.heap[0].job, line.heap[0].task)
            if self._waiting.get(task) == line.need and task not in self._out:
                return True
            heapq.heappop(line.heap)
        if line.need not in self._needing and not line.out:
            del self._lines[line.need]
        return False

    def on_accepted(self, need: Capacity) -> None:
        """An offer was taken. Its task is out until `remove`: its record is on its way."""
        line = self._lines.get(need)
        if line is not None:
            line.accepted += 1
            if line.accepted % _WIDENS_AFTER == 0:
                line.window = min(MAX_WINDOW, line.window * 2)

    def on_declined(self, place: Place, need: Capacity, *, room: bool) -> None:
        """An offer came back. Without `room` anywhere, tasks that need at least as much are not offered for now."""
        task = (place.job, place.task)
        self._bring_in(task)
        if self._waiting.get(task) == need:
            self._push(place, need)
            line = self._lines[need]
            line.window, line.accepted = 1, 0
        if not room:
            for line in self._lines.values():
                line.closed = line.closed or _at_least(line.need, need)

    def needs(self) -> list[Capacity]:
        """The different needs of the tasks that wait."""
        return list(self._needing)

    def waiting_for(self, need: Capacity) -> list[tuple[JobKey, int]]:
        """The tasks that wait for just that."""
        return sorted(self._needing.get(need, ()))

    def waiting(self) -> list[tuple[JobKey, int]]:
        """All tasks that wait, whether or not they are out."""
        return list(self._waiting)

    def on_room(self) -> None:
        """Some worker has more room than before."""
        for line in self._lines.values():
            line.closed = False

    def sanity_check(self) -> None:
        """Raise AssertionError when a waiting task is neither out nor in a line."""
        lined = {(place.job, place.task) for line in self._lines.values() for place in line.heap}
        assert set(self._waiting) <= lined | set(self._out)  # noqa: S101
        assert set(self._out) <= set(self._waiting)  # noqa: S101


def _at_least(need: Capacity, other: Capacity) -> bool:
    """True when whoever has no room for `other` has none for `need` either."""
    return (
        need.cpu >= other.cpu
        and need.memory >= other.memory
        and need.disk >= other.disk
        and (other.devices == 0 or ((need.device, need.variant) == (other.device, other.variant)))
        and need.devices >= other.devices
    )
