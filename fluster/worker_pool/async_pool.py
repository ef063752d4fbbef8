"""Functions run side by side by workers on the cluster, with methods that are awaited."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, ParamSpec, Self, TypedDict, TypeVar, Unpack

from fluster.actors.definition.definition import check_timeout
from fluster.actors.results.futures import ActorFuture
from fluster.actors.results.loop_calls import is_running
from fluster.actors.results.maps import iterated
from fluster.cluster import AsyncCluster
from fluster.cluster.jobs.arguments import check_count
from fluster.cluster.portal import forked
from fluster.worker_pool.dispatch import Pace
from fluster.worker_pool.function_pickles import FunctionPickles
from fluster.worker_pool.progress import Bar, progress_bar
from fluster.worker_pool.results import (
    AsyncMapResult,
    AsyncUnorderedResults,
    ItemFutures,
    UnorderedItems,
    UnorderedSource,
)
from fluster.worker_pool.tasks import Task
from fluster.worker_pool.work import Batch, Block, Outcome, blocks_of
from fluster.worker_pool.worker_jobs import PoolPlan
from fluster.worker_pool.workers import PoolStatus, Workers
from fluster_bus.core.names import check_name, unique_name
from fluster_bus.messages import EnvironmentConfig, LogLine, ResourceConfig
from fluster_bus.messages.jobs import MAX_REPLICAS
from fluster_bus.payloads import payloads

T = TypeVar("T")
P = ParamSpec("P")
Items = TypeVar("Items", bound=ItemFutures[Any])
Unordered = TypeVar("Unordered", bound=UnorderedItems[Any])

DEFAULT_RESOURCES = ResourceConfig()


class PoolOptions(TypedDict, total=False):
    """The options of a worker pool, as WorkerPool describes them."""

    environment: EnvironmentConfig | None
    name_prefix: str
    task_retries: int
    task_timeout: float | None
    logs: bool | None


class AsyncWorkerPool:
    """As WorkerPool, for an AsyncCluster: make it where its event loop runs, and await its methods there.

    `submit` and `map` return at once, from any thread, with futures that can be awaited. As an asynchronous context
    manager it shuts down at the end, after all tasks are done.
    """

    def __init__(
        self,
        cluster: AsyncCluster,
        num_workers: int,
        resources: ResourceConfig = DEFAULT_RESOURCES,
        *,
        environment: EnvironmentConfig | None = None,
        name_prefix: str = "worker",
        task_retries: int = 3,
        task_timeout: float | None = None,
        logs: bool | None = None,
    ) -> None:
        if not isinstance(cluster, AsyncCluster):
            raise TypeError(f"AsyncWorkerPool takes an AsyncCluster, not {cluster!r}: for a Cluster take WorkerPool")
        check_count("num_workers", num_workers, 1, "the number of workers", most=MAX_REPLICAS)
        check_count("task_retries", task_retries, 0, "how often a task that was lost is given to another worker")
        if not isinstance(resources, ResourceConfig):
            raise TypeError(f"resources={resources!r}: give a ResourceConfig, such as ResourceConfig.with_cpu(1)")
        if environment is not None and not isinstance(environment, EnvironmentConfig):
            raise TypeError(f"environment={environment!r}: give an EnvironmentConfig, as create_environment() makes it")
        name = unique_name(check_name("name_prefix", name_prefix))
        plan = PoolPlan(name, resources, environment, task_retries, check_timeout(task_timeout), logs)
        self.workers: Workers = Workers(cluster, plan, num_workers)
        self._functions = FunctionPickles()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._bars: weakref.WeakSet[Bar] = weakref.WeakSet()  # of maps that go on, or are still known

    @classmethod
    async def start(
        cls,
        cluster: AsyncCluster,
        num_workers: int,
        resources: ResourceConfig = DEFAULT_RESOURCES,
        **options: Unpack[PoolOptions],
    ) -> Self:
        """The pool, made on the running loop. Takes what the class takes, and raises what it raises."""
        return cls(cluster, num_workers, resources, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        from fluster.worker_pool.progress import pool_view

        status = self.workers.status_now() if is_running(self.workers.loop) else None
        return pool_view(f"{type(self).__name__} {self.name}", status, self.state)

    @property
    def state(self) -> str:
        """Why it takes no tasks; empty when it does."""
        return "shut down" if self._closed else str(self.workers.error or "")

    @property
    def name(self) -> str:
        return self.workers.plan.name

    @property
    def num_workers(self) -> int:
        """How many workers were asked for."""
        return self.workers.wanted

    @property
    def size(self) -> int:
        """How many workers are known to be there; right after the pool was made none are known yet."""
        return self.workers.pool.size

    async def wait_for_workers(self, min_workers: int | None = None, timeout: float | None = 60.0) -> None:
        """Return as soon as `min_workers` are there, all unless told otherwise.

        Raises ActorTimeoutError after `timeout` seconds, and why there are none when the workers ended.
        """
        await self.workers.wait_for_workers(min_workers, timeout)

    async def status(self) -> PoolStatus:
        """What the pool is doing."""
        return await self.workers.status()

    async def resize(self, workers: int) -> None:
        """Have so many workers: more are launched, or the newest finish what they have and end."""
        await self.workers.resize(workers)

    def logs(
        self,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | timedelta | None = None,
        grep: str | None = None,
    ) -> AsyncGenerator[LogLine]:
        """What the workers wrote, as `cluster.logs` gives it; with `follow` also what comes, until they have ended."""
        from fluster.cluster.jobs.batched_logs import Batched, merged_logs

        async def batches() -> AsyncGenerator[list[LogLine]]:
            job_ids = await self.workers.job_ids()
            merged = merged_logs(self.workers.cluster, job_ids, follow=follow, tail=tail, since=since, grep=grep)
            async with aclosing(merged) as lists:
                async for lines in lists:
                    yield lines

        return Batched(batches())

    # ---- tasks ------------------------------------------------------------------------------------------

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T]:
        """Run `function(*args, **kwargs)` on a worker: its future. Raises TypeError for what cannot be pickled."""
        return self.submit_paced(self.workers.pace, function, args, kwargs)

    def submit_paced(
        self, pace: Pace, function: Callable[..., T], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> ActorFuture[T]:
        """As `submit`, for tasks that take as long as others of that pace."""
        self.check_open()
        workers = self.workers
        future = ActorFuture[T](self.name, workers.loop)
        payload = (self._functions.of(function), payloads.encode_whole((args, kwargs)))
        workers.add(Task(payload, future, pace))
        return future

    def map(
        self,
        function: Callable[..., T],
        /,
        *iterables: Iterable[object],
        chunksize: int | None = None,
        progress: bool = False,
    ) -> AsyncMapResult[T]:
        """As WorkerPool.map: the futures are awaited, as is `results()`."""
        return self.mapped(AsyncMapResult[T], function, iterables, chunksize, progress)

    def mapped(
        self,
        kind: Callable[[str, int, Any], Items],
        function: Callable[..., Any],
        iterables: tuple[Iterable[object], ...],
        chunksize: int | None,
        progress: bool,
    ) -> Items:
        """Run a function for items; `kind` holds what they give."""
        self.check_open()
        pickled = self._functions.of(function)
        items = _arguments(iterables)
        blocks = list(blocks_of(items, 0, _checked(chunksize)))
        result = kind(self.name, len(items), self.workers.loop)
        bar = self._new_bar(len(items)) if progress else None
        if bar is not None:
            result.on_interrupt = bar.interrupt
        on_outcome = self._counted(result.on_outcome, bar)
        batch = Batch(pickled, on_outcome, chunksize=chunksize, futures=result, is_complete=True)
        self.workers.add((batch, blocks))
        return result

    def imap_unordered(
        self,
        function: Callable[..., T],
        items: Iterable[object],
        /,
        *,
        chunksize: int | None = None,
        progress: bool = False,
    ) -> AsyncUnorderedResults[T]:
        """`async for result in pool.imap_unordered(function, items)`: as WorkerPool.imap_unordered."""
        return self.mapped_unordered(AsyncUnorderedResults[T], function, items, chunksize, progress)

    def mapped_unordered(
        self,
        kind: Callable[[UnorderedSource], Unordered],
        function: Callable[..., Any],
        items: Iterable[object],
        chunksize: int | None,
        progress: bool,
    ) -> Unordered:
        """Run a function for items as they are asked for; `kind` takes them and hands out what they give."""
        self.check_open()
        pickled = self._functions.of(function)
        total = len(items) if isinstance(items, Sequence) else None
        bar = self._new_bar(total) if progress else None

        def make_batch(on_outcome: Callable[[Outcome], object]) -> Batch:
            return Batch(pickled, self._counted(on_outcome, bar), chunksize=chunksize, is_complete=False)

        def add(batch: Batch, blocks: list[Block]) -> None:
            self.check_open()
            self.workers.add((batch, blocks))

        source = UnorderedSource(
            items=((item,) for item in iterated(items)),
            chunksize=_checked(chunksize),
            make_batch=make_batch,
            add=add,
            workers=lambda: self.num_workers,
        )
        return kind(source if bar is None else replace(source, on_end=bar.stop, on_interrupt=bar.interrupt))

    def _new_bar(self, total: int | None) -> Bar:
        bar = progress_bar(self.name, total)
        self._bars.add(bar)
        return bar

    def _counted(self, then: Callable[[Outcome], object], bar: Bar | None) -> Callable[[Outcome], None]:
        def on_outcome(outcome: Outcome) -> None:
            self.workers.count_outcome(outcome)
            if bar is not None:  # first, so that it is right once the last result is taken
                bar.advance(outcome.stop - outcome.start)
            then(outcome)

        return on_outcome

    def check_open(self) -> None:
        """Raise RuntimeError after `shutdown`, ForkedError in a forked child, and why the workers have ended."""
        if self._closed:
            raise RuntimeError(f"the worker pool {self.name!r} was shut down: make another")
        if os.getpid() != self._pid:
            raise forked()
        error = self.workers.error
        if error is not None:
            raise copy.copy(error)

    # ---- the end ----------------------------------------------------------------------------------------

    async def shutdown(self, wait: bool = True) -> None:
        """End the workers. With `wait` the tasks are finished first; else those not begun are cancelled.

        Nothing happens the second time, nor when the cluster object was closed before: then the workers of a LocalCluster
        have ended with it, and others end with the program, or with the task's attempt that made the pool.
        """
        if self.close():
            await self.end(wait=wait)

    async def end(self, *, wait: bool) -> None:
        """End the workers of a pool that is closed; bars stay where they are."""
        if not wait:
            self._stop_bars()  # before what is cancelled counts as done
        try:
            await self.workers.shutdown(wait=wait)
        finally:
            self._stop_bars()

    def _stop_bars(self) -> None:
        for bar in list(self._bars):
            bar.stop()

    def close(self) -> bool:
        """Take no more tasks, from any thread; False when that was so already."""
        with self._lock:
            was_open, self._closed = not self._closed, True
            return was_open

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        await self.shutdown(wait=kind is None)


def _arguments(iterables: tuple[Iterable[object], ...]) -> list[tuple[object, ...]]:
    if not iterables:
        raise TypeError("map() takes a function and the items for it: map(function, items)")
    return list(zip(*map(iterated, iterables), strict=False))


def _checked(chunksize: int | None) -> int | None:
    if chunksize is not None:
        check_count("chunksize", chunksize, 1, "the number of items for one call")
    return chunksize
