"""A worker pool as Python's own executors are."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fluster.actors.futures import ActorFuture
from fluster.cluster.arguments import check_count, deadline_after

if TYPE_CHECKING:
    from fluster.worker_pool.pool import WorkerPool

T = TypeVar("T")
P = ParamSpec("P")


class PoolExecutor(concurrent.futures.Executor):
    """Runs functions on a pool's workers. Several may share a pool, which goes on when one of them is shut down."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._unfinished: set[concurrent.futures.Future[Any]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"PoolExecutor({self._pool.name!r})"

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T]:
        """Run `function(*args, **kwargs)` on a worker: its future. Raises RuntimeError after `shutdown`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future = self._pool.submit(function, *args, **kwargs)
            self._unfinished.add(future)
        future.add_done_callback(self._on_done)
        return future

    def _on_done(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._unfinished.discard(future)

    def map(
        self,
        function: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """What the function gives for the items, in their order: raises TimeoutError `timeout` seconds after this call.

        `chunksize` items travel together. What has not begun when one of them fails, or when the iterator is closed, is
        cancelled.
        """
        check_count("chunksize", chunksize, 1, "the number of items for one call")
        deadline = deadline_after(timeout)
        items = list(zip(*iterables, strict=False))
        chunks = [items[start : start + chunksize] for start in range(0, len(items), chunksize)]
        return _results([self.submit(_run_chunk, function, chunk) for chunk in chunks], deadline)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more. With `wait`, return when all of this executor's are done; `cancel_futures` those not begun."""
        with self._lock:
            self._closed = True
            unfinished = list(self._unfinished)
        if cancel_futures:
            for future in unfinished:
                future.cancel()
        if wait:
            concurrent.futures.wait(unfinished)


def _run_chunk(function: Callable[..., T], chunk: list[tuple[Any, ...]]) -> list[T]:
    return list(itertools.starmap(function, chunk))


def _results(futures: list[ActorFuture[list[T]]], deadline: float | None) -> Iterator[T]:
    futures.reverse()
    try:
        while futures:  # each is forgotten before its results are handed out
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
            yield from futures.pop().result(left_s)
    finally:
        for future in futures:
            future.cancel()
