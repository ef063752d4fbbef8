"""What a job costs the controller's own code while 100,000 wait, against the same while 100 wait; without a bus."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.row import Row
from benchmarks.simulator.queue_growth import FEW, MANY, costs_us


def run() -> Iterator[Row]:
    few_us, many_us = costs_us()
    yield Row(
        f"a job with {MANY:,} queued", f"{many_us:.0f} µs", f"with {FEW:,} queued {few_us:.0f} µs", many_us / few_us
    )
