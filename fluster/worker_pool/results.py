"""What the items of a batch give: in order, as futures, or as it comes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast, overload

from fluster.actors.results.futures import ActorFuture
from fluster.actors.results.loop_calls import setter, tell_soon
from fluster.cluster.jobs.arguments import deadline_after
from fluster.errors import ActorTimeoutError
from fluster.worker_pool.work import Batch, Block, Outcome, blocks_of
from fluster_bus.running.blocked_waits import wait_for_item, wait_seeing_signals

T = TypeVar("T")

_AHEAD = 4  # chunks for each worker that are under way, or wait to be looked at


class _ItemFuture(ActorFuture[Any]):
    """The result of one item."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, index: int) -> None:
        super().__init__(name, loop)
        self._index = index

    def take(self, outcome: Outcome) -> None:
        """Be over as the outcome tells."""
        if outcome.cancelled:
            self.cancel_at_once()
        elif self.running() or self.set_running_or_notify_cancel():
            self.settle(outcome.is_ok(self._index), outcome)

    def _value_of(self, payload: Outcome) -> Any:
        return payload.value(self._index)

    def _error_of(self, payload: Outcome) -> BaseException:
        return cast("BaseException", payload.error(self._index))  # there is one, else it had settled otherwise


class ItemFutures(Sequence[ActorFuture[T]], Generic[T]):
    """A future for each item, in the order of the items.

    They are made when they are looked at: who only wants the results does not pay for them.
    """

    def __init__(self, name: str, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._size = size
        self._loop = loop
        self._arrival = threading.Condition()
        self._outcomes: list[Outcome | None] = [None] * size  # one for each item
        self._futures: dict[int, _ItemFuture] = {}
        self._begun = 0  # all items before it, but for those that were cancelled
        self._wakes: list[Callable[[], object]] = []  # called at the next outcome
        self.on_interrupt: Callable[[], object] = _nothing  # called when Ctrl-C ends a wait

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._size:,} items by {self._name}>"

    # ---- on the loop ------------------------------------------------------------------------------------

    def begin(self, start: int, size: int) -> int:
        """As work.Futures has it."""
        with self._arrival:
            for offset in range(size) if self._futures else ():
                future = self._futures.get(start + offset)
                if future is not None and (future.cancelled() or not future.set_running_or_notify_cancel()):
                    self._begun = start + max(offset, 1)
                    return offset
            self._begun = start + size
            return size

    def on_outcome(self, outcome: Outcome) -> None:
        """Take what became of some items."""
        with self._arrival:
            self._outcomes[outcome.start : outcome.stop] = [outcome] * (outcome.stop - outcome.start)
            futures = (
                [self._futures.get(index) for index in range(outcome.start, outcome.stop)] if self._futures else []
            )
            self._arrival.notify_all()
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()
        for future in futures:
            if future is not None:
                future.take(outcome)

    # ---- anywhere ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> ActorFuture[T]: ...
    @overload
    def __getitem__(self, index: slice) -> list[ActorFuture[T]]: ...
    def __getitem__(self, index: int | slice) -> ActorFuture[T] | list[ActorFuture[T]]:
        if isinstance(index, slice):
            return [self._future(each) for each in range(self._size)[index]]
        return self._future(range(self._size)[index])

    def __iter__(self) -> Iterator[ActorFuture[T]]:
        return map(self._future, range(self._size))

    def _future(self, index: int) -> ActorFuture[T]:
        with self._arrival:
            future = self._futures.get(index)
            if future is not None:
                return future
            future = self._futures[index] = _ItemFuture(self._name, self._loop, index)
            outcome = self._outcomes[index]
            if outcome is not None:
                future.take(outcome)
            elif index < self._begun:
                future.set_running_or_notify_cancel()
            return future

    def _late(self, timeout: float | None) -> ActorTimeoutError:
        return ActorTimeoutError(
            f"{self._name}: not all of {self._size:,} items are done after {timeout:g} s; "
            "they go on, and results() may be asked again"
        )


class MapResult(ItemFutures[T]):
    """A future for each item, in the order of the items; `results()` has what they give, at once."""

    def results(self, timeout: float | None = None, *, return_exceptions: bool = False) -> list[T | Any]:
        """What all items give, in their order.

        The exception of the first that failed is raised as soon as all before it are there, unless `return_exceptions`
        has them stand in the list. Raises ActorTimeoutError after `timeout` seconds, and may then be asked again.
        """
        found: list[Any] = []
        deadline = deadline_after(timeout)
        while len(found) < self._size:
            outcome = self._wait(len(found), deadline, timeout)
            found += _values(outcome, return_exceptions=return_exceptions)
        return found

    def _wait(self, index: int, deadline: float | None, timeout: float | None) -> Outcome:
        with self._arrival:
            while (outcome := self._outcomes[index]) is None:
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise self._late(timeout)
                try:
                    wait_seeing_signals(self._arrival.wait, left_s)
                except KeyboardInterrupt:
                    self.on_interrupt()
                    raise
            return outcome


