"""`python -m benchmarks.simulator [--full] [--workers N --jobs N --load F --swing F]`: clusters that are too large to start.

Simulates each size with room to spare and with days whose noon asks for more than there is, and prints how long tasks wait
for a worker, how much of the cluster is used, and what a job costs the controller's own code.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.workload import Workload
from fluster_bus.messages import JobStatus

_SMALL = ((20, 2_000), (200, 20_000))
_FULL = ((100, 10_000), (1_000, 100_000), (10_000, 1_000_000))
_LOADS = ((0.7, 0.0), (0.9, 0.3))  # of the CPUs on average, and how far noon is above that


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--full", action="store_true", help="up to 10,000 workers and 1,000,000 jobs: some minutes")
    parser.add_argument("--workers", type=int, help="simulate just one size")
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--load", type=float, help="CPUs asked for on average, of those there are")
    parser.add_argument("--swing", type=float, default=0.0, help="how far the load of noon is above the average")
    options = parser.parse_args()
    gc.set_threshold(100_000, 20, 100)  # hardly anything here is garbage in a circle, and there is much to look through
    sizes: tuple[tuple[int, int], ...] = _FULL if options.full else _SMALL
    if options.workers is not None:
        sizes = ((options.workers, options.jobs),)
    loads = _LOADS if options.load is None else ((options.load, options.swing),)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("workers", "jobs", "load"):
        table.add_column(name, justify="right")
    for name in (
        "simulated",
        "lost workers",
        "retried",
        "longest queue",
        "placed p50",
        "p99",
        "max",
        "used",
        "took",
        "a job",
    ):
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
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _row(simulation: Simulation, took_s: float) -> list[str]:
    workload = simulation.workload
    cuts = statistics.quantiles(simulation.placement_s, n=100)
    succeeded = simulation.ended.get(JobStatus.SUCCEEDED, 0)
    assert succeeded > 0.9 * workload.jobs, simulation.ended
    load = f"{workload.load:.0%}" + (f" ± {workload.swing:.0%}" if workload.swing else "")
    tasks = len(simulation.placement_s)
    return [
        f"{workload.workers:,}",
        f"{workload.jobs:,}",
        load,
        f"{simulation.clock.now / 86_400:.1f} days",
        f"{simulation.lost_workers:,}",
        f"{simulation.retried:,}",
        f"{simulation.longest_queue:,}",
        *(_seconds(value) for value in (cuts[49], cuts[98], max(simulation.placement_s))),
        f"{simulation.utilisation:.0%}",
        f"{took_s:.0f} s",
        f"{took_s / tasks * 1e6:.0f} µs/task",
    ]


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


if __name__ == "__main__":
    main()
