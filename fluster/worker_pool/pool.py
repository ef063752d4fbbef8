"""Functions run side by side by workers on the cluster."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, Self, TypeVar

from fluster.actors.definition import check_timeout
from fluster.actors.futures import ActorFuture
from fluster.actors.maps import iterated
from fluster.cluster import Cluster
from fluster.cluster.arguments import check_count
from fluster.cluster.portal import blocking
from fluster.errors import ForkedError
from fluster.worker_pool.executor import PoolExecutor
from fluster.worker_pool.pace import Pace
from fluster.worker_pool.progress import ProgressBar
from fluster.worker_pool.results import MapResult, UnorderedResults
from fluster.worker_pool.work import Batch, Block, Outcome, Task, blocks_of
from fluster.worker_pool.workers import PoolPlan, Workers
from fluster_bus import codec, payloads
from fluster_bus.messages import EnvironmentConfig, ResourceConfig
from fluster_bus.messages.jobs import MAX_REPLICAS
from fluster_bus.names import check_name, unique_name

T = TypeVar("T")
P = ParamSpec("P")

_DEFAULT_RESOURCES = ResourceConfig()
_TASK_MEMORY = (
    0.98  # answers of short tasks come many at a time, and the first of them seems to have taken all the time
)


class WorkerPool:
    """`num_workers` workers on the cluster that run functions; the first tasks run as soon as one of them is there.

    Each worker runs one task at a time, and each task goes to a worker that has the least to do. Functions and arguments
    travel as pickles, by value where they were defined in a script or notebook.

    A task whose worker is lost is given to another, up to `task_retries` times: it may run more than once. One that each
    of its workers died of ends with PoisonedTaskError (with `task_retries=0` it ends with ActorDiedError at once). A task
    that runs for longer than `task_timeout` seconds ends with ActorTimeoutError, and its worker is begun anew.

    Use it from any thread; as a context manager it shuts down at the end, after all tasks are done.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_workers: int,
        resources: ResourceConfig = _DEFAULT_RESOURCES,
        *,
        environment: EnvironmentConfig | None = None,
        name_prefix: str = "worker",
        task_retries: int = 3,
        task_timeout: float | None = None,
    ) -> None:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"WorkerPool takes a Cluster, not {cluster!r}")
        check_count("num_workers", num_workers, 1, "the number of workers", most=MAX_REPLICAS)
        check_count("task_retries", task_retries, 0, "how often a task that was lost is given to another worker")
        if not isinstance(resources, ResourceConfig):
            raise TypeError(f"resources={resources!r}: give a ResourceConfig, such as ResourceConfig.with_cpu(1)")
        if environment is not None and not isinstance(environment, EnvironmentConfig):
            raise TypeError(f"environment={environment!r}: give an EnvironmentConfig, as create_environment() makes it")
        name = unique_name(check_name("name_prefix", name_prefix))
        plan = PoolPlan(name, resources, environment, task_retries, check_timeout(task_timeout))
        self.portal = cluster.portal
        self.asynchronous = cluster.portal.run(Workers.start, cluster.asynchronous, plan, num_workers)
        self._pace = Pace(_TASK_MEMORY)
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"WorkerPool({self.name!r})"

    @property
    def name(self) -> str:
        return self.asynchronous.plan.name

    @property
    def num_workers(self) -> int:
        """How many workers were asked for."""
        return self.asynchronous.wanted

    @property
    def size(self) -> int:
        """How many workers there are now."""
        return self.portal.run(self.asynchronous.size)

    wait_for_workers = blocking(Workers.wait_for_workers)
    status = blocking(Workers.status)
    resize = blocking(Workers.resize)

    # ---- tasks ------------------------------------------------------------------------------------------

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T]:
        """Run `function(*args, **kwargs)` on a worker: its future. Raises TypeError for what cannot be pickled."""
        self._check_open()
        workers = self.asynchronous
        future = ActorFuture[T](self.name, workers.loop)
        payload = (_pickled(function), payloads.encode_whole((args, kwargs)))
        workers.add(Task(payload, future, self._pace, workers.count_cancelled))
        return future

    def map(
        self,
        function: Callable[..., T],
        /,
        *iterables: Iterable[Any],
        chunksize: int | None = None,
        progress: bool = False,
    ) -> MapResult[T]:
        """Run `function(item)` for each item, or with one item of each of several iterables, as far as the shortest goes.

        Gives their futures, in the order of the items; `results()` of it has what they return, for less than the futures
        cost. Items travel together, as many as make some 20 ms of work, unless `chunksize` says how many; what one of
        them raises is its own. `progress` shows a bar. Raises TypeError for what cannot be pickled.
        """
        self._check_open()
        pickled = _pickled(function)
        items = _arguments(iterables)
        blocks = list(blocks_of(items, 0, _checked(chunksize)))
        result = MapResult[T](self.name, len(items), self.asynchronous.loop)
        bar = ProgressBar(self.name, len(items)) if progress else None
        on_outcome = self._counted(result.on_outcome, bar)
        batch = Batch(pickled, on_outcome, chunksize=chunksize, futures=result, is_complete=True)
        self.asynchronous.add((batch, blocks))
        return result

    def imap_unordered(
        self,
        function: Callable[..., T],
        items: Iterable[Any],
        /,
        *,
        chunksize: int | None = None,
        progress: bool = False,
    ) -> UnorderedResults[T]:
        """What `function(item)` gives for each item, as it comes. Items and results may be more than fit into memory.

        Items are taken as results are asked for, in chunks as `map` makes them. What one of them raises, or that it
        cannot be pickled, is raised in its turn; the iterator goes on after it. `close()` takes back what has not begun.
        """
        self._check_open()
        pickled = _pickled(function)
        total = len(items) if isinstance(items, Sequence) else None
        bar = ProgressBar(self.name, total) if progress else None

        def make_batch(on_outcome: Callable[[Outcome], object]) -> Batch:
            return Batch(pickled, self._counted(on_outcome, bar), chunksize=chunksize, is_complete=False)

        def add(batch: Batch, blocks: list[Block]) -> None:
            self._check_open()
            self.asynchronous.add((batch, blocks))

        arguments = ((item,) for item in iterated(items))
        on_end = bar.stop if bar is not None else lambda: None
        return UnorderedResults[T](
            arguments,
            _checked(chunksize),
            make_batch=make_batch,
            add=add,
            workers=lambda: self.num_workers,
            on_end=on_end,
        )

    def _counted(self, then: Callable[[Outcome], object], bar: ProgressBar | None) -> Callable[[Outcome], None]:
        def on_outcome(outcome: Outcome) -> None:
            self.asynchronous.count_outcome(outcome)
            if bar is not None:  # first, so that it is right once somebody has the last result
                bar.advance(outcome.stop - outcome.start)
            then(outcome)

        return on_outcome

    def executor(self) -> PoolExecutor:
        """The pool as a `concurrent.futures.Executor`, for code that takes one. Its end is not the pool's."""
        self._check_open()
        return PoolExecutor(self)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"{self} was shut down: make another")
        self.portal.check_process()
        error = self.asynchronous.error
        if error is not None:
            raise copy.copy(error)

    # ---- the end ----------------------------------------------------------------------------------------

    def shutdown(self, wait: bool = True) -> None:
        """End the workers. With `wait` the tasks are finished first; else those not begun are cancelled.

        Nothing happens the second time.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(ForkedError):  # a child ends; the pool is its parent's, and goes on
            self.portal.run(functools.partial(self.asynchronous.shutdown, wait=wait))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self.shutdown(wait=kind is None)


def _pickled(function: Callable[..., Any]) -> bytes:
    if not callable(function):
        raise TypeError(f"{function!r} cannot be called: pass the function itself, and its arguments behind it")
    return codec.encode(function)


def _arguments(iterables: tuple[Iterable[Any], ...]) -> list[tuple[Any, ...]]:
    if not iterables:
        raise TypeError("map() takes a function and the items for it: map(function, items)")
    return list(zip(*map(iterated, iterables), strict=False))


def _checked(chunksize: int | None) -> int | None:
    if chunksize is not None:
        check_count("chunksize", chunksize, 1, "the number of items for one call")
    return chunksize
