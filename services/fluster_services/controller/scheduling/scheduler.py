"""Which waiting task is offered next: first fit, by priority, and in the order of submission within one.

Tasks that need the same wait in one line. A line whose first task found no worker with room is closed until a worker
says that it has room again, and with it every line that needs at least as much. So the cost of an offer depends on
the number of different needs, not on how many tasks wait.

Smaller tasks thus overtake a large one, and might do so for ever. Once it has been overtaken for longer than
`reserve_after_s` it is `starving`, and a worker is kept free for it: whatever is behind it in the order is offered to
the others only, until it is placed. There is one such reservation at a time.

Gangs are gathered elsewhere, as a whole. Here they have a position in the order: they are overtaken, overtake and starve as
tasks do, and then as many workers are kept free as they need.
Priorities are strict: a task waits as long as there is one of a higher priority that fits.
How several namespaces share, and what quotas keep waiting, is in order.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fluster_bus.messages import Capacity, Namespace
from fluster_services.capacity import fits
from fluster_services.controller.scheduling.order import FairOrder, Position, Starving
from fluster_services.controller.scheduling.scheduler_lines import (
    MAX_WINDOW,
    Gang,
    GangLine,
    Line,
    Reservation,
    is_as_large,
    is_at_least,
)
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.shares import Shares

_WIDENS_AFTER = 8  # offers that are accepted in a row


class Scheduler:
    """The waiting tasks. It decides which to offer; offering is for others. Times are seconds of a monotonic clock."""

    def __init__(self, shares: Shares | None = None) -> None:
        self._shares = Shares() if shares is None else shares
        self.order = FairOrder(self._shares)
        self._lines: dict[Capacity, Line] = {}
        self._waiting: dict[tuple[JobKey, int], Capacity] = {}
        self._needing: dict[Capacity, set[tuple[JobKey, int]]] = {}  # {need: who waits for it, also while out}
        self._out: dict[tuple[JobKey, int], Capacity] = {}  # {task: the need with which it was offered}
        self._since: dict[tuple[JobKey, int], float] = {}  # {task: when it was added}
        self.gangs = GangLine(self._shares)
        self._reservation = Reservation(self.order)
        self.is_shared = False  # tasks of several namespaces wait
        self._present: dict[Namespace, int] = {}  # {namespace: its lines and gangs}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, position: Position, need: Capacity, *, now: float = 0.0) -> None:
        """A task waits; this may be called again."""
        task = (position.job, position.task)
        known = self._waiting.get(task)
        if known is not None:
            if known == need:
                return
            self._forget_need(task)
        self._since[task] = now
        self._waiting[task] = need
        self._needing.setdefault(need, set()).add(task)
        self._push(position, need)

    def _forget_need(self, task: tuple[JobKey, int]) -> None:
        need = self._waiting.pop(task, None)
        if need is not None:
            del self._since[task]
            tasks = self._needing[need]
            tasks.discard(task)
            if not tasks:
                del self._needing[need]

    def _push(self, position: Position, need: Capacity) -> None:
        line = self._lines.get(need)
        if line is None:
            line = self._lines[need] = Line(need, position.job.namespace)
            self._enter(line.namespace)
            line.closed = any(other.closed and is_at_least(need, other.need) for other in self._lines.values())
        heapq.heappush(line.heap, position)

    def _enter(self, namespace: Namespace) -> None:
        self._present[namespace] = self._present.get(namespace, 0) + 1
        self.is_shared = len(self._present) > 1

    def _leave(self, namespace: Namespace) -> None:
        self._present[namespace] -= 1
        if not self._present[namespace]:
            del self._present[namespace]
            self.is_shared = len(self._present) > 1
            self.gangs.not_overtaken.pop(namespace, None)

    def remove(self, job: JobKey, task: int) -> None:
        """A task no longer waits."""
        self._forget_need((job, task))
        self._bring_in((job, task))
        if self.order.kept and job not in self.gangs.by_job:
            self.order.forget_kept(job, task)
        reserved = self.reserved
        if reserved is not None and (reserved.job, reserved.task) == (job, task) and job not in self.gangs.by_job:
            self.release()

    def _bring_in(self, task: tuple[JobKey, int]) -> None:
        need = self._out.pop(task, None)
        if need is None:
            return
        self._shares.give_back(task[0].namespace, need)
        line = self._lines.get(need)
        if line is not None:
            line.out -= 1

    def take(self, limit: int) -> list[tuple[Position, Capacity]]:
        """Up to `limit` tasks to offer now; each is out until `on_declined` or `remove`."""
        taken: list[tuple[Position, Capacity]] = []
        while len(taken) < limit:
            if self.is_shared or self._shares.bounded:
                first = self._first_in_turn()
            else:
                first = self._first_in_line()
            if first is None:
                break
            first.rank = self._rank_of_line(first)[:2] if self.is_shared else None
            position = first.taken = heapq.heappop(first.heap)
            self._out[(position.job, position.task)] = first.need
            first.out += 1
            self._shares.take(first.namespace, first.need)
            taken.append((position, first.need))
        return taken

    def is_full(self, need: Capacity) -> bool:
        """True while as many tasks with that need are out as may be at once."""
        line = self._lines.get(need)
        return line is not None and line.out >= line.window

    def _first_in_line(self) -> Line | None:
        """The line that may offer whose first task is before all others. A plain loop: it is run for each offer."""
        first: Line | None = None
        for line in list(self._lines.values()):
            if line.closed or line.out >= line.window or not self._has_task(line):
                continue
            if first is None or line.heap[0] < first.heap[0]:
                first = line
        return first

    def _has_task(self, line: Line) -> bool:
        while line.heap:
            first = line.heap[0]
            task = (first.job, first.task)
            need = self._waiting.get(task)
            # Mostly one object, as `needed` gives it; to compare all fields takes as long as all else here.
            if (need is line.need or need == line.need) and task not in self._out:
                return True
            heapq.heappop(line.heap)
        if line.need not in self._needing and not line.out and self._lines.get(line.need) is line:
            del self._lines[line.need]
            self._leave(line.namespace)
        return False

    def on_accepted(self, need: Capacity, position: Position | None = None, *, now: float = 0.0) -> None:
        """An offer was taken. Its task is out until `remove`: its record is on its way.

        With its `position`, it is noted whom it has overtaken.
        """
        line = self._lines.get(need)
        if line is not None:
            if position is not None and position not in (self._reservation.position, self._reservation.last):
                line.overtaken_since = None  # it found room by itself; one that was helped tells nothing about the next
            line.accepted += 1
            if line.accepted % _WIDENS_AFTER == 0:
                line.window = min(MAX_WINDOW, line.window * 2)
        if position is not None:
            self._note_overtaken(position, line, now=now)

    def _note_overtaken(self, position: Position, line: Line | None, *, now: float) -> None:
        is_passed = self._is_passed_by_rank if self.is_shared or self._shares.bounded else self._is_passed
        for other in list(self._lines.values()):
            if other is not line and other.overtaken_since is None and is_passed(other, position):
                other.overtaken_since = now
        if self.gangs.not_overtaken:
            self.gangs.note_overtaken(lambda gang: self.order.was_before(gang, position), now=now)

    def _is_passed(self, line: Line, position: Position) -> bool:
        """True when the line's first task is before that position, and found no room, or is about to hear so."""
        return line.out > 0 or (line.closed and self._has_task(line) and line.heap[0] < position)

    def _is_passed_by_rank(self, line: Line, position: Position) -> bool:
        """The same where namespaces share the cluster, or have quotas."""
        if line.namespace == position.job.namespace:
            is_short = self._has_task(line) and line.heap[0] < position and not self._is_in_quota(line)
            return is_short or self._is_passed(line, position)
        # Not for want of quota: then it would not have had that room in any case.
        return (
            (line.closed or line.out > 0)
            and (first := line.heap[0] if self._has_task(line) else line.taken) is not None
            and self.order.was_before(first, position)
            and self._is_in_quota(line)
        )

    # ---- namespaces -------------------------------------------------------------------------------------

    def _rank_of_line(self, line: Line) -> tuple[int, float, Position]:
        return self.order.rank(line.heap[0])

    def _first_in_turn(self) -> Line | None:
        """The first of several namespaces that may offer although others go first that have as many out as they may.

        Room that is found by two at once might else go to who has more already. What needs less is not held up, as always.
        """
        ready: list[Line] = []
        full: list[Line] = []
        for line in list(self._lines.values()):
            if not line.closed and self._has_task(line) and self._is_in_quota(line):
                (ready if line.out < line.window else full).append(line)
        # Once for each namespace, which may have many lines.
        weighed = {namespace: self._shares.weighed(namespace) for namespace in {line.namespace for line in ready}}

        def rank(line: Line) -> tuple[int, float, Position]:
            return self.order.band(line.heap[0]), weighed[line.namespace], line.heap[0]

        if not full:
            return min(ready, key=rank, default=None)
        return next(
            (each for each in sorted(ready, key=rank) if not any(self._awaits(each, other) for other in full)), None
        )

    def _awaits(self, line: Line, other: Line) -> bool:
        """True when the other is to hear first: it ranked before, by what its namespace had without what is out."""
        return (
            line.namespace != other.namespace
            and is_as_large(line.need, other.need)
            and (other.rank or self._rank_of_line(other)[:2]) < self._rank_of_line(line)[:2]
        )

    def ranked_before(self, position: Position) -> Iterator[Position]:
        """The first of each line of other namespaces that ranks before what stands there."""
        rank = self.order.rank(position)
        for line in list(self._lines.values()):
            if line.namespace == position.job.namespace or not self._has_task(line) or not self._is_in_quota(line):
                continue
            if self._rank_of_line(line) < rank:
                yield line.heap[0]

    # ---- quotas -----------------------------------------------------------------------------------------

    def _is_in_quota(self, line: Line) -> bool:
        """True when the quota has room for the line's first task."""
        if line.namespace not in self._shares.bounded or not self._has_task(line):
            return True
        return self.order.has_quota(line.heap[0], line.need)

    # ---- answers ----------------------------------------------------------------------------------------

    def on_declined(self, position: Position, need: Capacity, *, room: bool) -> None:
        """An offer came back. Without `room` anywhere, tasks that need at least as much are not offered for now."""
        task = (position.job, position.task)
        self._bring_in(task)
        if self._waiting.get(task) == need:
            self._push(position, need)
            line = self._lines[need]
            line.window, line.accepted = 1, 0
            if room and not self.is_behind_reserved(position):
                line.closed = False  # perhaps by the answer to one that was not offered to all workers
        if not room:
            behind = self.is_behind_reserved(position)
            for line in list(self._lines.values()):
                # What is behind the reservation was not offered to the worker that is kept free: what is before it
                # may have room there.
                if is_at_least(line.need, need) and not (behind and self._is_before_reserved(line)):
                    line.closed = True

    # ---- gangs ------------------------------------------------------------------------------------------

    def add_gang(self, position: Position, need: Capacity, count: int) -> None:
        """A gang waits; this may be called again, also when it was held and then released."""
        known = self.gangs.by_job.get(position.job)
        if known is not None and (known.position, known.need, known.count) == (position, need, count):
            if not known.is_held:
                return
            known.is_held = False
            self.gangs.put(known)
        else:
            self.remove_gang(position.job)
            self.gangs.put(Gang(position, need, count))
            self._enter(position.job.namespace)

    def remove_gang(self, job: JobKey) -> bool:
        """A gang no longer waits; False when it did not."""
        gang = self.gangs.by_job.get(job)
        if gang is None:
            return False
        for task in sorted(gang.out):
            self.gangs.on_no_offer(job, task)
        self.gangs.remove(gang)
        self._leave(job.namespace)
        if gang.position == self.reserved:
            self.release()
        self.order.forget_kept(job, gang.position.task)
        return True

    def on_gathered(self, job: JobKey, *, now: float) -> None:
        """All tasks of a gang are claimed. It has overtaken those before it, and needs no reservation while that is so."""
        gang = self.gangs.by_job.get(job)
        if gang is None:
            return
        gang.is_held = True
        if gang.position == self.reserved:
            self.release()
        self.order.forget_kept(job, gang.position.task)
        self._note_overtaken(gang.position, None, now=now)

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
        gangs = self.gangs.starving(now=now, reserve_after_s=reserve_after_s)
        # Callers seldom look beyond the first, and there may be thousands of gangs.
        return heapq.merge(sorted(tasks, key=lambda each: each.position), gangs, key=lambda each: each.position)

    def deserving(self, *, now: float, reserve_after_s: float) -> Iterator[Starving]:
        """Those of them for whom workers may be kept free: whose quota has room, and whose namespace is not to go after
        another that waits, unless that has been overtaken for too long itself.
        """
        starving = self.starving(now=now, reserve_after_s=reserve_after_s)
        if self._shares.bounded:
            starving = (each for each in starving if self.order.has_quota(each.position, each.need, each.count))
        if not self.is_shared:
            return starving
        found = sorted(starving, key=lambda each: self.order.rank(each.position))
        waiting = self._ranks_of_others({each.position for each in found}) if found else set()
        return (each for each in found if not self._is_preceded(each.position, waiting))

    def _ranks_of_others(self, left_out: set[Position]) -> set[tuple[int, float, Namespace]]:
        lines = [
            line.heap[0] for line in list(self._lines.values()) if self._has_task(line) and self._is_in_quota(line)
        ]
        gangs = [
            gang.position
            for gang in self.gangs.by_job.values()
            if not gang.is_held and self.order.has_quota(gang.position, gang.need, gang.count)
        ]
        return {
            (*self.order.rank(position)[:2], position.job.namespace)
            for position in (*lines, *gangs)
            if position not in left_out
        }

    def _is_preceded(self, position: Position, waiting: set[tuple[int, float, Namespace]]) -> bool:
        # Those of higher priorities may have workers that are kept free, so they need not be waited for.
        band, share, _ = self.order.rank(position)
        return any(each[0] == band and each[1] < share and each[2] != position.job.namespace for each in waiting)

    @property
    def reserved(self) -> Position | None:
        """The task, or the first of the gang, for which workers are kept free."""
        return self._reservation.position

    def reserve(self, starving: Starving) -> None:
        """Workers are kept free for it instead of for another, until it no longer waits, or `release`."""
        if self.reserved is not None:
            self.release()
        self.order.keep_quota(starving)
        # A gang has no line of its own: a task with the same need is where its own position says.
        is_gang = starving.position.job in self.gangs.by_job
        self._reservation.make(starving.position, None if is_gang else starving.need)

    def release(self) -> None:
        """No worker is kept free from now on: those that were may have room for what was not offered to them."""
        self._reservation.end()
        self.on_room()

    def is_behind_reserved(self, position: Position) -> bool:
        """True when that task may not be offered to workers that are kept free."""
        return self._reservation.is_before(position)

    def is_short_of_quota(self, starving: Starving) -> bool:
        """True when the quota has no room for it, beside what it has itself while it is out."""
        position = starving.position
        if (position.job, position.task) in self._out or self.gangs.is_offered(position.job):
            return False
        return not self.order.has_quota(position, starving.need, starving.count)

    def _is_before_reserved(self, line: Line) -> bool:
        if line.need == self._reservation.need:
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
        lined = {(position.job, position.task) for line in self._lines.values() for position in line.heap}
        assert set(self._waiting) <= lined | set(self._out)  # noqa: S101
        assert set(self._out) <= set(self._waiting)  # noqa: S101
        assert set(self._since) == set(self._waiting)  # noqa: S101
        self.gangs.sanity_check()
        present: dict[Namespace, int] = {}
        for namespace in (
            *(line.namespace for line in self._lines.values()),
            *(job.namespace for job in self.gangs.by_job),
        ):
            present[namespace] = present.get(namespace, 0) + 1
        assert self._present == present  # noqa: S101
        for namespace, kept in self.order.kept.items():
            position = kept.position
            assert position.job.namespace == namespace  # noqa: S101
            assert (position.job, position.task) in self._waiting or position.job in self.gangs.by_job  # noqa: S101
        reserved = self.reserved
        if reserved is not None:
            assert (reserved.job, reserved.task) in self._waiting or reserved.job in self.gangs.by_job  # noqa: S101
