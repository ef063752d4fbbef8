"""What runs in each worker of a pool."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from typing import Any

from fluster.actors.definition.definition import actor, method
from fluster.actors.protocol.failures import encode_failure
from fluster.actors.server.server import ActorServer
from fluster.cluster.refs import Ref, resolved
from fluster.errors import ActorTimeoutError, NotRunError
from fluster.remote_errors.kindred_errors import add_remedy
from fluster_bus.core import codec
from fluster_bus.payloads import payloads

_KEPT_FUNCTIONS = 64  # of those that a worker has read
_CLASS_BY_VALUE = b"_make_skeleton_"  # how a pickle begins one, by cloudpickle
_STUCK_EXIT_CODE = 75
_SMALL = (int, float, bool, type(None))  # to look at the clock takes longer than these
_PART_S = 0.001  # of results that are pickled together
_ENOUGH_BYTES = 64 << 20  # in one answer: what is left of its chunk is given back
BUNDLE_WINDOW = (1_024, 4 << 20)  # (answers, their bytes) that may be on their way to the pool
FAILED = 0x00  # begins a failure; no payload of a result begins with it
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


class LeavingError(NotRunError):
    """The worker is about to end. Of its own kind, as a task may meet with NotRunError itself."""


@actor
class TaskRunner:
    """Runs functions, one at a time."""

    def __init__(self, shutdown: Callable[[float], object]) -> None:
        self._shutdown = shutdown
        self._functions = _Functions()
        self._thread: _LimitedThread | None = None
        self.is_stuck = False

    def run(self, function: bytes, arguments: bytes, limit_s: float | None) -> Any:
        """What `function(*args, **kwargs)` gives."""
        self._check_alive()
        args, kwargs = payloads.decode(arguments)
        if Ref.in_use:
            args, kwargs = resolved(args, kwargs)
        return self._call(self._functions.of(function), args, kwargs, limit_s)

    @method(stream_window=BUNDLE_WINDOW[0], stream_window_bytes=BUNDLE_WINDOW[1])
    def run_bundle(self, tasks: list[tuple[bytes, bytes]], limit_s: float | None) -> Iterator[object]:
        """What `run` gives for each of them; for one that fails, FAILED and its failure."""
        self._check_alive()
        for function, arguments in tasks:
            try:
                result = self.run(function, arguments, limit_s)
            except BaseException as error:
                yield payloads.Encoded(bytes((FAILED,)) + encode_failure(error, skipped_frames=2))
            else:
                yield result
            if self.is_stuck:
                return

    def run_slice(
        self, function: bytes, items: bytes, start: int, size: int, limit_s: float | None
    ) -> tuple[list[bytes], dict[int, bytes], int, float]:
        """What the function gives for some of the items: values, {index: failure}, how many were run, and in how many seconds.

        Values are pickled together, those of a moment: so it is known in time when the answer is large enough.
        """
        began_at = time.perf_counter()
        self._check_alive()
        called = self._functions.of(function)
        parts: list[bytes] = []
        values: list[Any] = []
        failures: dict[int, bytes] = {}
        ran, size_of_parts, since = 0, 0, time.perf_counter()
        for index, item in enumerate(payloads.decode(items)[start : start + size]):
            try:
                args = resolved(item, {})[0] if Ref.in_use else item
                values.append(called(*args) if limit_s is None else self._call(called, args, {}, limit_s))
            except BaseException as error:
                failures[index] = encode_failure(error, skipped_frames=1)
                values.append(None)
                if self.is_stuck:
                    break
            if type(values[-1]) not in _SMALL and time.perf_counter() - since > _PART_S:
                more = _encoded(values, ran, failures)
                parts += more
                ran += len(values)
                values, since = [], time.perf_counter()
                size_of_parts += sum(map(len, more))
                if size_of_parts >= _ENOUGH_BYTES:
                    break
        if values:
            parts += _encoded(values, ran, failures)
        return parts, failures, ran + len(values), time.perf_counter() - began_at

    def _check_alive(self) -> None:
        if self.is_stuck:
            raise LeavingError("the worker is about to end; the task was not run")

    def leave(self) -> None:
        """Finish what has arrived and end this worker."""
        threading.Thread(target=self._shutdown, args=(_FINISH_S,), name="end of the worker").start()

    def _call(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        limit_s: float | None,
    ) -> object:
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
        self._outcomes: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()
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


class _Functions:
    """Those that were read, kept with what they keep themselves."""

    def __init__(self) -> None:
        self._read = functools.lru_cache(maxsize=_KEPT_FUNCTIONS)(codec.decode)
        self._newest: tuple[bytes, Callable[..., Any]] = b"", codec.decode

    def of(self, pickled: bytes) -> Callable[..., Any]:
        if pickled != self._newest[0]:
            reads = self._read.cache_info().misses
            try:
                function = self._read(pickled)
            except ModuleNotFoundError as error:
                add_remedy(error, "the pool's function", sent="it is submitted")
                raise
            if _CLASS_BY_VALUE in pickled and self._read.cache_info().misses == reads:
                # A class is one, whichever pickle brings it, and is as the last that was read has it: that must be this one.
                codec.decode(pickled)
            self._newest = pickled, function
        return self._newest[1]


def _encoded(values: list[object], first: int, failures: dict[int, bytes]) -> list[bytes]:
    """The values pickled, of which the first has that index. One that cannot be becomes a failure of its own.

    Plain data together. Objects each by itself: one that cannot be read then spoils no other.
    """
    plain = codec.encode_plain(values)
    if plain is not None:
        return [plain]
    parts: list[bytes] = []
    for index, value in enumerate(values):
        try:
            parts.append(codec.encode([value]))
        except TypeError as error:
            failures[first + index] = encode_failure(error)
            parts.append(codec.encode([None]))
    return parts
