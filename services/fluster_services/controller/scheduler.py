"""Which waiting task is offered next: first fit, by priority, and in the order of submission within one.

Tasks that need the same wait in one line. A line whose first task found no worker with room is closed until a worker
says that it has room again, and with it every line that needs at least as much. So the cost of an offer depends on
the number of different needs, not on how many tasks wait.

Smaller tasks thus overtake a large one, and might do so for ever. Once it has been overtaken for longer than
`reserve_after_s` it is `starving`, and a worker is kept free for it: whatever is behind it in the order is offered to
the others only, until it has its place. There is one such reservation at a time.

Gangs are gathered elsewhere, as a whole. Here they have a place in the order: they are overtaken, overtake and starve as
tasks do, and then as many workers are kept free as they need.

Priorities are strict: a task waits as long as there is one of a higher priority that fits.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from fluster_bus.messages import Capacity
from fluster_services.capacity import fits, has_counts
from fluster_services.controller.books import JobKey

_ORDERS = 1 << 53  # beyond any order of submission


def place_in_line(order: int, priority: int) -> int:
    """Where a task stands: before all of a lower priority, and in the order of submission within its own."""
    return order - priority * _ORDERS


class Place(NamedTuple):
    """A task in the order in which tasks are offered, as `place_in_line` gives it."""

    order: int
    task: int
    job: JobKey


@dataclass(frozen=True)
class Starving:
    """Who has been overtaken for too long: a task, or a gang of `count` tasks, by the place of its first."""

    place: Place
    need: Capacity  # of each task
    count: int = 1


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
    # Since when tasks behind its first one were placed, which found no room itself.
    overtaken_since: float | None = None


@dataclass
class _Gang:
    place: Place
    need: Capacity  # of each task
    count: int
    is_held: bool = False  # all its tasks are claimed; whether they start is not decided yet
    overtaken_since: float | None = None


class Scheduler:
    """The waiting tasks. It decides which to offer; offering is for others. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._lines: dict[Capacity, _Line] = {}
        self._waiting: dict[tuple[JobKey, int], Capacity] = {}
        self._needing: dict[Capacity, set[tuple[JobKey, int]]] = {}  # {need: who waits for it, also while out}
        self._out: dict[tuple[JobKey, int], Capacity] = {}  # {task: the need with which it was offered}
        self._since: dict[tuple[JobKey, int], float] = {}  # {task: when it was added}
        self._gangs: dict[JobKey, _Gang] = {}
        self._not_overtaken: list[Place] = []  # heap of gangs; those that are held or gone stay until they come up
        self._overtaken: list[Place] = []  # of gangs, in the order; also those that are held
        self._reserved: Place | None = None
        self._reserved_need: Capacity | None = None
        self._last_reserved: Place | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, place: Place, need: Capacity, *, now: float = 0.0) -> None:
        """A task waits; it may be told again."""
        task = (place.job, place.task)
        if self._waiting.get(task) == need:
            return
        self._forget_need(task)
        self._since[task] = now
        self._waiting[task] = need
        self._needing.setdefault(need, set()).add(task)
        self._push(place, need)

    def _forget_need(self, task: tuple[JobKey, int]) -> None:
        need = self._waiting.pop(task, None)
        if need is not None:
            del self._since[task]
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
        reserved = self._reserved
        if reserved is not None and (reserved.job, reserved.task) == (job, task) and job not in self._gangs:
            self.release()

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

    def on_accepted(self, need: Capacity, place: Place | None = None, *, now: float = 0.0) -> None:
        """An offer was taken. Its task is out until `remove`: its record is on its way.

        With its `place`, it is noted whom it has overtaken.
        """
        line = self._lines.get(need)
        if line is not None:
            if place is not None and place not in (self._reserved, self._last_reserved):
                line.overtaken_since = None  # it found room by itself; one that was helped tells nothing about the next
            line.accepted += 1
            if line.accepted % _WIDENS_AFTER == 0:
                line.window = min(MAX_WINDOW, line.window * 2)
        if place is not None:
            self._note_overtaken(place, line, now=now)

    def _note_overtaken(self, place: Place, line: _Line | None, *, now: float) -> None:
        for other in list(self._lines.values()):
            if other is not line and other.overtaken_since is None and self._is_passed(other, place):
                other.overtaken_since = now
        while self._not_overtaken and self._not_overtaken[0] < place:
            passed = heapq.heappop(self._not_overtaken)
            gang = self._gangs.get(passed.job)
            if gang is None or gang.place != passed:
                continue  # it is gone, and its job may have another place by now
            if not gang.is_held and gang.overtaken_since is None:
                gang.overtaken_since = now
                bisect.insort(self._overtaken, gang.place)

    def _is_passed(self, line: _Line, place: Place) -> bool:
        """True when the line's first task is before that place, and found no room, or is about to hear so."""
        return line.out > 0 or (line.closed and self._has_task(line) and line.heap[0] < place)

    def on_declined(self, place: Place, need: Capacity, *, room: bool) -> None:
        """An offer came back. Without `room` anywhere, tasks that need at least as much are not offered for now."""
        task = (place.job, place.task)
        self._bring_in(task)
        if self._waiting.get(task) == need:
            self._push(place, need)
            line = self._lines[need]
            line.window, line.accepted = 1, 0
            if room and not self.is_behind_reserved(place):
                line.closed = False  # perhaps by the answer to one that was not offered to all workers
        if not room:
            behind = self.is_behind_reserved(place)
            for line in list(self._lines.values()):
                # What is behind the reservation was not offered to the worker that is kept free: whoever is before it
                # may have room there.
                if _at_least(line.need, need) and not (behind and self._is_before_reserved(line)):
                    line.closed = True

    # ---- gangs ------------------------------------------------------------------------------------------

    def add_gang(self, place: Place, need: Capacity, count: int) -> None:
        """A gang waits; it may be told again, also when it was held and then released."""
        known = self._gangs.get(place.job)
        if known is not None and (known.place, known.need, known.count) == (place, need, count):
            if not known.is_held:
                return
            known.is_held = False
        else:
            self.remove_gang(place.job)
            self._gangs[place.job] = _Gang(place, need, count)
        heapq.heappush(self._not_overtaken, place)

    def remove_gang(self, job: JobKey) -> bool:
        """A gang does not wait any more; False when it did not."""
        gang = self._gangs.pop(job, None)
        if gang is not None and gang.overtaken_since is not None:
            del self._overtaken[bisect.bisect_left(self._overtaken, gang.place)]
        if gang is not None and gang.place == self._reserved:
            self.release()
        return gang is not None

    def on_gathered(self, job: JobKey, *, now: float) -> None:
        """All tasks of a gang are claimed. It has overtaken those before it, and needs no reservation while that is so."""
        gang = self._gangs.get(job)
        if gang is None:
            return
        gang.is_held = True
        if gang.place == self._reserved:
            self.release()
        self._note_overtaken(gang.place, None, now=now)

    # ---- reserve and backfill ---------------------------------------------------------------------------

    def starving(self, *, now: float, reserve_after_s: float) -> Iterator[Starving]:
        """Those that have been overtaken for too long, in the order: the first of each line, and the gangs."""
        tasks = [
            Starving(line.heap[0], line.need)
            for line in list(self._lines.values())
            if line.overtaken_since is not None
            and self._has_task(line)
            and now - max(line.overtaken_since, self._since[line.heap[0].job, line.heap[0].task]) >= reserve_after_s
        ]
        gangs = (
            Starving(gang.place, gang.need, gang.count)
            for gang in (self._gangs[place.job] for place in self._overtaken)
            if gang.overtaken_since is not None and not gang.is_held and now - gang.overtaken_since >= reserve_after_s
        )
        # Whoever asks seldom looks beyond the first, and there may be thousands of gangs.
        return heapq.merge(sorted(tasks, key=_by_place), gangs, key=_by_place)

    @property
    def reserved(self) -> Place | None:
        """The task, or the first of the gang, for which workers are kept free."""
        return self._reserved

    def reserve(self, starving: Starving) -> None:
        """Workers are kept free for it instead of for another, until it does not wait any more, or `release`."""
        if self._reserved is not None:
            self.release()
        self._reserved = starving.place
        # A gang has no line of its own: whoever needs the same as its tasks is where its own place says.
        self._reserved_need = starving.need if starving.place.job not in self._gangs else None

    def release(self) -> None:
        """No worker is kept free any more: those may have room for what was not offered to them."""
        self._last_reserved, self._reserved, self._reserved_need = self._reserved, None, None
        self.on_room()

    def is_behind_reserved(self, place: Place) -> bool:
        """True when that task may not be offered to workers that are kept free."""
        return self._reserved is not None and place > self._reserved

    def _is_before_reserved(self, line: _Line) -> bool:
        if line.need == self._reserved_need:
            return True  # the one that is reserved for may be out itself, and so not in its line
        return self._has_task(line) and not self.is_behind_reserved(line.heap[0])

    def needs(self) -> list[Capacity]:
        """The different needs of the tasks that wait."""
        return list(self._needing)

    def waiting_for(self, need: Capacity) -> list[tuple[JobKey, int]]:
        """The tasks that wait for just that."""
        return sorted(self._needing.get(need, ()))

    def is_idle(self, job: JobKey, task: int) -> bool:
        """True for a task that waits and is not out."""
        return (job, task) in self._waiting and (job, task) not in self._out

    def waiting(self) -> list[tuple[JobKey, int]]:
        """All tasks that wait, whether or not they are out."""
        return list(self._waiting)

    def on_room(self, free: Capacity | None = None) -> None:
        """Some worker has more room than before; `free` is all that it has left, where that is known."""
        for line in self._lines.values():
            if line.closed and (free is None or fits(line.need, free)):
                line.closed = False

    def sanity_check(self) -> None:
        """Raise AssertionError when a waiting task is neither out nor in a line."""
        lined = {(place.job, place.task) for line in self._lines.values() for place in line.heap}
        assert set(self._waiting) <= lined | set(self._out)  # noqa: S101
        assert set(self._out) <= set(self._waiting)  # noqa: S101
        assert set(self._since) == set(self._waiting)  # noqa: S101
        overtaken = [gang.place for gang in self._gangs.values() if gang.overtaken_since is not None]
        assert self._overtaken == sorted(overtaken)  # noqa: S101
        reserved = self._reserved
        if reserved is not None:
            assert (reserved.job, reserved.task) in self._waiting or reserved.job in self._gangs  # noqa: S101


def _by_place(starving: Starving) -> Place:
    return starving.place


def _at_least(need: Capacity, other: Capacity) -> bool:
    """True when whoever has no room for `other` has none for `need` either."""
    return (
        need.cpu >= other.cpu
        and need.memory >= other.memory
        and need.disk >= other.disk
        and set(need.namespaces) >= set(other.namespaces)
        and set(need.labels) >= set(other.labels)
        and has_counts(other.resources, need.resources)
        and set(need.elsewhere) >= set(other.elsewhere)
        and (other.devices == 0 or ((need.device, need.variant) == (other.device, other.variant)))
        and need.devices >= other.devices
    )
