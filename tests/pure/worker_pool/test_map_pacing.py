"""How items of maps are put into slices, tried on a simulated pool: its figures are the same on any machine."""

from __future__ import annotations

import random

import pytest

from fluster.worker_pool.dispatch import TAIL_S, Pace
from tests.pure.simulated_pool import simulate

WORKERS = 4
NOOP_S = 1e-6
RANDOM = random.Random(15)
LOADS = {
    "items of 1 ms": [0.001] * 1_000,
    "items of 3 ms": [0.003] * 400,
    "items of 10 ms": [0.01] * 200,
    "items of 20 ms": [0.02] * 200,
    "items of 0 to 20 ms": [RANDOM.uniform(0, 0.02) for _ in range(400)],
    "items that get longer": [number * 5e-6 for number in range(2_000)],
    "items that get shorter": [number * 5e-6 for number in reversed(range(2_000))],
    "a long item now and then": [0.02 if RANDOM.random() < 0.02 else NOOP_S for _ in range(5_000)],
}


def test_items_of_no_length_travel_in_few_slices() -> None:
    done = simulate([[NOOP_S] * 10_000], workers=WORKERS)
    assert done.slices <= 126
    assert done.seconds < 0.015


@pytest.mark.parametrize("round_trip_s", [0.05, 0.1])
@pytest.mark.parametrize("durations", [*LOADS.values(), [NOOP_S] * 10_000], ids=[*LOADS, "items of no length"])
def test_far_workers_are_not_idle_while_slices_travel(durations: list[float], round_trip_s: float) -> None:
    done = simulate([durations], workers=WORKERS, travel_s=round_trip_s / 2)
    ideal_s = sum(durations) / WORKERS
    assert done.seconds < 1.06 * ideal_s + 12 * round_trip_s, "slices have to grow, and each size travels once"
    assert done.slices < 2_000


def test_slices_are_few_also_for_many_workers() -> None:
    assert simulate([[NOOP_S] * 10_000], workers=16).slices <= 16 * 20


@pytest.mark.parametrize("durations", LOADS.values(), ids=LOADS)
def test_workers_are_busy_until_the_end_whatever_the_items_take(durations: list[float]) -> None:
    done = simulate([durations], workers=WORKERS)
    ideal_s = sum(durations) / WORKERS
    assert done.seconds < 1.06 * ideal_s, "5 % for the calls and for what is left over at the end"
    assert done.mean_idle < 0.05


def test_long_items_behind_short_ones_are_shared() -> None:
    done = simulate([[NOOP_S] * 1_000 + [0.1] * 40], workers=WORKERS)
    assert done.seconds < 1.0 * 1.8, (
        "1 s shared evenly; a slice that was made by the pace of the short ones has some more"
    )


def test_several_maps_follow_each_other() -> None:
    one = simulate([[NOOP_S] * 10_000], workers=WORKERS)
    three = simulate([[NOOP_S] * 10_000] * 3, workers=WORKERS)
    assert three.ends == sorted(three.ends), "first come, first served"
    assert three.seconds < 1.1 * 3 * one.seconds
    mixed = simulate([[NOOP_S] * 10_000, [0.002] * 200, [NOOP_S] * 10_000], workers=WORKERS)
    assert mixed.seconds < 0.1 * 1.3
    many = simulate([[0.001] * 50] * 20, workers=WORKERS)
    assert many.seconds < 0.25 * 1.15


def test_a_map_that_comes_while_another_runs_is_begun_by_who_is_free() -> None:
    done = simulate([[0.02] * 40, [0.001] * 100], workers=WORKERS, starts=(0.0, 0.1))
    assert done.seconds < (0.8 + 0.1) / WORKERS * 1.15


def test_few_long_items_are_with_one_worker_each() -> None:
    assert simulate([[1.0] * 8], workers=WORKERS).seconds == pytest.approx(2.0, rel=0.01)


def test_a_size_is_new_until_a_call_of_it_was_answered() -> None:
    pace = Pace(0.7)
    assert pace.is_new(1)
    pace.observe(1, 0.0001)
    assert not pace.is_new(1)
    assert pace.is_new(2)
    pace.observe(4, 0.0004)
    assert pace.chunk(TAIL_S) == 8, "at most double what is known to go well"
    assert pace.chunk(0.0004) == 4
