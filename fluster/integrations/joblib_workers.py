"""The workers that joblib's batches run on: a pool that was given, or one of the backend's own."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from joblib import cpu_count

from fluster.cluster import Cluster, LocalCluster, current_cluster
from fluster.cluster.jobs.arguments import check_count
from fluster.errors import FlusterError
from fluster.worker_pool import WorkerPool
from fluster_bus.messages import EnvironmentConfig, ResourceConfig
from fluster_bus.messages.jobs import MAX_REPLICAS
from fluster_bus.messages.workers import Capacity

log = logging.getLogger(__name__)


class JoblibWorkers(Protocol):
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
    """A pool that another made, and ends."""

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
        """Nothing: they belong to another."""


class OwnWorkers:
    """A pool that is made when it is first needed, grows as more are asked for, and can be made again when it has
    ended.

    Others who want the same share it.
    """

    def __init__(
        self,
        cluster: Cluster | None,
        count: int | None,
        resources: ResourceConfig,
        environment: EnvironmentConfig,
    ) -> None:
        if count is not None:
            check_count("num_workers", count, 1, "the number of workers", most=MAX_REPLICAS)
        self._given_cluster = cluster
        self._count = count
        self._resources = resources
        self._environment = environment
        self._lock = threading.Lock()
        self._shared: SharedPool | None = None
        self.is_busy: Callable[[], bool] = lambda: False  # whether a caller waits for what they run
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
            if self._shared is not None and self._shared.is_over:  # it was ended, or all of its workers were
                self._leave(self._shared)
            if self._shared is None:
                cluster = self.cluster
                variables = {**threads, **self._environment.env_vars}
                environment = self._environment.model_copy(update={"env_vars": variables})
                self._shared = _pools.join(self, PoolSpec(cluster, self._resources, environment))
                cluster.end_before_close(self, self.leave)
            return self._shared.sized(workers)

    def end(self) -> None:
        with self._lock:
            shared = self._shared
            if shared is not None:
                if not any(each.is_busy() for each in shared.users if each is not self):
                    shared.end()
                self._leave(shared)

    def leave(self) -> None:
        """Want them no longer."""
        with self._lock:
            if self._shared is not None:
                self._leave(self._shared)

    def _leave(self, shared: SharedPool) -> None:
        self._shared = None
        shared.spec.cluster.has_ended(self)
        _pools.leave(self, shared)

    def leave_soon(self) -> None:
        """As `leave`, without waiting for it: from a collector of garbage, in whatever thread."""
        if self._shared is not None:
            threading.Thread(target=self.leave, name="end of joblib's workers", daemon=True).start()


class PoolSpec(NamedTuple):
    """What a pool is made of. Those who ask for the same share one."""

    cluster: Cluster
    resources: ResourceConfig
    environment: EnvironmentConfig


class SharedPool:
    """The workers of all who want the same. It is made with the first size."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.users: weakref.WeakSet[OwnWorkers] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None

    @property
    def is_over(self) -> bool:
        """True when its workers have ended."""
        return self._pool is not None and bool(self._pool.asynchronous.state)

    def sized(self, workers: int) -> WorkerPool:
        """The pool, which has so many at least."""
        with self._lock:
            if self._pool is None:
                cluster, resources, environment = self.spec
                self._pool = WorkerPool(cluster, workers, resources, environment=environment, name_prefix="joblib")
            elif workers > self._pool.num_workers:
                self._pool.resize(workers)
            return self._pool

    def end(self) -> None:
        with self._lock:
            if self._pool is None or self.is_over:
                return
            try:
                self._pool.shutdown(wait=False)
            except FlusterError as error:  # the cluster is gone, and the workers with it, or soon
                log.info("%s could not be ended: %s", self._pool, error)


class SharedPools:
    """Those of this process. A second one of the same would wait for room until the first has ended, which may be
    never.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: list[SharedPool] = []

    def join(self, user: OwnWorkers, spec: PoolSpec) -> SharedPool:
        """The one of such workers, which lasts until the last of its users leaves."""
        with self._lock:
            for each in self._pools:
                if each.spec == spec and not each.is_over:
                    break
            else:
                each = SharedPool(spec)
                self._pools.append(each)
            each.users.add(user)
            return each

    def leave(self, user: OwnWorkers, pool: SharedPool) -> None:
        """Want it no longer; the last one ends it."""
        with self._lock:
            pool.users.discard(user)
            if pool.users:
                return
            if pool in self._pools:
                self._pools.remove(pool)
        pool.end()


_pools = SharedPools()


def _forget_parents() -> None:
    """They are the parent's, whose locks may be held by threads that stayed there."""
    global _pools  # noqa: PLW0603 - a thread that stayed behind may hold its lock
    _open.clear()
    _pools = SharedPools()


_open: weakref.WeakSet[OwnWorkers] = weakref.WeakSet()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)


# Before the clusters are closed, as this was imported after them.
@atexit.register
def _end_all() -> None:
    for workers in list(_open):
        workers.leave()


def _room_for(resources: ResourceConfig, capacities: Sequence[Capacity]) -> int:
    """How many tasks fit, by CPUs, memory, devices and what is counted by other names."""
    chips = resources.device.chip_count()
    count = 0.0
    for each in capacities:
        rooms = [
            has // wants
            for has, wants in (
                (each.cpu, resources.cpu),
                (each.memory, resources.memory),
                (each.devices, chips),
                *((dict(each.resources).get(name, 0), count) for name, count in resources.resources.items()),
            )
            if wants
        ]
        count += min(rooms, default=1)
    return int(count)
