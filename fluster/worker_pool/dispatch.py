"""Which worker gets which task, by the pace of earlier ones, and what becomes of those that are lost with theirs: decided here, without any I/O.

Work comes from sources, first come, first served: a source gives units, and a unit is what one call to a worker carries.
A worker gets as many as keep it busy for a moment. It runs them one after the other, so which of them it died of is not
known: each is given out again *alone*, to a worker that has nothing else. What is lost then was the cause.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

CHUNK_S = 0.02  # of work in one call: so long that the call itself does not count, so short that none waits for long
TAIL_S = 0.001  # the same where work runs out and is shared among the workers
MAX_ITEMS = 1_024
# Of single tasks. Long: answers of short ones come many at a time, and the first of them seems to have taken all the time.
TASK_MEMORY = 0.98
AHEAD_S = 0.04  # of work that a worker has at a time; a unit that takes longer it has alone
MAX_AHEAD = 1_024  # units
_NEAR_S = 0.005  # of travel that is taken for work: a call costs something, and on a busy machine an answer may take that long
_MAX_AWAY_S = 1.0  # of travel that is made up for
_SUPPLIED = 2  # units: one to run while the answer to the other travels


class Pace:
    """The average duration of an item, of which the newest count most. Unknown at first: then calls carry one item."""

    def __init__(self, memory: float) -> None:
        self._memory = memory  # what is left of an observation's weight at the next one
        self._items = 0.0
        self._seconds = 0.0
        self._largest = 0  # call so far

    def observe(self, items: int, seconds: float) -> None:
        """A call with that many items took that long."""
        self._items = self._items * self._memory + items
        self._seconds = self._seconds * self._memory + max(seconds, 0.0)
        self._largest = max(self._largest, items)

    def expected_s(self, items: int) -> float:
        """How long that many items will take: infinity when that is not known yet."""
        return items * self._seconds / self._items if self._items else math.inf

    def is_new(self, items: int) -> bool:
        """True when no call with that many items has been answered yet."""
        return items > self._largest

    def chunk(self, seconds: float = CHUNK_S) -> int:
        """How many items the next call should have, to take so long: at most double what is known to go well."""
        if not self._items:
            return 1
        wanted = seconds / max(self._seconds / self._items, 1e-9)
        return max(1, int(min(wanted, 2 * self._largest, MAX_ITEMS)))


class Unit(Protocol):
    """What one call to a worker carries."""

    deaths: int  # workers that it was lost with
    losses: int  # those, and the times that the connection was lost
    pace: Pace

    @property
    def size(self) -> int:
        """How many items it has that are not answered."""
        ...

    def parts(self) -> Sequence[Unit]:
        """The same work, each item by itself."""
        ...


class Source(Protocol):
    """Where units come from."""

    pace: Pace

    @property
    def items(self) -> int:
        """How many items wait in it."""
        ...

    def next_size(self, workers: int) -> int:
        """How many items the next unit will have at most; 0 when there is none. `workers` want their share."""
        ...

    def is_ending(self, workers: int) -> bool:
        """True when what is left makes no full units for that many workers."""
        ...

    def take(self, size: int) -> Unit | None:
        """The next unit. None when what was next has been cancelled: it may be asked again."""


class Loss(Enum):
    """Why a unit was not answered."""

    DEATH = auto()  # its worker ended
    CONNECTION = auto()  # the worker may be running it all the same
    NOT_RUN = auto()  # it was never begun


@dataclass(slots=True)
class _Assignment:
    """A unit that a worker has."""

    at: float
    expected_s: float  # that it takes


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    out: dict[Unit, _Assignment] = field(default_factory=dict)
    backlog_s: float = 0.0
    answered_at: float = 0.0  # when the newest answer came
    # Of a unit and its answer, there and back, when nothing was in their way; infinity: not known.
    travel_s: float = math.inf
    alone: bool = False  # what it has is to be with it alone

    def has_room(self, pace: Pace, size: int, *, is_ending: bool = False) -> bool:
        if not self.out:
            return True
        if self.alone or len(self.out) >= MAX_AHEAD:
            return False
        backlog_s, away_s = self.backlog_s + pace.expected_s(size), self.away_s
        # While units grow, small ones that are sent ahead would only delay the answer that lets the next be larger. And
        # of the last ones each waits for the worker that is through first. But no worker is to wait for units that travel.
        if is_ending or pace.is_new(size):
            return backlog_s <= (AHEAD_S + away_s if len(self.out) < _SUPPLIED else away_s)
        return backlog_s <= AHEAD_S + away_s

    @property
    def away_s(self) -> float:
        """How long what is on its way leaves it without work, where that is worth while."""
        return max(0.0, min(self.travel_s, _MAX_AWAY_S) - _NEAR_S) if math.isfinite(self.travel_s) else 0.0


class Dispatch:
    """The work of one pool. Units that are out are with one worker each."""

    def __init__(self, *, task_retries: int) -> None:
        self._task_retries = task_retries
        self._sources: deque[Source] = deque()
        self._again: deque[Unit] = deque()  # lost, but not to blame
        self._suspects: deque[Unit] = deque()  # lost with a worker that died
        self._workers: dict[str, _Worker] = {}
        self._worker_of: dict[Unit, _Worker] = {}
        self._supplied = 0  # of those who take work now

    # ---- what happens -----------------------------------------------------------------------------------

    def add(self, source: Source) -> None:
        """Take work from a source, until it has none."""
        self._sources.append(source)

    @property
    def last(self) -> Source | None:
        """The source behind which there is no other."""
        return self._sources[-1] if self._sources else None

    def on_workers(self, names: Collection[str]) -> None:
        """The workers that take work now. What the others have may still be answered, or reported as lost."""
        if names != self._workers.keys():
            self._workers = {name: self._workers.get(name) or _Worker(name) for name in names}
            self._supplied = sum(len(worker.out) >= _SUPPLIED for worker in self._workers.values())

    def on_answered(self, unit: Unit, now: float, ran: int | None = None, ran_s: float | None = None) -> None:
        """A worker has run a unit, or the first `ran` items of it, or said why it can't. That took it `ran_s`, where it tells."""
        worker, given = self._take(unit)
        if ran_s is not None:
            worker.travel_s = min(worker.travel_s, max(now - given.at - ran_s, 0.0))
        # It was begun when it had arrived and what was before it was through, as it seems from here.
        began_at = max(worker.answered_at, given.at + worker.away_s)
        unit.pace.observe(unit.size if ran is None else ran, now - began_at)
        worker.answered_at = now

    def on_unfinished(self, rest: Unit) -> None:
        """A worker gives back what it has not begun."""
        self._again.append(rest)

    def on_lost(self, unit: Unit, loss: Loss) -> bool:
        """A unit will not be answered. True when it is given out again, False when that was its last time."""
        self._take(unit)
        if loss is Loss.NOT_RUN:
            self._again.append(unit)
            return True
        unit.losses += 1
        unit.deaths += loss is Loss.DEATH
        if unit.losses > self._task_retries:
            return False
        if loss is Loss.DEATH:
            self._suspects.extend(unit.parts())
        else:
            self._again.append(unit)
        return True

    def _take(self, unit: Unit) -> tuple[_Worker, _Assignment]:
        worker = self._worker_of.pop(unit)
        given = worker.out.pop(unit)
        worker.backlog_s -= given.expected_s
        if len(worker.out) == _SUPPLIED - 1 and self._workers.get(worker.name) is worker:
            self._supplied -= 1
        if not worker.out:
            worker.backlog_s, worker.alone = 0.0, False
        return worker, given

    # ---- what to do -------------------------------------------------------------------------------------

    def assign(self, now: float) -> Iterator[tuple[str, Unit]]:
        """Units to send now, and the worker for each."""
        yield from self._assign_suspects(now)
        if self._suspects:  # they wait for workers that have nothing else: these get no more until then
            return
        free = [(worker.backlog_s, len(worker.out), name) for name, worker in self._workers.items()]
        heapq.heapify(free)
        while free:
            _backlog_s, _count, name = free[0]
            worker = self._workers[name]
            unit = self._next_for(worker)
            if unit is None:  # there is no more, or no room even at the one with the least
                return
            self._give(worker, unit, now)
            heapq.heapreplace(free, (worker.backlog_s, len(worker.out), name))
            yield name, unit

    def _assign_suspects(self, now: float) -> Iterator[tuple[str, Unit]]:
        for worker in list(self._workers.values()) if self._suspects else ():
            if self._suspects and not worker.out:
                unit = self._suspects.popleft()
                self._give(worker, unit, now)
                worker.alone = True
                yield worker.name, unit

    def _next_for(self, worker: _Worker) -> Unit | None:
        if self._again:
            unit = self._again[0]
            return self._again.popleft() if worker.has_room(unit.pace, unit.size) else None
        while self._sources:
            source = self._sources[0]
            size = source.next_size(len(self._workers))
            if not size:
                self._sources.popleft()
            elif not worker.has_room(source.pace, size, is_ending=source.is_ending(len(self._workers))):
                return None
            else:
                taken = source.take(size)
                if taken is not None:
                    return taken
        return None

    def _give(self, worker: _Worker, unit: Unit, now: float) -> None:
        expected_s = unit.pace.expected_s(unit.size)
        expected_s = expected_s if math.isfinite(expected_s) else AHEAD_S
        worker.out[unit] = _Assignment(now, expected_s)
        self._supplied += len(worker.out) == _SUPPLIED
        worker.backlog_s += expected_s
        self._worker_of[unit] = worker

    def give_up(self) -> tuple[list[Source], list[Unit]]:
        """Forget all that waits: what has never been out, and what was lost."""
        sources, self._sources = list(self._sources), deque()
        units = [*self._again, *self._suspects]
        self._again.clear()
        self._suspects.clear()
        return sources, units

    # ---- what is where ----------------------------------------------------------------------------------

    @property
    def is_supplied(self) -> bool:
        """True when every worker has something to go on with once it has answered."""
        return 0 < self._supplied == len(self._workers)

    @property
    def out(self) -> int:
        """Items that workers have."""
        return sum(unit.size for unit in self._worker_of)

    @property
    def waiting(self) -> int:
        """Items that no worker has."""
        units = sum(unit.size for queue in (self._again, self._suspects) for unit in queue)
        return units + sum(source.items for source in self._sources)

    def outstanding(self, worker: str) -> int:
        """Units that a worker has."""
        return len(self._workers[worker].out) if worker in self._workers else 0

    def sanity_check(self) -> None:
        """Raise AssertionError when the books do not agree with each other."""
        for unit, worker in self._worker_of.items():
            if unit not in worker.out:
                raise AssertionError(f"{unit} is out, but not with {worker.name}")
        supplied = [worker for worker in self._workers.values() if len(worker.out) >= _SUPPLIED]
        if len(supplied) != self._supplied:
            raise AssertionError(f"{self._supplied} workers are supplied by the books, and {len(supplied)} are")
        for worker in self._workers.values():
            if worker.alone and len(worker.out) != 1:
                raise AssertionError(f"{worker.name} has {len(worker.out)} units, of which one is to be alone")
            if any(self._worker_of.get(unit) is not worker for unit in worker.out):
                raise AssertionError(f"{worker.name} has what another one has")
