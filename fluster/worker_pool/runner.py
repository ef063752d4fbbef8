"""What runs in each worker of a pool."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from fluster.actors.definition import actor
from fluster.actors.failures import encode_failure
from fluster.actors.server import ActorServer
from fluster.cluster.refs import Ref, resolved
from fluster.errors import ActorTimeoutError, NotRunError
from fluster_bus import codec, payloads

_KEPT_FUNCTIONS = 64  # of those that a worker has read
_STUCK_EXIT_CODE = 75
# Longer than any task: who leaves finishes what it has.
_FINISH_S = 10 * 365 * 86_400.0


def work(name: str) -> None:
    """Run tasks for the pool `name` until told to end."""
    from fluster.cluster import current_cluster

    server = ActorServer(current_cluster())
    runner = TaskRunner(server.shutdown)
    server.register(name, runner)
    server.serve()
    if runner.is_stuck:  # its thread would not hold up the process, but may hold locks that the end of Python needs
        os._exit(_STUCK_EXIT_CODE)


@actor
class TaskRunner:
    """Runs functions, one at a time."""

    def __init__(self, shutdown: Callable[[float], object]) -> None:
        self._shutdown = shutdown
        self._thread: _LimitedThread | None = None
        self.is_stuck = False

    def run(self, function: bytes, arguments: bytes, limit_s: float | None) -> Any:
        """What `function(*args, **kwargs)` gives."""
        self._check_alive()
        args, kwargs = payloads.decode(arguments)
        if Ref.in_use:
            args, kwargs = resolved(args, kwargs)
        return self._call(_function(function), args, kwargs, limit_s)

    def run_slice(
        self, function: bytes, items: bytes, start: int, size: int, limit_s: float | None
    ) -> tuple[bytes, dict[int, bytes], int]:
        """What the function gives for some of the items: values, {place: failure}, and how many were run."""
        self._check_alive()
        called = _function(function)
        values: list[Any] = []
        failures: dict[int, bytes] = {}
        for place, item in enumerate(payloads.decode(items)[start : start + size]):
            try:
                args = resolved(item, {})[0] if Ref.in_use else item
                values.append(called(*args) if limit_s is None else self._call(called, args, {}, limit_s))
            except BaseException as error:
                failures[place] = encode_failure(error, skipped_frames=1)
                values.append(None)
                if self.is_stuck:
                    break
        return _encoded(values, failures), failures, len(values)

    def _check_alive(self) -> None:
        if self.is_stuck:
            raise NotRunError("the worker is about to end; the task was not run")

    def leave(self) -> None:
        """Finish what has arrived and end this worker."""
        threading.Thread(target=self._shutdown, args=(_FINISH_S,), name="end of the worker").start()

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], limit_s: float | None
    ) -> Any:
        if limit_s is None:
            return function(*args, **kwargs)
        if self._thread is None:
            self._thread = _LimitedThread()
        outcome = self._thread.call(functools.partial(function, *args, **kwargs), limit_s)
        if outcome is not None:
            result, error = outcome
            if error is not None:
                raise error
            return result
        # What runs cannot be stopped without its process, which says so first and then ends.
        self.is_stuck, self._thread = True, None
        self.leave()
        raise ActorTimeoutError(f"the task has run for {limit_s:g} s, and was ended with its worker")


class _LimitedThread:
    """A thread that runs functions for another, which may turn its back on it."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        threading.Thread(target=self._run, name="tasks", daemon=True).start()

    def call(self, function: Callable[[], Any], limit_s: float) -> tuple[Any, BaseException | None] | None:
        """What `function()` returns or raises. None after `limit_s`: then the thread is to be left to itself."""
        self._calls.put(function)
        try:
            return self._outcomes.get(timeout=limit_s)
        except Empty:
            return None

    def _run(self) -> None:
        while True:
            function = self._calls.get()
            try:
                self._outcomes.put((function(), None))
            except BaseException as error:
                self._outcomes.put((None, error))


@functools.lru_cache(maxsize=_KEPT_FUNCTIONS)
def _function(pickled: bytes) -> Callable[..., Any]:
    function: Callable[..., Any] = codec.decode(pickled)
    return function


def _encoded(values: list[Any], failures: dict[int, bytes]) -> bytes:
    """The values pickled. One that cannot be becomes a failure of its own."""
    try:
        return codec.encode(values)
    except TypeError:
        for place, value in enumerate(values):
            try:
                codec.encode(value)
            except TypeError as error:
                failures[place] = encode_failure(error)
                values[place] = None
        return codec.encode(values)
