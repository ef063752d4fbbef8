"""What is asked of a simulated cluster, and what befalls it; the same for the same seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from fluster_bus.messages import Capacity, Entrypoint, JobRequest, ResourceConfig
from fluster_bus.messages.resources import GIB

MACHINE = Capacity(cpu=32, memory=128 * GIB)
_DAY_S = 86_400.0
# (share of the jobs, CPUs, GiB); a third of a machine's memory for each CPU's share of it, so CPUs run out first
_SIZES = ((0.55, 1, 1), (0.2, 2, 4), (0.15, 4, 8), (0.07, 8, 16), (0.03, 16, 64))


@dataclass(frozen=True)
class Workload:
    """How much is asked, and how much goes wrong."""

    workers: int
    jobs: int
    load: float  # CPUs asked for on average, of those there are
    swing: float = 0.0  # by how much the load of noon is above the average, and that of midnight below
    tasks_up_to: int = 4
    task_s: float = 3_600.0  # on average; most are much shorter, a few much longer
    failing: float = 0.01  # of the attempts
    days_between_losses: float = 20.0  # of one worker
    repair_s: float = 3_600.0
    seed: int = 1

    def requests(self) -> list[JobRequest]:
        """One request for each size and number of tasks."""
        return [
            JobRequest(
                name=f"simulated-{cpu}-{tasks}",
                entrypoint=Entrypoint(command=("true",)),
                resources=ResourceConfig(cpu=cpu, memory=memory * GIB),
                replicas=tasks,
                max_retries_failure=2,
                retry_backoff_s=5.0,
                max_task_failures=0,
            )
            for _share, cpu, memory in _SIZES
            for tasks in range(1, self.tasks_up_to + 1)
        ]

    def arrivals(self) -> Iterator[tuple[float, JobRequest]]:
        """When each job is submitted, and what it asks for."""
        dice = random.Random(self.seed)
        requests = self.requests()
        # Most jobs have one task.
        weights = [share / tasks**2 for share, _, _ in _SIZES for tasks in range(1, self.tasks_up_to + 1)]
        mean_cpu = sum(
            weight * request.resources.cpu * request.replicas for weight, request in zip(weights, requests, strict=True)
        ) / sum(weights)
        rate = self.load * self.workers * MACHINE.cpu / (mean_cpu * self.task_s)
        time = 0.0
        for request in dice.choices(requests, weights, k=self.jobs):
            time += dice.expovariate(rate * (1 + self.swing * math.sin(2 * math.pi * time / _DAY_S)))
            yield time, request

    def duration_s(self, dice: random.Random) -> float:
        """How long an attempt runs: log-normal, with the mean of `task_s`."""
        spread = 1.0
        return dice.lognormvariate(math.log(self.task_s) - spread * spread / 2, spread)
