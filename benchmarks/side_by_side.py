"""The same work by Fluster and by its peers, each in its turn: see actor_work.py. With --peers DIR; alone without."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.actor_work import ACTORS, BROADCAST_TO, OUT, TASKS, Figures
from benchmarks.row import Row
from benchmarks.sides import FLUSTER, Side, fluster, peers

ROUNDS = 3
STARTS = 5

_BARE = "nc.request"


@dataclass(frozen=True)
class Work:
    what: str
    key: str  # of its figure
    show: Callable[[float], str]
    targets: Mapping[str, str] = field(default_factory=dict)  # {whom it is held against: the ratio to reach}
    target: str = ""  # where the figure itself is to reach something
    theirs: str = ""  # the key of the peers' figure, where they have one way for what Fluster has two for


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}/s"


WORKS = (
    Work("blocking call, p50", "call_s", _us, {_BARE: "≤ 0.8", "xoscar": "≤ 1"}),
    Work(f"{OUT:,} calls out, 1 actor, a future each", "futures_of_one", _rate, {"xoscar": "≥ 6"}),
    Work(f"the same over {ACTORS} actors", "futures_of_four", _rate, {"xoscar": "≥ 8"}),
    Work(f"broadcasts to {BROADCAST_TO}, gathered", "broadcasts", _rate, {"xoscar": "≥ 2"}),
    Work("the same, with time-outs", "timed_broadcasts", _rate, {"xoscar": "≥ 2"}),
    Work(f"{TASKS:,} no-op tasks, {ACTORS} workers", "tasks", _rate, {"xoscar": "≥ 6"}),
    Work("the same by map()", "map", _rate, {"xoscar": "≥ 12"}, theirs="tasks"),
    Work("the same, in chunks", "tasks_in_chunks", _rate, target="≥ 1,000,000/s"),
    Work("1 MiB echoed, one way", "echo_mb_s", lambda rate: f"{rate:,.0f} MB/s", {"xoscar": "≥ 4"}),
    Work("64 MiB numpy argument, first", "large_first_s", _ms),
    Work("the same, warm", "large_warm_s", _ms, target="≤ 10 ms"),
    Work("process start to first reply", "first_reply_s", lambda seconds: f"{seconds:.2f} s", target="≤ 0.35 s"),
    Work(f"memory of daemons, {ACTORS} actors (PSS)", "memory_mib", lambda mib: f"{mib:.0f} MiB", target="≤ 110 MiB"),
)


def run() -> Iterator[Row]:
    sides = [fluster(), *peers()]
    load = os.getloadavg()[0]
    figures = {name: medians(rounds) for name, rounds in _rounds(sides).items()}
    yield Row("(load of the machine, before and after)", f"{load:.1f}, {os.getloadavg()[0]:.1f}")
    yield from rows(figures)


def _rounds(sides: Sequence[Side]) -> dict[str, list[Figures]]:
    """Each side's figures. They take turns, so that what else the machine does meets all of them."""
    found: dict[str, list[Figures]] = {side.name: [] for side in sides}
    for side in sides:
        _measured(side.name, side.started)  # the first start reads everything from the disk
    for number in range(STARTS + ROUNDS):
        for side in sides if number % 2 else reversed(sides):
            found[side.name].append(_measured(side.name, side.started if number < STARTS else side.worked))
    return found


def _measured(name: str, measure: Callable[[], Figures]) -> Figures:
    """None of a peer that fails, as they may on a busy machine: the others have taken minutes by then."""
    try:
        return measure()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        if name == FLUSTER:
            raise
        sys.stderr.write(f"*** NOT COMPARED with {name} in this round: {error} ***\n")
        return {}


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure over the rounds that have it."""
    keys = {key for figures in rounds for key in figures}
    return {key: statistics.median(figures[key] for figures in rounds if key in figures) for key in keys}


def rows(figures: Mapping[str, Figures]) -> Iterator[Row]:
    """A row for each work and each one that it is held against; `figures` by side, Fluster's first."""
    (_, own), *others = figures.items()
    for work in WORKS:
        key = work.theirs or work.key
        held = {name: theirs[key] for name, theirs in others if key in theirs}
        if work.key == "call_s" and "bare_s" in own:
            held = {_BARE: own["bare_s"], **held}
        value = work.show(own[work.key])
        if not held:
            yield Row(work.what, value, target=work.target)
        for place, (name, theirs) in enumerate(held.items()):
            yield Row(
                work.what if place == 0 else "",
                value if place == 0 else "",
                f"{name} {work.show(theirs)}",
                own[work.key] / theirs,
                work.targets.get(name, "") or (work.target if place == 0 else ""),
            )
