"""joblib's batches under way: those of one Parallel, of which no more than so many run at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

from fluster.actors.results.futures import ActorFuture
from fluster.cluster import Ref
from fluster.integrations.joblib_batches import decode_results, encode_batch, run_batch
from fluster.worker_pool import WorkerPool
from fluster.worker_pool.dispatch import TASK_MEMORY, Pace

log = logging.getLogger(__name__)


class JoblibBatch:
    """Some of joblib's calls, which one worker runs one after the other."""

    def __init__(self, callback: Callable[[JoblibBatch], object]) -> None:
        self._callback: Callable[[JoblibBatch], object] | None = callback
        self._payload = b""
        self._refs: list[Ref[object]] = []  # of arrays in the payload: they live as long as this
        self._future: ActorFuture[bytes] | None = None
        self._error: BaseException | None = None

    def encode(self, calls: Any, share: Callable[[Any], Ref[Any] | None]) -> None:
        """Take the calls in. What cannot be pickled is raised by `result`."""

        def shared(value: object) -> Ref[object] | None:
            ref = share(value)
            if ref is not None:
                self._refs.append(ref)
            return ref

        try:
            self._payload = encode_batch(calls, shared)
        except Exception as error:
            self._error = error

    def begin(self, pool: Callable[[], WorkerPool], pace: Pace, on_done: Callable[[], object]) -> None:
        """Have it run; `on_done` is called when it is over, also when it could not be begun."""
        future = None
        if self._error is None:
            try:
                future = self._future = pool().asynchronous.submit_paced(pace, run_batch, (self._payload,), {})
            except Exception as error:
                self._error = error
        self._payload = b""
        if future is None:
            on_done()
            return
        future.add_done_callback(lambda _future: on_done())
        if self._error is not None:  # cancelled meanwhile
            future.cancel()

    def cancel(self) -> bool:
        """Take it back; False when it runs and has to be left to itself."""
        future = self._future
        if future is not None:
            return future.cancel() or future.done()
        self._error = CancelledError()
        return True

    def result(self) -> Any:
        """What the calls gave, once it is over. Raises what one of them raised, and why it could not be run."""
        self._refs.clear()
        if self._error is not None:
            raise self._error
        assert self._future is not None  # noqa: S101 - it was begun, or has an error
        return decode_results(self._future.result())

    def tell(self) -> None:
        """Tell joblib that it is over."""
        callback = self._callback
        if callback is not None:
            callback(self)
        self.forget()

    def forget(self) -> None:
        """Keep nothing that keeps this batch: else it, joblib's objects, the backend and its workers would stay on."""
        self._callback = self._future = None


class JoblibCall:
    """What one Parallel has under way. Batches that wait are begun as others end, in their order."""

    def __init__(
        self,
        pool: Callable[[], WorkerPool],
        limit: int,
        least_shared: int | None,
        callbacks: ThreadPoolExecutor,
    ) -> None:
        self.least_shared = least_shared  # bytes of an array that is sent once; none is, where there are none
        self._pool = pool
        self._pace = Pace(TASK_MEMORY)  # what other tasks of the pool take tells nothing of these
        self._limit = limit
        self._callbacks = callbacks
        self._lock = threading.Lock()
        self._waiting: deque[JoblibBatch] = deque()
        self._running: set[JoblibBatch] = set()

    @property
    def is_busy(self) -> bool:
        """True while something runs."""
        return bool(self._running)

    def add(self, batch: JoblibBatch) -> None:
        """Begin it, or have it wait for room."""
        with self._lock:
            if len(self._running) >= self._limit:
                self._waiting.append(batch)
                return
            self._running.add(batch)
        self._begin(batch)

    def _begin(self, batch: JoblibBatch) -> None:
        def on_done() -> None:
            with contextlib.suppress(RuntimeError):  # the program ends, and nothing waits
                self._callbacks.submit(self._on_done, batch)

        batch.begin(self._pool, self._pace, on_done)

    def _on_done(self, batch: JoblibBatch) -> None:
        try:
            with self._lock:
                self._running.discard(batch)
                following = self._waiting.popleft() if self._waiting else None
                if following is not None:
                    self._running.add(following)
            if following is not None:
                self._begin(following)
            batch.tell()
        except BaseException:
            log.exception("joblib failed at what it does when a batch is over")

    def cancel(self) -> bool:
        """Take back what has not begun; False when something runs and has to be left to itself."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            running = list(self._running)
        for batch in waiting:
            batch.forget()
        left = [batch for batch in running if not batch.cancel()]
        return not left
