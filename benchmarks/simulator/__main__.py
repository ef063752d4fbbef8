"""`python -m benchmarks.simulator [--full] [--workers N --jobs N --load F --swing F]`: clusters that are too large to start.

Simulates each size with room to spare and with days whose noon asks for more than there is. Printed are the workers that were
lost, attempts after the first, jobs that waited for others, gangs that started, the longest queue, how long tasks that
may be offered wait for a worker (gangs for all of theirs), the part of the CPUs that is given away, and the CPU time that
the simulation took, in all and for each placement. Beats are slower than real ones, and the rest of what a real controller
does for a task (JSON, the bus) is not in it; see simulation.py for what is left out. At last: what dispatching one job costs
the controller's own code with few and with many queued.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from array import array

from rich.console import Console
from rich.table import Table

from benchmarks.simulator import queue_growth
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.workload import Workload
from fluster_bus.messages import JobStatus

_SMALL = ((20, 2_000), (200, 20_000))
_FULL = ((100, 10_000), (1_000, 100_000), (10_000, 1_000_000))
_COLUMNS = (
    "workers",
    "jobs",
    "load",
    "simulated",
    "lost",
    "retried",
    "after",
    "gangs",
    "queued",
    "p50",
    "p99",
    "gangs p50",
    "p99",
    "used",
    "took",
    "each",
)
_LOADS = ((0.7, 0.0), (0.9, 0.3))  # of the CPUs on average, and how far noon is above that


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument(
        "--full",
        action="store_true",
        help="up to 10,000 workers and 1,000,000 jobs, with the larger load: some minutes",
    )
    parser.add_argument("--workers", type=int, help="simulate just one size")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--load", type=float, help="CPUs asked for on average, of those there are")
    parser.add_argument("--swing", type=float, default=0.0, help="how far the load of noon is above the average")
    options = parser.parse_args()
    gc.disable()  # nothing here is garbage in a circle, and there is much to look through
    sizes: tuple[tuple[int, int], ...] = _FULL if options.full else _SMALL
    if options.workers is not None:
        sizes = ((options.workers, options.jobs),)
    loads = _LOADS[-1:] if options.full else _LOADS
    if options.load is not None:
        loads = ((options.load, options.swing),)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    progress = Console(stderr=True)
    for load, swing in loads:
        for workers, jobs in sizes:
            started = time.process_time()
            simulation = Simulation(Workload(workers=workers, jobs=jobs, load=load, swing=swing))
            simulation.run()
            simulation.check()
            took_s = time.process_time() - started
            table.add_row(*_row(simulation, took_s))
            progress.print(f"{workers:,} workers, {jobs:,} jobs: {took_s:.0f} s of CPU time", highlight=False)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table)
    few_us, many_us = queue_growth.costs_us()
    console.print(
        f"One job through the controller's code: {few_us:.0f} µs with {queue_growth.FEW:,} queued, "
        f"{many_us:.0f} µs with {queue_growth.MANY:,}: {many_us / few_us:.2f} times as much"
    )


def _row(simulation: Simulation, took_s: float) -> list[str]:
    workload, figures = simulation.workload, simulation.figures
    succeeded = figures.ended.get(JobStatus.SUCCEEDED, 0)
    assert succeeded > 0.9 * workload.jobs, figures.ended
    load = f"{workload.load:.0%}" + (f" ± {workload.swing:.0%}" if workload.swing else "")
    placements = len(figures.placement_s) + len(figures.gang_placement_s)
    return [
        f"{workload.workers:,}",
        f"{workload.jobs:,}",
        load,
        f"{simulation.clock.now / 86_400:.1f} days",
        f"{figures.lost_workers:,}",
        f"{figures.retried:,}",
        f"{figures.released:,}",
        f"{figures.gangs_started:,}",
        f"{figures.longest_queue:,}",
        *_median_and_p99(figures.placement_s),
        *_median_and_p99(figures.gang_placement_s),
        f"{figures.utilisation:.0%}",
        f"{took_s:.0f} s",
        f"{took_s / placements * 1e6:.0f} µs",
    ]


def _median_and_p99(values: array[float]) -> tuple[str, str]:
    if len(values) < 2:
        return "-", "-"
    cuts = statistics.quantiles(values, n=100)
    return _seconds(cuts[49]), _seconds(cuts[98])


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


if __name__ == "__main__":
    main()
