"""The same Zephyr pipelines on Fluster, in Zephyr's own process, and with --peers DIR on Iris' local cluster, in turns: see zephyr_work.py."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.actor_work import Figures
from benchmarks.hyperqueue_jobs import PEERS_VARIABLE
from benchmarks.row import Row
from benchmarks.side_by_side import medians
from benchmarks.sides import FLUSTER, Side, can_be_apart, say_missing
from benchmarks.zephyr_work import ROWS

TURNS = 2
LOCAL, IRIS = "LocalClient", "Iris"
# Its actors listen on all addresses, and it asks the system which one leads outside: here that is this machine itself.
_APART = (
    *("unshare", "--net", "sh", "-c"),
    'ip link set lo up && ip route add default dev lo src 127.0.0.1 && exec "$@"',
    "sh",
)
_PACKAGES = (
    "'marin-zephyr>=0.2.227.dev0' 'marin-fray>=0.2.227.dev0' 'marin-iris[controller]>=0.2.227.dev0' "
    "'marin-finelog>=0.2.67.dev0' 'marin-finelog-server>=0.2.67.dev0'"
)
# (what, its figure, {whom it is held against: the ratio to reach})
_WORKS = (
    ("Zephyr: a pool's first worker is there", "ready_s", {IRIS: "≤ 0.33"}),
    ("a small pipeline: map, filter", "small_s", {IRIS: "≤ 1", LOCAL: "≤ 1"}),
    ("words of the standard library, counted", "words_s", {IRIS: "≤ 1", LOCAL: "≤ 1"}),
    (f"group_by of {ROWS:,} rows", "group_by_s", {IRIS: "≤ 1", LOCAL: "≤ 1"}),
)


def run() -> Iterator[Row]:
    if importlib.util.find_spec("zephyr") is None or importlib.util.find_spec("fray") is None:
        sys.stderr.write("*** ZEPHYR NOT MEASURED: `make setup-zephyr` installs it, on Python 3.12 ***\n")
        return
    sides = _sides()
    found: dict[str, list[Figures]] = {side.name: [] for side in sides}
    for turn in range(TURNS):
        for side in sides if turn % 2 else reversed(sides):
            found[side.name].append(side.worked())
    figures = {name: medians(rounds) for name, rounds in found.items()}
    own = figures.pop(FLUSTER)
    for what, key, targets in _WORKS:
        for place, (name, target) in enumerate((name, target) for name, target in targets.items() if name in figures):
            theirs = figures[name][key]
            value = f"{own[key]:.2f} s"
            yield Row(
                "" if place else what, "" if place else value, f"{name} {theirs:.2f} s", own[key] / theirs, target
            )
        if not targets.keys() & figures.keys():
            yield Row(what, f"{own[key]:.2f} s")


def _sides() -> Sequence[Side]:
    ours = {name: _side(name, side, sys.executable) for name, side in ((FLUSTER, "fluster"), (LOCAL, "local"))}
    interpreter = Path(os.environ.get(PEERS_VARIABLE, "")) / "venv-iris" / "bin" / "python"
    if not (PEERS_VARIABLE in os.environ and interpreter.exists()):
        say_missing(
            IRIS, f"which is not here: `python3 -m venv DIR/venv-iris`, `DIR/venv-iris/bin/pip install {_PACKAGES}`"
        )
    elif not can_be_apart():
        say_missing(IRIS, "which listens to the outside: run this where `unshare --net` is allowed")
    else:
        ours[IRIS] = _side(IRIS, "iris", str(interpreter), _APART)
    return list(ours.values())


def _side(name: str, side: str, interpreter: str, prefix: tuple[str, ...] = ()) -> Side:
    return Side(name, (*prefix, interpreter, "-m", "benchmarks.zephyr_work", side), ())
