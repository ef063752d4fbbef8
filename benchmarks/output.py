"""What it costs to see what a job writes, against a plain pipe between the same program and `cat`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.row import Row
from fluster import LocalCluster
from fluster_bus.access.address import ADDRESS_VARIABLE

LINES, TASKS = 200_000, 4
ROUNDS = 3
_FLUSTER = str(Path(sys.executable).with_name("fluster"))
_PROGRAM = "import sys\nfor number in range(int(sys.argv[1])): print(f'line {number:08d} {30 * \"x\"}')"


class Taken(NamedTuple):
    """Medians of the rounds."""

    wall_s: float
    cpu_s: float  # of the command alone, without what it asks of others


def _program(lines: int) -> tuple[str, ...]:
    return (sys.executable, "-c", _PROGRAM, str(lines))


def _taken(command: Sequence[str], environment: Mapping[str, str]) -> Taken:
    return Taken(*map(statistics.median, zip(*(_run(command, environment) for _ in range(ROUNDS)), strict=True)))


def _run(command: Sequence[str], environment: Mapping[str, str]) -> Taken:
    with tempfile.TemporaryFile() as file:
        before, started = os.times(), time.perf_counter()
        subprocess.run(command, env=environment, stdout=file, stderr=subprocess.DEVNULL, check=True)
        wall_s, after = time.perf_counter() - started, os.times()
        file.seek(0)
        shown = sum(1 for _ in file)
    assert shown == LINES, f"{shown} lines of {LINES} were shown"
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return Taken(wall_s, cpu_s)


def run() -> Iterator[Row]:
    """Seconds from the start of the command to its end, all lines in a file."""
    piped = _taken(("sh", "-c", '"$@" | cat', "sh", *_program(LINES)), os.environ)
    against = f"to `cat` {piped.wall_s:.2f} s"
    with LocalCluster() as cluster:
        environment = {**os.environ, ADDRESS_VARIABLE: cluster.address}
        submit = (_FLUSTER, "submit", "--follow")
        one = _taken((*submit, "--", *_program(LINES)), environment)
        several = _taken((*submit, "--array", f"0-{TASKS - 1}", "--", *_program(LINES // TASKS)), environment)
        stored = _taken((_FLUSTER, "logs", "last"), environment)
    yield Row(f"{LINES:,} lines, `submit --follow`", f"{one.wall_s:.2f} s", against, one.wall_s / piped.wall_s, "≤ 2 s")
    yield Row("CPU of that client", f"{one.cpu_s:.2f} s", target="≤ 1 s")
    yield Row(
        f"the same lines by {TASKS} tasks", f"{several.wall_s:.2f} s", against, several.wall_s / piped.wall_s, "≤ 2 s"
    )
    yield Row("the same, stored, by `logs`", f"{stored.wall_s:.2f} s", against, stored.wall_s / piped.wall_s, "≤ 2 s")
