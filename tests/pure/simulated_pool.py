"""A pool of workers without processes, bus or waiting: the real dispatch, with a clock that jumps from one event to the next."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fluster.worker_pool.dispatch import Dispatch
from fluster.worker_pool.work import Batch, Outcome, Slice, blocks_of

# As measured with nats-server on two cores: what a slice costs beside its items.
CLIENT_S = 100e-6  # to send it and to take its answer, one after the other for all workers
WORKER_S = 80e-6
TRAVEL_S = 100e-6  # one way


@dataclass
class Simulated:
    """What became of some maps."""

    seconds: float
    slices: int
    mean_idle: float  # the part of the time until the last answer in which a worker had nothing to do
    ends: list[float]  # of each map


def simulate(
    maps: Sequence[Sequence[float]], *, workers: int = 4, travel_s: float = TRAVEL_S, starts: Sequence[float] = ()
) -> Simulated:
    """Run maps, each given as the seconds that its items take; the nth begins at the nth of `starts`, if there is one."""
    pool = _Pool(workers, travel_s)
    for index, durations in enumerate(maps):
        pool.at(starts[index] if starts else 0.0, partial(pool.add, index, durations))
    return pool.run(len(maps))


class _Pool:
    def __init__(self, workers: int, travel_s: float) -> None:
        self.dispatch = Dispatch(task_retries=0)
        self.dispatch.on_workers([str(number) for number in range(workers)])
        self.travel_s = travel_s
        self.now = 0.0
        self.client_free_at = 0.0
        self.worker_free_at = dict.fromkeys(map(str, range(workers)), 0.0)
        self.busy_s = 0.0
        self.slices = 0
        self.ends: dict[int, float] = {}
        self.durations: dict[Batch, Sequence[float]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), action))

    def run(self, maps: int) -> Simulated:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
            self.dispatch.sanity_check()
        assert len(self.ends) == maps
        assert not self.dispatch.waiting
        assert not self.dispatch.out
        seconds = max(self.ends.values())
        idle = 1 - self.busy_s / seconds / len(self.worker_free_at)
        return Simulated(seconds, self.slices, idle, [self.ends[index] for index in range(maps)])

    def add(self, index: int, durations: Sequence[float]) -> None:
        left = len(durations)

        def on_outcome(outcome: Outcome) -> None:
            nonlocal left
            left -= outcome.stop - outcome.start
            if not left:
                self.ends[index] = self.now

        batch = Batch(b"", on_outcome, chunksize=None, is_complete=True)
        self.durations[batch] = durations
        batch.add(blocks_of([(number,) for number in range(len(durations))], 0, None))
        self.dispatch.add(batch)
        self.assign()

    def assign(self) -> None:
        for worker, unit in self.dispatch.assign(self.now):
            assert isinstance(unit, Slice)
            self.slices += 1
            self.client_free_at = max(self.client_free_at, self.now) + CLIENT_S / 2
            self.at(self.client_free_at + self.travel_s, partial(self.work, worker, unit))

    def work(self, worker: str, unit: Slice) -> None:
        takes_s = WORKER_S + sum(self.durations[unit.batch][unit.first : unit.stop])
        self.busy_s += takes_s
        self.worker_free_at[worker] = max(self.worker_free_at[worker], self.now) + takes_s
        self.at(self.worker_free_at[worker] + self.travel_s, partial(self.arrive, unit, takes_s - WORKER_S))

    def arrive(self, unit: Slice, ran_s: float) -> None:
        self.client_free_at = max(self.client_free_at, self.now) + CLIENT_S / 2
        self.at(self.client_free_at, partial(self.answer, unit, ran_s))

    def answer(self, unit: Slice, ran_s: float) -> None:
        self.dispatch.on_answered(unit, self.now, unit.size, ran_s)
        unit.batch.on_outcome(Outcome(unit.first, unit.stop))
        self.assign()
