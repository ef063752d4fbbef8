"""What is asked of a simulated cluster, and what befalls it; the same for the same seed."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from fluster_bus.messages import Capacity, Entrypoint, GpuConfig, JobId, JobRequest, Namespace, ResourceConfig
from fluster_bus.messages.parts.resources import GIB

NAMESPACE = Namespace("default")
_DAY_S = 86_400.0
_CPU, _GPUS, _ZONES = 32, 8, "abc"
_GPU_MACHINE_EVERY = 8
# (share of the jobs, what each task needs); more CPUs than a machine's memory has shares for, so CPUs run out first
_NEEDS = (
    (0.47, ResourceConfig.with_cpu(1, memory=1 * GIB)),
    (0.17, ResourceConfig.with_cpu(2, memory=4 * GIB)),
    (0.13, ResourceConfig.with_cpu(4, memory=8 * GIB)),
    (0.06, ResourceConfig.with_cpu(8, memory=16 * GIB)),
    (0.02, ResourceConfig.with_cpu(16, memory=64 * GIB)),
    # Between two levels, and with labels: offered by name, where the class above finds no worker.
    (0.08, ResourceConfig.with_cpu(3, memory=6 * GIB)),
    (0.01, ResourceConfig.with_cpu(6, memory=20 * GIB)),
    (0.02, ResourceConfig(cpu=2, memory=4 * GIB, labels={"zone": "a"})),
    (0.035, ResourceConfig(cpu=4, memory=16 * GIB, device=GpuConfig(variant="h100"))),
    (0.005, ResourceConfig(cpu=8, memory=32 * GIB, device=GpuConfig(variant="h100", count=4))),
)
_GANG_TASK = ResourceConfig.with_cpu(4, memory=8 * GIB)
_PRIORITIES = ((0.8, 0), (0.1, 10), (0.1, -10))
_LONGEST = 10  # times the mean
_AFTER_ONE_OF = 20  # those that were submitted just before


def machine(number: int) -> Capacity:
    """What a machine has: one in eight has GPUs, and each zone has a third of them."""
    total = Capacity(
        cpu=_CPU, memory=128 * GIB, labels=(f"zone={_ZONES[number % len(_ZONES)]}",), namespaces=(NAMESPACE,)
    )
    gpus = {"device": "gpu", "variant": "h100", "devices": _GPUS}
    return total if number % _GPU_MACHINE_EVERY else total.model_copy(update=gpus)


@dataclass(frozen=True)
class Workload:
    """How much is asked, and how much goes wrong."""

    workers: int
    jobs: int
    load: float  # CPUs asked for on average, of those there are
    swing: float = 0.0  # by how much the load of noon is above the average, and that of midnight below
    tasks_up_to: int = 4
    gangs: float = 0.01  # of the jobs
    gang_tasks_up_to: int = 8
    dependent: float = 0.1  # of the jobs, that run after another
    task_s: float = 10_800.0  # on average; most are much shorter, a few much longer
    failing: float = 0.01  # of the attempts
    days_between_losses: float = 20.0  # of one worker
    repair_s: float = 3_600.0
    seed: int = 1

    @functools.cached_property
    def shares(self) -> list[tuple[float, JobRequest]]:
        """Requests of each kind, and how often they are made."""
        # Most jobs have one task.
        sizes = [1 / tasks**2 for tasks in range(1, self.tasks_up_to + 1)]
        kinds = [
            ((1 - self.gangs) * share * size / sum(sizes), resources, tasks, False)
            for share, resources in _NEEDS
            for tasks, size in enumerate(sizes, 1)
        ]
        gang_sizes = range(2, self.gang_tasks_up_to + 1)
        kinds += [(self.gangs / len(gang_sizes), _GANG_TASK, tasks, True) for tasks in gang_sizes]
        return [
            (share * part, _request(resources, tasks, gang=gang, priority=priority))
            for share, resources, tasks, gang in kinds
            for part, priority in _PRIORITIES
        ]

    def arrivals(self) -> Iterator[tuple[float, JobId, JobRequest]]:
        """When each job is submitted, and what it asks for."""
        dice = random.Random(self.seed)
        weights, requests = zip(*self.shares, strict=True)
        mean_cpu = sum(share * request.resources.cpu * request.replicas for share, request in self.shares)
        rate = self.load * self.workers * _CPU / (mean_cpu * self.task_s)
        time = 0.0
        for number, request in enumerate(dice.choices(requests, weights, k=self.jobs), 1):
            time += dice.expovariate(rate * (1 + self.swing * math.sin(2 * math.pi * time / _DAY_S)))
            wanted = request
            if number > 1 and dice.random() < self.dependent:
                earlier = number - dice.randrange(1, min(number, _AFTER_ONE_OF + 1))
                wanted = request.model_copy(update={"after": (_job_id(earlier),)})
            yield time, _job_id(number), wanted

    def duration_s(self, dice: random.Random) -> float:
        """How long an attempt runs: log-normal, with about the mean of `task_s`, and some end."""
        spread = 1.0
        return min(_LONGEST * self.task_s, dice.lognormvariate(math.log(self.task_s) - spread * spread / 2, spread))


def _job_id(number: int) -> JobId:
    return JobId(f"job-{number}")


def _request(resources: ResourceConfig, tasks: int, *, gang: bool, priority: int) -> JobRequest:
    return JobRequest(
        name="simulated",
        entrypoint=Entrypoint(command=("true",)),
        resources=resources,
        replicas=tasks,
        gang=gang,
        priority=priority,
        max_retries_failure=2,
        retry_backoff_s=5.0,
        max_task_failures=0,
    )
