"""What a job costs, against starting a bare `python -c pass`, which is the least that a program can cost."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.row import Row
from fluster import Entrypoint, JobRequest, LocalCluster

IN_FLIGHT = 32
ROUNDS = 10  # of as many
ONE_BY_ONE = 50
COMMANDS = 20
_PYTHON = (sys.executable, "-c", "pass")


def _nothing() -> None:
    pass


def _median_ms(run: Callable[[], object], times: int) -> float:
    run()  # the first one warms up
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def _rate(run: Callable[[], object]) -> float:
    """How many are done in a second when there are always as many in flight."""

    def again_and_again(_: int) -> None:
        for _ in range(ROUNDS):
            run()

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(lambda _: run(), range(IN_FLIGHT)))
        started = time.perf_counter()
        list(threads.map(again_and_again, range(IN_FLIGHT)))
        return IN_FLIGHT * ROUNDS / (time.perf_counter() - started)


def run() -> Iterator[Row]:
    def bare() -> None:
        subprocess.run(_PYTHON, check=True)

    bare_ms, bare_rate = _median_ms(bare, COMMANDS), _rate(bare)
    alone, together = f"bare python {bare_ms:.1f} ms", f"bare python {bare_rate:,.0f}/s"
    with LocalCluster(cpu=IN_FLIGHT) as cluster:
        function = JobRequest(name="nothing", entrypoint=Entrypoint(callable=_nothing))
        command = JobRequest(name="python", entrypoint=Entrypoint(command=_PYTHON))

        def run_job(request: JobRequest) -> None:
            cluster.wait(cluster.launch(request), raise_on_failure=True)

        ms = _median_ms(lambda: run_job(function), ONE_BY_ONE)
        yield Row("no-op function as a job, one at a time, p50", f"{ms:.1f} ms", alone, ms / bare_ms)
        ms = _median_ms(lambda: run_job(command), COMMANDS)
        yield Row("python -c pass as a job, one at a time, p50", f"{ms:.1f} ms", alone, ms / bare_ms)
        rate = _rate(lambda: run_job(function))
        yield Row(f"no-op functions as jobs, {IN_FLIGHT} in flight", f"{rate:,.0f}/s", together, rate / bare_rate)
        rate = _rate(lambda: run_job(command))
        yield Row(f"python -c pass as jobs, {IN_FLIGHT} in flight", f"{rate:,.0f}/s", together, rate / bare_rate)
