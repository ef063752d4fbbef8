"""Functions run side by side by workers on the cluster."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import ParamSpec, Self, TypeVar

from fluster.actors.results.futures import ActorFuture
from fluster.cluster import Cluster
from fluster.cluster.blocking_methods import blocking, blocking_iterator
from fluster.cluster.portal import Portal
from fluster.errors import ForkedError
from fluster.worker_pool.async_pool import DEFAULT_RESOURCES, AsyncWorkerPool
from fluster.worker_pool.executor import PoolExecutor
from fluster.worker_pool.results import MapResult, UnorderedResults
from fluster_bus.core.errors import ClosedError
from fluster_bus.messages import EnvironmentConfig, ResourceConfig

T = TypeVar("T")
P = ParamSpec("P")


class WorkerPool:
    """`num_workers` workers on the cluster that run functions; the first tasks run as soon as one of them is there.

    Each worker runs one task at a time, and each task goes to a worker that has the least to do. Functions and arguments
    travel as pickles, by value where they were defined in a script or notebook.

    A task whose worker is lost is given to another, up to `task_retries` times: it may run more than once. One that each
    of its workers died of ends with PoisonedTaskError (with `task_retries=0` it ends with ActorDiedError at once). A task
    that runs for longer than `task_timeout` seconds ends with ActorTimeoutError, and its worker is begun anew.

    With `logs` what the workers write comes to this program's stderr, after `name[index] |`; a LocalCluster does so by itself, see
    there. `pool.logs()` has all of it.

    Use it from any thread; as a context manager it shuts down at the end, after all tasks are done.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_workers: int,
        resources: ResourceConfig = DEFAULT_RESOURCES,
        *,
        environment: EnvironmentConfig | None = None,
        name_prefix: str = "worker",
        task_retries: int = 3,
        task_timeout: float | None = None,
        logs: bool | None = None,
    ) -> None:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"WorkerPool takes a Cluster, not {cluster!r}: for an AsyncCluster take AsyncWorkerPool")
        self.cluster = cluster
        self.portal: Portal = cluster.portal
        start = functools.partial(
            AsyncWorkerPool.start,
            environment=environment,
            name_prefix=name_prefix,
            task_retries=task_retries,
            task_timeout=task_timeout,
            logs=logs,
        )
        self.asynchronous: AsyncWorkerPool = cluster.portal.run(start, cluster.asynchronous, num_workers, resources)

    def __repr__(self) -> str:
        return f"WorkerPool({self.name!r})"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from fluster.worker_pool.progress import pool_view

        try:
            status = self.status()
        except (ClosedError, ForkedError) as error:
            return pool_view(f"WorkerPool {self.name}", None, str(error))
        return pool_view(f"WorkerPool {self.name}", status, self.asynchronous.state)

    @property
    def name(self) -> str:
        return self.asynchronous.name

    @property
    def num_workers(self) -> int:
        """How many workers were asked for."""
        return self.asynchronous.num_workers

    @property
    def size(self) -> int:
        """How many workers there are now."""
        return self.portal.run(self.asynchronous.workers.size)

    wait_for_workers = blocking(AsyncWorkerPool.wait_for_workers)
    status = blocking(AsyncWorkerPool.status)
    resize = blocking(AsyncWorkerPool.resize)
    logs = blocking_iterator(AsyncWorkerPool.logs)

    # ---- tasks ------------------------------------------------------------------------------------------

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T]:
        """Run `function(*args, **kwargs)` on a worker: its future. Raises TypeError for what cannot be pickled."""
        return self.asynchronous.submit(function, *args, **kwargs)

    def map(
        self,
        function: Callable[..., T],
        /,
        *iterables: Iterable[object],
        chunksize: int | None = None,
        progress: bool = False,
    ) -> MapResult[T]:
        """Run `function(item)` for each item, or with one item of each of several iterables, as far as the shortest goes.

        Gives their futures, in the order of the items; `results()` of it has what they return, for less than the futures
        cost. Items travel together, as many as make some 20 ms of work, unless `chunksize` says how many; what one of
        them raises is its own. `progress` shows a bar. Raises TypeError for what cannot be pickled.
        """
        return self.asynchronous.mapped(MapResult[T], function, iterables, chunksize, progress)

    def imap_unordered(
        self,
        function: Callable[..., T],
        items: Iterable[object],
        /,
        *,
        chunksize: int | None = None,
        progress: bool = False,
    ) -> UnorderedResults[T]:
        """What `function(item)` gives for each item, as it comes. Items and results may be more than fit into memory.

        Items are taken as results are asked for, in chunks as `map` makes them. What one of them raises, or that it
        cannot be pickled, is raised in its turn; the iterator goes on after it. `close()` takes back what has not begun.
        """
        return self.asynchronous.mapped_unordered(UnorderedResults[T], function, items, chunksize, progress)

    def executor(self) -> PoolExecutor:
        """The pool as a `concurrent.futures.Executor`, for code that takes one. Its end is not the pool's."""
        self.asynchronous.check_open()
        return PoolExecutor(self)

    # ---- the end ----------------------------------------------------------------------------------------

    def shutdown(self, wait: bool = True) -> None:
        """End the workers. With `wait` the tasks are finished first; else those not begun are cancelled.

        Nothing happens the second time, nor when the cluster object was closed before: then the workers of a LocalCluster
        have ended with it, and others end with the program, or with the task's attempt that made the pool.
        """
        if self.asynchronous.close() and not self.portal.closed:
            with contextlib.suppress(ForkedError):  # a child ends; the pool is its parent's, and goes on
                self.portal.run(functools.partial(self.asynchronous.end, wait=wait))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self.shutdown(wait=kind is None)
