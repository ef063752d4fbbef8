"""The work that actor systems are compared by: how much of it, and how its figures are taken.

Imports nothing but the standard library: the peers' scripts run it in interpreters of their own.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

PAYLOAD = b"x" * 16
CALLS, WARM_UP = 2_000, 200
OUT, BATCHES = 1_000, 10  # calls that are out together, and how often
BROADCAST_TO, BROADCASTS = 8, 200
ACTORS = 4
TASKS, TASK_ROUNDS = 10_000, 3
MIB = 1 << 20
ECHOES, LARGE = 100, 64 * MIB
LARGE_CALLS = 10

REPLIED, ALL_THERE = "replied", "all there"  # what `start` says, a line each

Figures = dict[str, float]  # {key: median}, as side_by_side.py knows them


def median_s(call: Callable[[], object], times: int, *, warm_up: int) -> float:
    for _ in range(warm_up):
        call()
    return statistics.median([_timed(call) for _ in range(times)])


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


async def awaited_median_s(call: Callable[[], Awaitable[object]], times: int, *, warm_up: int) -> float:
    """The same of what is awaited."""
    for _ in range(warm_up):
        await call()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def tell(figures: Figures) -> None:
    print(json.dumps(figures), flush=True)


def say(word: str) -> None:
    print(word, flush=True)


def wait_until_measured() -> None:
    """Until the measuring program has let go."""
    sys.stdin.read()
