"""The workers as the controller believes them to be: who lives and takes work, and what each has left."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fluster_bus.core.version import VERSION
from fluster_bus.messages import Capacity, TaskRecord, WorkerId, WorkerInfo
from fluster_bus.messages.parts.wire_range import why_apart
from fluster_services import capacity, lifecycle
from fluster_services.controller.state.first_fit import FirstFit
from fluster_services.controller.state.job_index import JobIndex
from fluster_services.controller.state.liveness import Liveness
from fluster_services.controller.state.shares import NOTHING, Amount


class WorkerIndex:
    """An index over registrations, heartbeats and records. Times are seconds of a monotonic clock."""

    def __init__(self, job_index: JobIndex, liveness: Liveness) -> None:
        self.workers: dict[WorkerId, WorkerInfo] = {}  # those that have registered
        self.liveness = liveness
        self._job_index = job_index
        self._rooms: dict[WorkerId, WorkerView] = {}  # of those that live and take work
        self._first_fit = FirstFit()
        self._total = NOTHING  # of the same
        self._changed: set[WorkerId] = set()  # those that have to be looked at again
        self.misfits: Mapping[Capacity, float] = {}  # {need: since when no registered worker could ever cover it}

    # ---- events -----------------------------------------------------------------------------------------

    def on_registered(self, info: WorkerInfo, *, now: float) -> None:
        """A worker is in the table: a sign of life, also from one that was given up."""
        here = f"the cluster's controller (fluster {VERSION})"
        apart = why_apart(info.wire, f"worker {info.worker_id} (fluster {info.version})", here=here)
        self.workers[info.worker_id] = info if apart is None else info.model_copy(update={"trouble": apart})
        self.liveness.forget(info.worker_id)
        self.liveness.expect(info.worker_id, now=now, timeout_s=info.worker_timeout_s)
        self._changed.add(info.worker_id)

    def on_left(self, worker_id: WorkerId) -> None:
        """A worker is gone from the table: it will not be heard, and nothing need wait for it."""
        self.workers.pop(worker_id, None)
        if self._job_index.held_by(worker_id):
            # A forgotten one would have its full time again as soon as a record names it.
            self.liveness.give_up(worker_id)
        elif self.liveness.is_alive(worker_id):  # it left by itself; one that was lost stays lost
            self.liveness.forget(worker_id)
        self._changed.add(worker_id)

    def on_beat(self, worker_id: WorkerId, *, now: float, free: Capacity) -> bool:
        """A worker lives. Returns True when it may take what it did not take before, see `Liveness.on_beat`."""
        may_take_more = self.liveness.on_beat(worker_id, now=now, free=free)
        if may_take_more:
            self._changed.add(worker_id)
        return may_take_more

    def on_no_listener(self, need: Capacity, /, *, spared: Collection[WorkerId]) -> None:
        """No program listened to an offer of that: those with room, by the records and by what they said, missed it.

        Their connections are away, as after the server's restart. Each tells by its next beat that it is back. The workers in
        `spared` were not to have it.
        """
        for worker_id, _ in self.with_room(need):
            if worker_id not in spared and capacity.fits(need, self.said_free(worker_id)):
                self.liveness.on_missed_offer(worker_id)

    def take_lost(self, *, now: float) -> list[WorkerId]:
        """The workers that have been silent for too long, each once. Asked once for each interval between beats."""
        lost = self.liveness.take_lost(now=now)
        self._changed.update(lost)
        return lost

    # ---- who there is -----------------------------------------------------------------------------------

    def dead(self) -> list[WorkerId]:
        """Those that are registered, or hold something, and do not live."""
        known = dict.fromkeys((*self._job_index.holders(), *self.workers))
        return [each for each in known if not self.liveness.is_alive(each)]

    def lost_tasks(self, worker_id: WorkerId, *, now: float, reason: str) -> list[tuple[TaskRecord, int]]:
        """The records of what a worker that is lost held, as they are to be, and the revisions they replace."""
        held = [row for _, row in self._job_index.held_by(worker_id)]
        lost = [
            (lifecycle.lose_worker(row.value, worker_id=worker_id, now=now, reason=reason), row.revision)
            for row in held
        ]
        return [(record, revision) for record, revision in lost if record is not None]

    def takes_work(self, worker_id: WorkerId, /) -> bool:
        """True while the worker lives, is well and is not about to leave."""
        info = self.workers.get(worker_id)
        is_fit = info is not None and not info.draining and not info.trouble
        return is_fit and self.liveness.is_alive(worker_id)

    def troubles(self) -> list[tuple[WorkerId, str]]:
        """Those that live and take no work for the time being, and why, by name."""
        return [
            (worker_id, info.trouble)
            for worker_id, info in sorted(self.workers.items())
            if info.trouble and self.liveness.is_alive(worker_id)
        ]

    def withheld(self) -> list[tuple[WorkerId, str]]:
        """What living workers give to no task of their GPUs for the time being, and why, by name of the worker."""
        return [
            (worker_id, why)
            for worker_id, info in sorted(self.workers.items())
            for why in info.withheld
            if self.liveness.is_alive(worker_id)
        ]

    def said_free(self, worker_id: WorkerId, /) -> Capacity:
        """What the worker itself said last that it has left."""
        return self.liveness.free(worker_id)

    def totals(self) -> list[tuple[WorkerId, Capacity]]:
        """What those that are not about to leave have when nothing runs there, by name."""
        return [(worker_id, info.total) for worker_id, info in sorted(self.workers.items()) if not info.draining]

    def note_misfits(self, needs: Iterable[Capacity], *, now: float) -> None:
        """Look which of the needs of those that wait no registered worker could ever cover."""
        totals = self.totals()
        is_detecting = any(info.detecting for info in self.workers.values())
        misfits = [
            need
            for need in needs
            if totals
            and not (need.devices and is_detecting)
            and not any(capacity.fits(need, total) for each, total in totals if each not in need.elsewhere)
        ]
        self.misfits = {need: self.misfits.get(need, now) for need in misfits}

    def views(self) -> list[WorkerView]:
        """The workers that live and take work, as far as it matters to tasks that wait for them, by name."""
        self._catch_up()
        jobs = {each: {key.job_id for key, _ in self._job_index.held_by(each)} for each in self._rooms}
        return [
            dataclasses.replace(view, jobs=tuple(sorted(jobs[each])), is_away=self.liveness.has_missed_offer(each))
            for each, view in sorted(self._rooms.items())
        ]

    def rooms(self) -> Collection[WorkerView]:
        """The same workers, without what they hold, in any order."""
        self._catch_up()
        return self._rooms.values()

    def total(self) -> Amount:
        """What the same workers have together when nothing runs there."""
        self._catch_up()
        return self._total

    def with_room(self, need: Capacity, /) -> Iterator[tuple[WorkerId, Capacity]]:
        """Those that live, take work and have room by the records, and what each has left.

        The records are newer than what a worker's last beat said. What changes between two steps is taken into account.
        """
        self._catch_up()
        return self._first_fit.with_room(need)

    def left(self, worker_id: WorkerId) -> Capacity | None:
        """What a worker has left by the records; None when it takes no work."""
        return self._left(worker_id) if self.takes_work(worker_id) else None

    def _left(self, worker_id: WorkerId) -> Capacity:
        info = self.workers[worker_id]
        return capacity.withhold(
            capacity.minus(info.total, self._job_index.taken(worker_id)), dict(info.withheld_devices)
        )

    def _catch_up(self) -> None:
        self._changed |= self._job_index.take_changed_holders()
        for worker_id in sorted(self._changed):
            known = self._rooms.get(worker_id)
            if self.takes_work(worker_id):
                total, free = self.workers[worker_id].total, self._left(worker_id)
                if known is None or known.total is not total:
                    self._count(known, total)
                self._rooms[worker_id] = WorkerView(name=worker_id, total=total, free=free)
                self._first_fit.put(worker_id, free)
            else:
                self._count(known, None)
                self._rooms.pop(worker_id, None)
                self._first_fit.remove(worker_id)
        self._changed.clear()

    def _count(self, before: WorkerView | None, after: Capacity | None) -> None:
        less = Amount.of(before.total) if before is not None else NOTHING
        more = Amount.of(after) if after is not None else NOTHING
        self._total = Amount(*(has - gone + new for has, gone, new in zip(self._total, less, more, strict=True)))


@dataclass(frozen=True)
class WorkerView:
    """A worker as the controller believes it to be."""

    name: str
    total: Capacity
    free: Capacity
    jobs: tuple[str, ...] = ()  # those whose tasks it holds
    is_away: bool = False  # it had room for an offer, found no listener, and was not heard since
