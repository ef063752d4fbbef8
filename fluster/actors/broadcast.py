"""The answers of all members of a pool."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from fluster.actors.futures import ActorFuture
from fluster.actors.members import Member
from fluster.errors import ActorTimeoutError

T = TypeVar("T")


class Answers(Generic[T]):
    """One future for each member, once it is known who they are."""

    def __init__(
        self, call: str, loop: asyncio.AbstractEventLoop, withdraw: Callable[[Any], None] | None = None
    ) -> None:
        self.call = call
        self._loop = loop
        self._withdraw = withdraw
        self.opened: concurrent.futures.Future[list[ActorFuture[T]]] = concurrent.futures.Future()

    def open(self, members: Sequence[Member]) -> list[ActorFuture[T]]:
        futures = [
            ActorFuture[T](f"{self.call} at {member.endpoint_id}", self._loop, self._withdraw) for member in members
        ]
        self.opened.set_result(futures)
        return futures

    def fail(self, error: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)

    def too_late(self, timeout: float | None) -> ActorTimeoutError:
        return ActorTimeoutError(f"{self.call}: not all members have answered after {timeout:g} s")


class BroadcastResult(Generic[T]):
    """What the members of a pool answer. Iterate to have each answer as it comes."""

    def __init__(self, answers: Answers[T]) -> None:
        self._answers = answers

    def futures(self) -> list[ActorFuture[T]]:
        """One future for each member, in the order in which they joined the pool. Raises ActorNotFoundError."""
        return list(self._answers.opened.result())

    def results(self, timeout: float | None = None, *, return_exceptions: bool = False) -> list[T | Any]:
        """All answers, in the order in which the members joined the pool.

        The first exception of a member is raised, unless `return_exceptions` has them stand in the list.
        Raises ActorTimeoutError after `timeout` seconds, and may then be asked again.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        found: list[Any] = []
        for future in self.futures():
            try:
                error = future.exception(None if deadline is None else max(deadline - time.monotonic(), 0))
            except ActorTimeoutError as late:
                raise self._answers.too_late(timeout) from late
            found.append(_outcome(future, error, return_exceptions=return_exceptions))
        return found

    def __iter__(self) -> Iterator[T]:
        return _Results(concurrent.futures.as_completed(self.futures()))


class _Results(Iterator[T]):
    """Results of futures as they complete. It goes on after one has raised: a generator would not."""

    def __init__(self, futures: Iterator[concurrent.futures.Future[T]]) -> None:
        self._futures = futures

    def __next__(self) -> T:
        return next(self._futures).result()


class AsyncBroadcastResult(Generic[T]):
    """What the members of a pool answer. Iterate with `async for` to have each answer as it comes."""

    def __init__(self, answers: Answers[T]) -> None:
        self._answers = answers

    async def futures(self) -> list[ActorFuture[T]]:
        """One future for each member, in the order in which they joined the pool. Raises ActorNotFoundError."""
        # Shielded: it is not for one who gives up to cancel what others may ask for as well.
        futures: list[ActorFuture[T]] = await asyncio.shield(asyncio.wrap_future(self._answers.opened))
        return list(futures)

    async def results(self, timeout: float | None = None, *, return_exceptions: bool = False) -> list[T | Any]:
        """All answers, as BroadcastResult.results has them."""
        try:
            async with asyncio.timeout(timeout):
                futures = await self.futures()
                await asyncio.wait([asyncio.wrap_future(future) for future in futures])
        except TimeoutError as late:
            raise self._answers.too_late(timeout) from late
        return [_outcome(future, future.exception(), return_exceptions=return_exceptions) for future in futures]

    def __aiter__(self) -> AsyncIterator[T]:
        return _AsyncResults(self)


class _AsyncResults(AsyncIterator[T]):
    def __init__(self, result: AsyncBroadcastResult[T]) -> None:
        self._result = result
        self._futures: Iterator[asyncio.Future[T]] | None = None

    async def __anext__(self) -> T:
        if self._futures is None:
            self._futures = iter(asyncio.as_completed([asyncio.wrap_future(f) for f in await self._result.futures()]))
        future = next(self._futures, None)
        if future is None:
            raise StopAsyncIteration
        return await future


def _outcome(future: ActorFuture[T], error: BaseException | None, *, return_exceptions: bool) -> Any:
    return error if error is not None and return_exceptions else future.result()
