"""A method called for each of many items, so many at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

from fluster.actors.results.futures import ActorFuture
from fluster_bus.running.blocked_waits import wait_for_item

T = TypeVar("T")

MAX_OUT = 100  # calls, unless told otherwise: enough for the actors to be busy


def check_max_out(max_out: int) -> int:
    """Return `max_out` if it can be one. Raises ValueError."""
    if isinstance(max_out, bool) or not isinstance(max_out, int) or max_out < 1:
        raise ValueError(f"max_out={max_out!r}: give the number of calls that may be out at a time, 1 or more")
    return max_out


def iterated(items: Iterable[T]) -> Iterator[T]:
    """`iter(items)`. Raises TypeError, which tells what was meant."""
    try:
        return iter(items)
    except TypeError as error:
        raise TypeError(f"{items!r} has no items: give a list, or another iterable, of what to call it with") from error


class MapCalls:
    """Calls for the items of one map: `max_out` at most that were made and whose result was not taken yet."""

    def __init__(self, items: Iterable[Any], submit: Callable[[Any], ActorFuture[object]], max_out: int) -> None:
        self._items: Iterator[Any] = iter(items)
        self._submit = submit
        self._max_out = max_out
        self._is_exhausted = False
        self._under_way: set[ActorFuture[object]] = set()

    def fill(self) -> list[ActorFuture[Any]]:
        """Make as many calls as there is room for: their futures, in order."""
        made: list[ActorFuture[Any]] = []
        while not self._is_exhausted and len(self._under_way) < self._max_out:
            self._is_exhausted = True  # and stays so if this raises
            for item in self._items:
                future = self._submit(item)
                self._under_way.add(future)
                made.append(future)
                self._is_exhausted = False
                break
        return made

    @property
    def is_over(self) -> bool:
        """True when there are no more items and all results were taken."""
        return self._is_exhausted and not self._under_way

    def had(self, future: ActorFuture[Any]) -> None:
        """Note that this result was taken: there is room for another call."""
        self._under_way.discard(future)

    def close(self) -> None:
        """Make no more calls, and take those back that were not sent yet."""
        self._is_exhausted = True
        for future in self._under_way:
            future.cancel()
        self._under_way.clear()


class MapResults(Iterator[T]):
    """Results in the order of the items. What one call raised is raised in its turn; then it goes on with the others."""

    def __init__(self, calls: MapCalls) -> None:
        self._calls = calls
        self._futures: deque[ActorFuture[T]] = deque()

    def __next__(self) -> T:
        self._futures.extend(self._calls.fill())
        if not self._futures:
            raise StopIteration
        future = self._futures.popleft()
        self._calls.had(future)
        return future.result()

    def close(self) -> None:
        """Make no more calls, and take those back that were not sent yet."""
        self._futures.clear()
        self._calls.close()


class UnorderedMapResults(Iterator[T]):
    """Results as they come. What one call raised is raised in its turn; then it goes on with the others."""

    def __init__(self, calls: MapCalls) -> None:
        self._calls = calls
        self._done: SimpleQueue[Any] = SimpleQueue()

    def __next__(self) -> T:
        for future in self._calls.fill():
            future.add_done_callback(self._done.put)
        if self._calls.is_over:
            raise StopIteration
        future = wait_for_item(self._done)
        self._calls.had(future)
        result: T = future.result()
        return result

    def close(self) -> None:
        """Make no more calls, and take those back that were not sent yet."""
        self._calls.close()


class AsyncMapResults(AsyncIterator[T]):
    """As MapResults, with `async for`."""

    def __init__(self, calls: MapCalls) -> None:
        self._calls = calls
        self._futures: deque[ActorFuture[T]] = deque()

    async def __anext__(self) -> T:
        self._futures.extend(self._calls.fill())
        if not self._futures:
            raise StopAsyncIteration
        future = self._futures.popleft()
        self._calls.had(future)
        return await future

    def close(self) -> None:
        """Make no more calls, and take those back that were not sent yet."""
        self._futures.clear()
        self._calls.close()


class AsyncUnorderedMapResults(AsyncIterator[T]):
    """As UnorderedMapResults, with `async for`."""

    def __init__(self, calls: MapCalls) -> None:
        self._calls = calls
        self._done: asyncio.Queue[Any] = asyncio.Queue()

    async def __anext__(self) -> T:
        loop = asyncio.get_running_loop()
        for made in self._calls.fill():
            made.add_done_callback(lambda done: loop.call_soon_threadsafe(self._done.put_nowait, done))
        if self._calls.is_over:
            raise StopAsyncIteration
        future = await self._done.get()
        self._calls.had(future)
        result: T = await future
        return result

    def close(self) -> None:
        """Make no more calls, and take those back that were not sent yet."""
        self._calls.close()
