"""Which workers live, judged by the controller's own clock."""

from __future__ import annotations

from dataclasses import dataclass

from fluster_bus.messages import Capacity, WorkerId
from fluster_services.capacity import has_counts


@dataclass
class _Worker:
    heard_at: float
    free: Capacity
    timeout_s: float
    missed_beats: int = 0
    judged_lost: bool = False
    missed_offer: bool = False  # one found no listener there


class Liveness:
    """When each worker was last heard. Times are seconds of a monotonic clock.

    A worker is lost when it was silent for `timeout_s`, or longer if it needs longer to end what it runs, and in as many looks
    as `beats`, one for each beat that it should have sent: a controller that could not look for a while, because the machine
    was busy, has not heard what was sent meanwhile.
    """

    def __init__(self, timeout_s: float, *, beats: int = 1) -> None:
        self._timeout_s = timeout_s
        self._beats = beats
        self._workers: dict[WorkerId, _Worker] = {}

    def on_beat(self, worker_id: WorkerId, *, now: float, free: Capacity) -> bool:
        """A worker lives. Returns True when it may take what it did not take before: it has more room than it said, or is new or
        back, or an offer found no listener there.
        """
        known = self._workers.get(worker_id)
        if known is None:
            self._workers[worker_id] = _Worker(now, free, self._timeout_s)
            return True
        may_take_more = known.judged_lost or known.missed_offer or _has_more(free, known.free)
        known.heard_at, known.free, known.missed_beats = now, free, 0
        known.judged_lost = known.missed_offer = False
        return may_take_more

    def on_missed_offer(self, worker_id: WorkerId) -> None:
        """No program listened to an offer that the worker had room for: its connection is away, and may come back."""
        if worker_id in self._workers:
            self._workers[worker_id].missed_offer = True

    def has_missed_offer(self, worker_id: WorkerId) -> bool:
        """True since `on_missed_offer` until it is heard again."""
        worker = self._workers.get(worker_id)
        return worker is not None and worker.missed_offer

    def expect(self, worker_id: WorkerId, *, now: float, timeout_s: float = 0.0) -> None:
        """A worker is known from the records: it has its full time to be heard, by its own setting if that is longer."""
        if worker_id not in self._workers:
            self._workers[worker_id] = _Worker(now, Capacity(), max(timeout_s, self._timeout_s))

    def on_interruption(self, *, now: float) -> None:
        """The bus or the controller was away, so nothing could be heard: all have their full time again."""
        for worker in self._workers.values():
            if not worker.judged_lost:
                worker.heard_at = now
                worker.missed_beats = 0

    def take_lost(self, *, now: float) -> list[WorkerId]:
        """The workers that have been silent for too long, each once. Asked once for each interval between beats."""
        for worker in self._workers.values():
            worker.missed_beats += 1
        lost = [
            worker_id
            for worker_id, worker in self._workers.items()
            if not worker.judged_lost
            and now - worker.heard_at >= worker.timeout_s
            and worker.missed_beats >= self._beats
        ]
        for worker_id in lost:
            self._workers[worker_id].judged_lost = True
        return lost

    def give_up(self, worker_id: WorkerId) -> None:
        """A worker will not be heard again: it is lost as of now, and `take_lost` does not return it."""
        if worker_id in self._workers:
            self._workers[worker_id].judged_lost = True

    def forget(self, worker_id: WorkerId) -> None:
        self._workers.pop(worker_id, None)

    def next_deadline(self) -> float | None:
        """When the next worker would be lost if nothing is heard."""
        times = [worker.heard_at + worker.timeout_s for worker in self._workers.values() if not worker.judged_lost]
        return min(times, default=None)

    def timeout_s(self, worker_id: WorkerId) -> float:
        """How long the worker may be silent."""
        worker = self._workers.get(worker_id)
        return worker.timeout_s if worker is not None else self._timeout_s

    def is_alive(self, worker_id: WorkerId) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and not worker.judged_lost

    def silent_for_s(self, worker_id: WorkerId, *, now: float) -> float:
        worker = self._workers.get(worker_id)
        return now - worker.heard_at if worker is not None else 0.0

    def free(self, worker_id: WorkerId) -> Capacity:
        """What the worker said it has left; approximate by the time it is read."""
        worker = self._workers.get(worker_id)
        return worker.free if worker is not None else Capacity()

    def alive(self) -> list[WorkerId]:
        return sorted(worker_id for worker_id, worker in self._workers.items() if not worker.judged_lost)


def _has_more(free: Capacity, before: Capacity) -> bool:
    return (
        free.cpu > before.cpu
        or free.memory > before.memory
        or free.disk > before.disk
        or free.devices > before.devices
        or (bool(free.other_devices) and not has_counts(free.other_devices, before.other_devices))
        or not has_counts(free.resources, before.resources)
        or (before.tasks is not None and free.tasks is not None and free.tasks > before.tasks)
    )
