"""Waits that Ctrl-C ends.

Python looks for signals between instructions, and a wait is ended by one that comes during it. One that comes in between is seen
when the wait is over, which may be never; so is any signal where a library has waits go on after signals, as Polars does.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future, wait
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_S = 0.5  # between two looks for a signal


def wait_seeing_signals(waits: Callable[[float | None], object], timeout_s: float | None) -> bool:
    """Whether `waits(timeout_s)` has found what it waits for; the main thread, which alone receives signals, wakes now and then."""
    if threading.current_thread() is not threading.main_thread():
        return bool(waits(timeout_s))
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        is_last = left_s is not None and left_s <= LOOK_S
        if waits(left_s if is_last else LOOK_S):
            return True
        if is_last:
            return False


def wait_for_future(future: Future[Any], timeout_s: float | None = None) -> bool:
    """Whether a future ends within that time; how it ended is for the future to tell."""
    return future.done() or wait_seeing_signals(functools.partial(_ends_within, future), timeout_s)


def wait_for_all(futures: Collection[Future[Any]], timeout_s: float | None = None) -> bool:
    """Whether all of them end within that time."""
    return wait_seeing_signals(lambda left_s: not wait(futures, left_s).not_done, timeout_s)


def wait_for_item(queue: SimpleQueue[T]) -> T:
    """The next item of a queue, taken from it."""
    if threading.current_thread() is not threading.main_thread():
        return queue.get()
    while True:
        with contextlib.suppress(Empty):
            return queue.get(timeout=LOOK_S)


def _ends_within(future: Future[object], timeout_s: float | None) -> bool:
    with contextlib.suppress(TimeoutError, CancelledError):
        Future.exception(future, timeout_s)  # the base class's own, which only waits
    return future.done()
