"""Calls that wait for an actor, and those it is at: bounded in number and in bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Filled by one thread, emptied by one or several. An item counts until `done` is told of it."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._items = 0
        self._bytes = 0
        self._on_idle: Callable[[], object] | None = None

    def put(self, item: T, size: int) -> bool:
        """Add an item; False when there is no room. One that is larger than all room is taken when it is alone."""
        with self._lock:
            if self._items and (self._items >= self._max_items or self._bytes + size > self._max_bytes):
                return False
            self._items += 1
            self._bytes += size
        self._queue.put(item)
        return True

    def take(self) -> T | None:
        """The next item, waited for; None when the mailbox was closed."""
        return self._queue.get()

    def done(self, size: int) -> None:
        """An item of that size was dealt with: there is room for others."""
        with self._lock:
            self._items -= 1
            self._bytes -= size
            idle = self._items == 0
        if idle and self._on_idle is not None:
            self._on_idle()

    def when_idle(self, callback: Callable[[], object]) -> None:
        """Have `callback` run, in whichever thread, once nothing waits and nothing is being done."""
        self._on_idle = callback
        with self._lock:
            idle = self._items == 0
        if idle:
            callback()

    def close(self, takers: int) -> list[T]:
        """Wake all who take with None; return what was still waiting."""
        left: list[T] = []
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if item is not None:
                left.append(item)
        for _ in range(takers):
            self._queue.put(None)
        return left

    def __len__(self) -> int:
        return self._items
