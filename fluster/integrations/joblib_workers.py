"""The workers that joblib's batches run on: a pool that was given, or one of the backend's own."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

from joblib import cpu_count

from fluster.cluster import Cluster, LocalCluster, current_cluster
from fluster.cluster.arguments import check_count
from fluster.errors import FlusterError
from fluster.worker_pool import WorkerPool
from fluster_bus.messages import EnvironmentConfig, ResourceConfig
from fluster_bus.messages.jobs import MAX_REPLICAS
from fluster_bus.messages.workers import Capacity

log = logging.getLogger(__name__)


class Workers(Protocol):
    """Where batches run."""

    @property
    def cluster(self) -> Cluster: ...

    def most(self) -> int:
        """How many batches can run at a time."""

    def limited(self, workers: int) -> int:
        """How many of so many there can be."""

    def pool(self, workers: int, threads: Mapping[str, str]) -> WorkerPool:
        """A pool that has so many, made with these variables of the environment if it is made now."""

    def end(self) -> None:
        """End what they run, and give them back, if they are one's own."""


class GivenWorkers:
    """A pool that somebody else made, and ends."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    @property
    def cluster(self) -> Cluster:
        return self._pool.cluster

    def most(self) -> int:
        return self._pool.num_workers

    def limited(self, workers: int) -> int:
        return min(workers, self._pool.num_workers)

    def pool(self, workers: int, threads: Mapping[str, str]) -> WorkerPool:  # noqa: ARG002
        return self._pool

    def end(self) -> None:
        """Nothing: they are somebody else's."""


class OwnWorkers:
    """A pool that is made when it is first needed, grows as more are asked for, and can be made again when it has ended."""

    def __init__(
        self,
        cluster: Cluster | None,
        count: int | None,
        resources: ResourceConfig,
        environment: EnvironmentConfig,
    ) -> None:
        if count is not None:
            check_count("workers", count, 1, "the number of workers", most=MAX_REPLICAS)
        self._given_cluster = cluster
        self._count = count
        self._resources = resources
        self._environment = environment
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        _open.add(self)

    @property
    def cluster(self) -> Cluster:
        return self._given_cluster or current_cluster()

    def most(self) -> int:
        """As many as were asked for, or else as the cluster has room for when nothing else runs there."""
        if self._count is not None:
            return self._count
        cluster = self.cluster
        if isinstance(cluster, LocalCluster):  # its CPUs are logical: tasks that compute have those of this machine
            return int(cpu_count())
        capacities = [worker.info.total for worker in cluster.list_workers() if worker.alive]
        count = _room_for(self._resources, capacities)
        if not count:
            raise RuntimeError(
                f"none of the {len(capacities)} workers of the cluster has room for {self._resources}: give smaller "
                "resources, or workers=… to wait for them"
            )
        return min(count, MAX_REPLICAS)

    def limited(self, workers: int) -> int:
        return min(workers, self._count or MAX_REPLICAS)

    def pool(self, workers: int, threads: Mapping[str, str]) -> WorkerPool:
        with self._lock:
            if self._pool is not None and self._pool.asynchronous.state:  # somebody has ended it, or all of its workers
                self._give_up(self._pool)
            if self._pool is None:
                cluster = self.cluster
                cluster.welcome(self, self.end)
                variables = {**threads, **self._environment.env_vars}
                environment = self._environment.model_copy(update={"env_vars": variables})
                self._pool = WorkerPool(
                    cluster, workers, self._resources, environment=environment, name_prefix="joblib"
                )
            elif workers > self._pool.num_workers:
                self._pool.resize(workers)
            return self._pool

    def end(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._give_up(self._pool)

    def _give_up(self, pool: WorkerPool) -> None:
        self._pool = None
        pool.cluster.see_off(self)
        try:
            pool.shutdown(wait=False)
        except FlusterError as error:  # the cluster is gone, and the workers with it, or soon
            log.info("%s could not be ended: %s", pool, error)

    def end_soon(self) -> None:
        """As `end`, without waiting for it: from a collector of garbage, in whatever thread."""
        if self._pool is not None:
            threading.Thread(target=self.end, name="end of joblib's workers", daemon=True).start()


_open: weakref.WeakSet[OwnWorkers] = weakref.WeakSet()

# They are the parent's, whose locks may be held by threads that stayed there.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)


# Before the clusters are closed, as this was imported after them.
@atexit.register
def _end_all() -> None:
    for workers in list(_open):
        workers.end()


def _room_for(resources: ResourceConfig, capacities: Sequence[Capacity]) -> int:
    """How many tasks fit, by CPUs, memory and devices."""
    chips = resources.device.chip_count()
    count = 0.0
    for each in capacities:
        rooms = [
            has // wants
            for has, wants in ((each.cpu, resources.cpu), (each.memory, resources.memory), (each.devices, chips))
            if wants
        ]
        count += min(rooms, default=1)
    return int(count)
