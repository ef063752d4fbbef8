"""A worker pool as Python's own executors are."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fluster.actors.results.futures import ActorFuture
from fluster.actors.results.loop_calls import is_running
from fluster.cluster.jobs.arguments import check_count, deadline_after
from fluster.errors import ForkedError
from fluster.worker_pool.dispatch import TASK_MEMORY, Pace
from fluster_bus.core.errors import ClosedError
from fluster_bus.running.blocked_waits import wait_for_all

if TYPE_CHECKING:
    from fluster.worker_pool.pool import WorkerPool

T = TypeVar("T")
P = ParamSpec("P")


class PoolExecutor(concurrent.futures.Executor):
    """Runs functions on a pool's workers. Several may share a pool, which goes on when one of them is shut down."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._pace = Pace(
            TASK_MEMORY
        )  # its own: what other tasks take would have many sent that can't be cancelled then
        # Held while arguments are pickled, which the loop, where futures end, must not wait for.
        self._submitting = threading.RLock()
        self._lock = threading.Lock()
        self._unfinished: set[concurrent.futures.Future[Any]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"PoolExecutor({self._pool.name!r})"

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T]:
        """Run `function(*args, **kwargs)` on a worker: its future.

        Raises RuntimeError after `shutdown`, TypeError for what cannot be pickled, and why the workers have ended.
        """
        with self._submitting:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future = self._pool.asynchronous.submit_paced(self._pace, function, args, kwargs)
            with self._lock:
                self._unfinished.add(future)
        future.add_done_callback(self._on_done)
        return future

    def _on_done(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._unfinished.discard(future)

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """What the function gives for the items, in their order: raises TimeoutError `timeout` seconds after this call.

        `chunksize` items travel together. What has not begun when one of them fails, or when the iterator is closed, is
        cancelled. Raises as `submit` does; then none of them is run that has not begun.
        """
        check_count("chunksize", chunksize, 1, "the number of items for one call")
        deadline = deadline_after(timeout)
        items = list(zip(*iterables, strict=False))
        futures: list[ActorFuture[list[T]]] = []
        try:
            for start in range(0, len(items), chunksize):
                futures.append(self.submit(_run_chunk, fn, items[start : start + chunksize]))  # noqa: PERF401
        except BaseException:
            _cancel(futures)
            raise
        return _results(futures, deadline)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more. With `wait`, return when all of this executor's are done; `cancel_futures` those not begun.

        Workers that have nothing to do begin what was submitted before, as they do with Python's own executors.
        """
        with self._submitting:
            self._closed = True
        if cancel_futures:
            self._begin_what_can()
        with self._lock:
            unfinished = list(self._unfinished)
        if cancel_futures:
            _cancel(unfinished)
        if wait:
            wait_for_all(unfinished)

    def _begin_what_can(self) -> None:
        """Have the loop look at what was submitted, unless this is its own thread, or it has ended."""
        if not is_running(self._pool.portal.loop):
            with contextlib.suppress(ClosedError, ForkedError):
                self._pool.status()


def _run_chunk(function: Callable[..., T], chunk: list[tuple[object, ...]]) -> list[T]:
    return list(itertools.starmap(function, chunk))


def _cancel(futures: Iterable[concurrent.futures.Future[Any]]) -> None:
    for future in futures:
        future.cancel()


def _results(futures: list[ActorFuture[list[T]]], deadline: float | None) -> Iterator[T]:
    futures.reverse()
    try:
        while futures:  # each is forgotten before its results are handed out, and so is each of these
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
            found = futures.pop().result(left_s)
            found.reverse()
            while found:
                yield found.pop()
    finally:
        _cancel(futures)
