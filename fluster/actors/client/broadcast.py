"""The answers of all members of a pool."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from fluster.actors.client.lane_calls import Wait
from fluster.actors.protocol.calls import Call, Carried
from fluster.actors.protocol.members import Member
from fluster.actors.results.futures import ActorFuture
from fluster.actors.results.lazy_future import LazyFuture
from fluster.cluster.jobs.arguments import check_patience, deadline_after
from fluster.errors import ActorTimeoutError
from fluster_bus.payloads import payloads
from fluster_bus.running.blocked_waits import wait_for_all, wait_for_future

T = TypeVar("T")

_making = threading.Lock()  # held where futures are made of what is there already


@dataclass(frozen=True)
class Answer(Generic[T]):
    """What one member of a pool answered to a broadcast."""

    member: Member
    """The member that was asked."""
    value: T | None = None
    """What the method returned."""
    error: BaseException | None = None
    """What it raised, or why it did not answer."""

    @property
    def is_ok(self) -> bool:
        """True when the method returned."""
        return self.error is None

    def result(self) -> T:
        """What the method returned; what it raised is raised."""
        if self.error is not None:
            raise self.error
        return cast("T", self.value)


class BroadcastAnswers(Generic[T]):
    """The answers of the members, once these are known: a future for each, where futures are wanted."""

    def __init__(
        self, call: str, loop: asyncio.AbstractEventLoop, withdraw: Callable[[Any], None] | None = None
    ) -> None:
        self.call = call
        self._loop = loop
        self._withdraw = withdraw
        self.members: Sequence[Member] = ()
        self.opened: concurrent.futures.Future[None] = LazyFuture()
        self._carried: Carried | None = None  # while it may tell more
        self._values: list[T] | None = None  # of one that was carried, and has ended
        self._futures: list[ActorFuture[T]] | None = None

    def open(self, members: Sequence[Member], call_for: Callable[[ActorFuture[T]], Call]) -> dict[str, Call]:
        """The members are known: a future for the call to each, by their endpoints."""
        calls: dict[str, Call] = {}
        futures: list[ActorFuture[T]] = []
        for member in members:
            future = self._future(member)
            futures.append(future)
            calls[member.endpoint_id] = call = call_for(future)
            future.begin_unseen(call)
        self._futures = futures
        if not self.opened.done():
            self._know(members)
        return calls

    def carry(self, members: Sequence[Member], carried: Carried) -> None:
        """The members are known, and a thread waits for them, which needs no futures for that."""
        self._carried = carried
        self._know(members)

    def _know(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        self.opened.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)

    def values(self) -> list[T] | None:
        """What all have returned, if the thread that waited for them has it; else the futures tell."""
        carried = self._carried
        results = carried.results() if carried is not None else None
        if results is not None:
            try:
                self._values = [payloads.decode(payload) for payload in results]
            except Exception:  # their futures tell which cannot be read here
                return None
            self._carried = None
        return None if self._values is None else self._values.copy()

    def futures(self) -> list[ActorFuture[T]]:
        """A future for each member. Raises ActorNotFoundError, and TimeoutError before it is known who they are."""
        self.opened.result(0)
        carried, self._carried = self._carried, None
        if carried is not None:
            carried.make_calls()
        with _making:
            if self._futures is None:
                self._futures = [self._future(member) for member in self.members]
                for future, value in zip(self._futures, self._values or (), strict=True):
                    future.set_result(value)
        return self._futures.copy()

    def _future(self, member: Member) -> ActorFuture[T]:
        return ActorFuture(f"{self.call} at {member.endpoint_id}", self._loop, self._withdraw)

    def too_late(self, timeout: float | None) -> ActorTimeoutError:
        return ActorTimeoutError(f"{self.call}: not all members have answered after {timeout:g} s")

    def answer(self, index: int, timeout: float | None) -> Answer[T]:
        """What the member with that index says by now; `timeout` is what it was given for that."""
        member, future = self.members[index], self.futures()[index]
        if not future.done():
            late = (
                f"{self.call}: {member.endpoint_id} has not answered after {timeout:g} s; the call may run, or have run"
            )
            return Answer(member, error=ActorTimeoutError(late))
        try:
            return Answer(member, future.result())
        except BaseException as error:
            return Answer(member, error=error)


class Offer(Protocol):
    """A broadcast that the thread which submitted it may carry."""

    def take_over(self) -> Wait | None:
        """What to wait with for its answers, if this thread may read them itself."""

    def leave(self) -> None:
        """Have it carried by others, at once."""


class BroadcastResult(Generic[T]):
    """What the members of a pool answer. Iterate to have each answer as it comes.

    With an `offer` the thread that waits for all answers may read them itself.
    """

    def __init__(self, answers: BroadcastAnswers[T], offer: Offer | None = None) -> None:
        self._answers = answers
        self._offer = offer

    def _carry(self, timeout: float | None) -> float | None:
        """Wait with the calls, if this thread may carry them itself; when the time is over by the monotonic clock."""
        deadline = deadline_after(timeout)
        offer, self._offer = self._offer, None
        wait = offer.take_over() if offer is not None else None
        if wait is not None:
            wait(check_patience(timeout))
        return deadline

    def futures(self, timeout: float | None = None) -> list[ActorFuture[T]]:
        """One future for each member, in the order in which they joined the pool. Raises ActorNotFoundError.

        Raises ActorTimeoutError when after `timeout` seconds it is not known yet who they are.
        """
        opened = self._answers.opened
        if self._offer is not None:
            self._offer.leave()
            self._offer = None
        if not wait_for_future(opened, check_patience(timeout)):
            raise self._answers.too_late(timeout)
        return self._answers.futures()

    def results(self, timeout: float | None = None, *, return_exceptions: bool = False) -> list[T | Any]:
        """All answers, in the order in which the members joined the pool.

        The first exception of a member is raised, unless `return_exceptions` has them stand in the list.
        Raises ActorTimeoutError after `timeout` seconds, and may then be asked again.
        """
        deadline = self._carry(timeout)
        if (values := self._answers.values()) is not None:
            return values
        found: list[Any] = []
        for future in self.futures(timeout):
            if not return_exceptions and future.done():
                found.append(future.result())
                continue
            try:
                error = future.exception(None if deadline is None else max(deadline - time.monotonic(), 0))
            except ActorTimeoutError as late:
                raise self._answers.too_late(timeout) from late
            found.append(_outcome(future, error, return_exceptions=return_exceptions))
        return found

    def answers(self, timeout: float | None = None) -> list[Answer[T]]:
        """What each member says, in the order in which they joined: a value, or an error that stands with its member.

        Who has not answered after `timeout` seconds stands there with ActorTimeoutError. Raises ActorNotFoundError.
        """
        deadline = self._carry(timeout)
        futures = self.futures(timeout)
        wait_for_all(futures, None if deadline is None else deadline - time.monotonic())
        return [self._answers.answer(index, timeout) for index in range(len(futures))]

    def as_completed(self, timeout: float | None = None) -> Iterator[Answer[T]]:
        """What each member says, as it comes; `timeout` seconds after the first was asked for, as `answers` has them."""
        deadline = deadline_after(timeout)
        indexes = {future: index for index, future in enumerate(self.futures(timeout))}
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
        try:
            for future in concurrent.futures.as_completed(list(indexes), left_s):
                yield self._answers.answer(indexes.pop(cast("ActorFuture[T]", future)), timeout)
        except TimeoutError:
            for index in indexes.values():
                yield self._answers.answer(index, timeout)

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

    def __init__(self, answers: BroadcastAnswers[T]) -> None:
        self._answers = answers

    async def futures(self, timeout: float | None = None) -> list[ActorFuture[T]]:
        """One future for each member, as BroadcastResult.futures has them."""
        # To stop waiting takes nothing back: the broadcast goes on, and may be asked again.
        opened = asyncio.shield(asyncio.wrap_future(self._answers.opened))
        await asyncio.wait([opened], timeout=check_patience(timeout))
        if not opened.done():
            raise self._answers.too_late(timeout)
        return self._answers.futures()

    async def results(self, timeout: float | None = None, *, return_exceptions: bool = False) -> list[T | Any]:
        """All answers, as BroadcastResult.results has them."""
        futures = await self._wait(timeout)
        if not all(future.done() for future in futures):
            raise self._answers.too_late(timeout)
        return [_outcome(future, future.exception(), return_exceptions=return_exceptions) for future in futures]

    async def answers(self, timeout: float | None = None) -> list[Answer[T]]:
        """What each member says, as BroadcastResult.answers has it."""
        futures = await self._wait(timeout)
        return [self._answers.answer(index, timeout) for index in range(len(futures))]

    async def _wait(self, timeout: float | None) -> list[ActorFuture[T]]:
        deadline = deadline_after(timeout)
        futures = await self.futures(timeout)
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
        await asyncio.wait([_watched(future) for future in futures], timeout=left_s)
        return futures

    async def as_completed(self, timeout: float | None = None) -> AsyncIterator[Answer[T]]:
        """What each member says, as BroadcastResult.as_completed has it."""
        deadline = deadline_after(timeout)
        indexes = {_watched(future): index for index, future in enumerate(await self.futures(timeout))}
        while indexes:
            left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
            done, _ = await asyncio.wait(indexes, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for each in done or list(indexes):
                yield self._answers.answer(indexes.pop(each), timeout)

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


def _watched(future: ActorFuture[Any]) -> asyncio.Future[None]:
    """Done when `future` is, whatever it gives; to give it up leaves the call alone."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    future.add_done_callback(lambda _future: loop.call_soon_threadsafe(_set, done))
    return done


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _outcome(future: ActorFuture[T], error: BaseException | None, *, return_exceptions: bool) -> object:
    return error if error is not None and return_exceptions else future.result()