class AsyncMapResult(ItemFutures[T]):
    """As MapResult; `results()` is awaited."""

    async def results(self, timeout: float | None = None, *, return_exceptions: bool = False) -> list[T | Any]:
        """As MapResult.results."""
        found: list[Any] = []
        deadline = deadline_after(timeout)
        while len(found) < self._size:
            try:
                async with asyncio.timeout(None if deadline is None else max(deadline - time.monotonic(), 0)):
                    outcome = await self._wait(len(found))
            except TimeoutError as error:
                raise self._late(timeout) from error
            found += _values(outcome, return_exceptions=return_exceptions)
        return found

    async def _wait(self, index: int) -> Outcome:
        while True:
            arrived = asyncio.Event()
            with self._arrival:
                outcome = self._outcomes[index]
                if outcome is not None:
                    return outcome
                self._wakes.append(setter(arrived))
            await arrived.wait()


def _nothing() -> None:
    pass


def _values(outcome: Outcome, *, return_exceptions: bool) -> list[Any]:
    values = outcome.values()
    if outcome.is_whole:  # known once they are read
        return values
    found: list[object] = []
    for index in range(outcome.start, outcome.stop):
        try:
            found.append(_value(outcome, index))
        except Exception as error:
            if not return_exceptions:
                raise
            found.append(error)
    return found


def _value(outcome: Outcome, index: int) -> object:
    error = concurrent.futures.CancelledError() if outcome.cancelled else outcome.error(index)
    if error is not None:
        raise error
    return outcome.value(index)


@dataclass(frozen=True, kw_only=True)
class UnorderedSource:
    """Where the items of one `imap_unordered` come from, and how they get to workers."""

    items: Iterable[object]
    chunksize: int | None
    make_batch: Callable[[Callable[[Outcome], object]], Batch]
    add: Callable[[Batch, list[Block]], object]
    workers: Callable[[], int]  # how many there are
    on_end: Callable[[], object] = _nothing
    on_interrupt: Callable[[], object] = _nothing


class UnorderedItems(ABC, Generic[T]):
    """The items of one `imap_unordered` on their way, and what they give.

    Items are taken from where they come from as results are asked for: so many are under way that no worker waits.
    """

    def __init__(self, source: UnorderedSource) -> None:
        self._source = source
        self._items = iter(source.items)
        self._is_exhausted = False
        self._batch = source.make_batch(self._take)
        self._outcome: Outcome | None = None  # the one that is being read
        self._index = 0  # in it
        self._taken = self._given = 0  # items

    @abstractmethod
    def _take(self, outcome: Outcome) -> None:
        """An outcome has arrived; called by any thread."""

    def _has_more(self) -> bool:
        """True when another outcome is to come; takes items first, as far as workers have room."""
        self._take_items()
        if self._given < self._taken:
            return True
        self._source.on_end()
        return False

    def _open(self, outcome: Outcome) -> None:
        self._outcome, self._index = outcome, outcome.start

    def _next_of(self, outcome: Outcome) -> T:
        index = self._index
        self._index += 1
        self._given += 1
        return cast("T", _value(outcome, index))

    def _take_items(self) -> None:
        while not self._is_exhausted:
            size = self._source.chunksize or self._batch.pace.chunk()
            if self._taken - self._given >= _AHEAD * size * max(self._source.workers(), 1):
                return
            items = self._next_items(size)
            start, self._taken = self._taken, self._taken + len(items)
            try:
                blocks = list(blocks_of(items, start, self._source.chunksize))
            except TypeError:  # it is of one of them
                blocks = self._one_by_one(items, start)
            self._source.add(self._batch, blocks)

    def _next_items(self, size: int) -> list[object]:
        self._is_exhausted = True  # and stays so if it raises
        items = list(itertools.islice(self._items, size))
        self._is_exhausted = len(items) < size
        return items

    def _one_by_one(self, items: list[object], start: int) -> list[Block]:
        blocks: list[Block] = []
        for index, item in enumerate(items, start):
            try:
                blocks += blocks_of([item], index, 1)
            except TypeError as error:
                self._take(Outcome(index, index + 1, error=error))
        return blocks

    def close(self) -> None:
        """Take no more items, and take back those that have not begun."""
        self._is_exhausted = True
        self._taken = self._given
        self._outcome = None
        self._batch.is_closed = True
        self._source.on_end()


class UnorderedResults(UnorderedItems[T], Iterator[T]):
    """What the items give, as it comes. What one of them raised is raised in its turn; then it goes on with the others."""

    def __init__(self, source: UnorderedSource) -> None:
        self._arrived: SimpleQueue[Outcome] = SimpleQueue()
        super().__init__(source)

    def _take(self, outcome: Outcome) -> None:
        self._arrived.put(outcome)

    def __next__(self) -> T:
        while self._outcome is None or self._index == self._outcome.stop:
            if not self._has_more():
                raise StopIteration
            try:
                self._open(wait_for_item(self._arrived))
            except KeyboardInterrupt:
                self._source.on_interrupt()
                raise
        return self._next_of(self._outcome)


class AsyncUnorderedResults(UnorderedItems[T], AsyncIterator[T]):
    """As UnorderedResults, with `async for`, on the loop where it was made."""

    def __init__(self, source: UnorderedSource) -> None:
        self._arrived: asyncio.Queue[Outcome] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        super().__init__(source)

    def _take(self, outcome: Outcome) -> None:
        tell_soon(self._loop, self._arrived.put_nowait, outcome)

    async def __anext__(self) -> T:
        while self._outcome is None or self._index == self._outcome.stop:
            if not self._has_more():
                raise StopAsyncIteration
            self._open(await self._arrived.get())
        return self._next_of(self._outcome)
