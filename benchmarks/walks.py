"""`python -m benchmarks.walks [NAME…]`: count what the five walks of docs/architecture.md run of the project's own Python.

Each walk is done a few times before it is counted, and then some times more, of which the one with the median number of
calls is shown. What counts is what all threads of this process call from the beginning of the walk until its caller has
the result; a coroutine that goes on after an `await` counts as a call. Threads that wait for an answer sleep at once
(`FLUSTER_EAGER_US=0`), so that the count does not depend on how long they wait. With `FLUSTER_LANES=off` the first walk
is shown without its lane.
"""

from __future__ import annotations

import argparse
import contextlib
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from fluster import ActorPool, ActorServer, Cluster, Entrypoint, JobRequest, LocalCluster, WorkerPool
from fluster_bus.direct.waiting import EAGER_VARIABLE

_ROOT = Path(__file__).parents[1]
_SOURCES = tuple(str(_ROOT / folder) + "/" for folder in ("fluster", "bus/fluster_bus", "services/fluster_services"))
_WARM_UP, _TIMES = 3, 9
_QUIET_S, _MOST_S = 0.02, 2.0  # without a call; spent in waiting for that
_MIB = 1 << 20
ITEMS = 10


@dataclass(frozen=True)
class Walk:
    """What one walk ran, of the project's own Python."""

    calls: int
    functions: int
    files: int
    threads: int


class CallCounter:
    """Counts calls on all threads of this process that are started after it was made, and on the one that made it."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, CodeType]] = []  # thread and function of each call
        self._is_own: dict[CodeType, bool] = {}
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def close(self) -> None:
        """Stop watching the thread that made it, and those that are started from now on."""
        sys.setprofile(None)
        threading.setprofile(None)

    def count(self, walk: Callable[[], object]) -> Walk:
        """Do the walk once, when all threads are quiet; what ran until it returned."""
        self._wait_quiet()
        self._seen.clear()
        walk()
        seen = self._seen[:]
        functions = {code for _, code in seen}
        return Walk(
            calls=len(seen),
            functions=len(functions),
            files=len({code.co_filename for code in functions}),
            threads=len({thread for thread, _ in seen}),
        )

    def _wait_quiet(self) -> None:
        deadline = time.monotonic() + _MOST_S
        before = -1
        while len(self._seen) != before and time.monotonic() < deadline:
            before = len(self._seen)
            time.sleep(_QUIET_S)

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            code = frame.f_code
            is_own = self._is_own.get(code)
            if is_own is None:
                is_own = self._is_own[code] = code.co_filename.startswith(_SOURCES)
            if is_own:
                self._seen.append((threading.get_ident(), code))


class Served:
    """The actor that the walks call, in this process, so that its side is counted too."""

    def add(self, number: int) -> int:
        return number + 1

    def store(self, data: bytearray) -> int:
        return len(data)


@contextlib.contextmanager
def _served(cluster: Cluster) -> Iterator[ActorPool[Any]]:
    server = ActorServer(cluster)
    server.register("walked", Served())
    server.serve_background()
    try:
        yield ActorPool(cluster, "walked")
    finally:
        server.shutdown()


@contextlib.contextmanager
def _blocking_call(cluster: Cluster) -> Iterator[Callable[[], object]]:
    with _served(cluster) as pool:
        yield lambda: pool.call().add(1)


@contextlib.contextmanager
def _submitted_call(cluster: Cluster) -> Iterator[Callable[[], object]]:
    with _served(cluster) as pool:
        yield lambda: pool.submit().add(1).result()


@contextlib.contextmanager
def _map(cluster: Cluster) -> Iterator[Callable[[], object]]:
    with WorkerPool(cluster, num_workers=1) as pool:
        pool.wait_for_workers()
        yield lambda: pool.map(operator.neg, range(ITEMS)).results()


@contextlib.contextmanager
def _large_argument(cluster: Cluster) -> Iterator[Callable[[], object]]:
    data = bytearray(64 * _MIB)
    with _served(cluster) as pool:
        yield lambda: pool.call().store(data)


@contextlib.contextmanager
def _launch_and_wait(cluster: Cluster) -> Iterator[Callable[[], object]]:
    request = JobRequest(name="walked", entrypoint=Entrypoint(callable=operator.neg, args=(1,)))
    yield lambda: cluster.wait(cluster.launch(request))


# {name: what it is, and how it is made ready}, in the order of docs/architecture.md
WALKS = {
    "call": ("a blocking call, both ends", _blocking_call),
    "submit": ("submit().result(), both ends", _submitted_call),
    "map": (f"WorkerPool.map of {ITEMS} items, the caller's end", _map),
    "large": ("an argument of 64 MiB, both ends", _large_argument),
    "launch": ("launch and wait, the client's end", _launch_and_wait),
}


def counted(name: str, counter: CallCounter, cluster: Cluster) -> Walk:
    """What the walk of that name runs on the cluster, whose client was connected after the counter was made."""
    _, make_ready = WALKS[name]
    with make_ready(cluster) as walk:
        for _ in range(_WARM_UP):
            walk()
        walks = sorted((counter.count(walk) for _ in range(_TIMES)), key=lambda each: each.calls)
    return walks[_TIMES // 2]


def main() -> None:
    """Print a table of the walks that are named, or of all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(WALKS))
    names = parser.parse_args().names or list(WALKS)
    if unknown := [name for name in names if name not in WALKS]:
        sys.exit(f"no walk {', '.join(unknown)}: there are {', '.join(WALKS)}")
    os.environ.setdefault(EAGER_VARIABLE, "0")
    table = Table("walk", "of", "calls", "functions", "files", "threads")
    counter = CallCounter()
    try:
        with LocalCluster(workers=1, cpu=4) as cluster:
            for name in names:
                walk = counted(name, counter, cluster)
                table.add_row(name, WALKS[name][0], *map(str, (walk.calls, walk.functions, walk.files, walk.threads)))
    finally:
        counter.close()
    Console().print(table)


if __name__ == "__main__":
    main()
