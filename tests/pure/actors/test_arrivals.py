from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from fluster.actors.client import arrivals as arrivals_module
from fluster.actors.client.arrivals import Arrivals
from fluster.actors.protocol.calls import Broadcast, Call
from fluster.actors.results.futures import ActorFuture
from fluster.errors import MailboxFullError
from fluster_bus.core.errors import ClosedError


def call(number: int) -> Call:
    return Call("pool", str(number), b"", ActorFuture("pool.m"))


def methods(items: Iterable[Call | Broadcast]) -> list[int]:
    return [int(item.method) for item in items]


class Loop:
    """The client's loop, which looks at what has arrived when it is woken."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.dropped: list[Any] = []
        self.arrivals = Arrivals(self.loop, lambda *what: self.dropped.append(what))
        self.taken: SimpleQueue[list[int]] = SimpleQueue()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def begin(self) -> None:
        asyncio.run_coroutine_threadsafe(self._take(), self.loop)

    async def _take(self) -> None:
        while True:
            await self.arrivals.wait()
            self.taken.put(methods(self.arrivals.take()))

    def sync(self) -> None:
        """Return when the loop has done all that it was given before."""
        for _ in range(3):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop).result()

    async def _cancel(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks) if tasks else None

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def test_what_a_thread_gives_is_taken_in_order_also_while_it_goes_on(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "_HAND_OVER_FOR_S", 20.0)
    loop.begin()
    for number in range(1_000):
        loop.arrivals.put(call(number))
    assert loop.taken.qsize() >= 3  # it was let in before the thread was through
    taken: list[int] = []
    while len(taken) < 1_000:
        taken += loop.taken.get(timeout=20)
    assert taken == list(range(1_000))


def test_nobody_waits_for_long_for_a_loop_that_does_not_come(loop: Loop) -> None:
    for number in range(1_000):
        loop.arrivals.put(call(number))
    assert methods(loop.arrivals.take()) == list(range(1_000))


def test_a_thread_with_a_loop_of_its_own_never_waits(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals_module, "_HAND_OVER_FOR_S", 1e6)

    async def put() -> None:
        for number in range(600):
            loop.arrivals.put(call(number))

    asyncio.run(put())
    assert len(loop.arrivals) == 600


def test_more_than_may_wait_is_refused_and_so_is_all_that_comes_after_the_end(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "MAX_QUEUED", 2)
    first, second = call(1), call(2)
    loop.arrivals.put(first)
    loop.arrivals.put(second)
    with pytest.raises(MailboxFullError, match=r"pool\.3: this client has 2 calls waiting"):
        loop.arrivals.put(call(3))
    closed = ClosedError("closed")
    loop.arrivals.close(closed)
    loop.arrivals.drop_rest()
    assert loop.dropped == [(first, closed), (second, closed)]
    with pytest.raises(ClosedError):
        loop.arrivals.put(call(4))


def broadcast(number: int) -> Broadcast:
    return Broadcast("pool", str(number), b"", lambda _members, _call_for: {}, lambda _error: None)


def test_a_loop_is_not_woken_for_what_is_taken_back_at_once(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals_module, "_UNTIL_TAKEN_BACK_S", 30.0)
    loop.begin()
    loop.loop.call_soon_threadsafe(loop.arrivals.use_alarm)
    loop.sync()
    for number in range(100):
        item = broadcast(number)
        loop.arrivals.put(item, may_be_taken_back=True)
        assert loop.arrivals.take_back(item)
    loop.sync()
    assert loop.taken.empty()
    loop.arrivals.put(broadcast(1), may_be_taken_back=True)
    loop.sync()
    assert loop.taken.empty()
    loop.arrivals.put(broadcast(2), may_be_taken_back=True)  # no thread waits for two at once
    assert loop.taken.get(timeout=20) == [1, 2]
    loop.arrivals.put(broadcast(3), may_be_taken_back=True)
    loop.arrivals.put(call(4))
    assert loop.taken.get(timeout=20) == [3, 4]
    loop.arrivals.put(broadcast(5), may_be_taken_back=True)
    loop.arrivals.hurry()
    assert loop.taken.get(timeout=20) == [5]


def test_what_is_not_taken_back_is_come_to_soon(loop: Loop) -> None:
    loop.begin()
    loop.loop.call_soon_threadsafe(loop.arrivals.use_alarm)
    loop.sync()
    for number in range(20):
        item = broadcast(number)
        loop.arrivals.put(item, may_be_taken_back=True)
        assert loop.taken.get(timeout=20) == [number]
        assert not loop.arrivals.take_back(item)


def test_what_another_thread_puts_while_something_is_taken_back_is_come_to(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals_module, "_UNTIL_TAKEN_BACK_S", 0.001)
    loop.begin()
    loop.loop.call_soon_threadsafe(loop.arrivals.use_alarm)
    loop.sync()
    left: list[int] = []

    def put(start: int) -> None:
        for number in range(start, start + 1_000):
            item = broadcast(number)
            loop.arrivals.put(item, may_be_taken_back=True)
            if not loop.arrivals.take_back(item):
                left.append(number)  # by one instruction of Python's: threads may
                loop.arrivals.hurry()

    threads = [threading.Thread(target=put, args=(start,)) for start in (0, 1_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken: list[int] = []
    while len(taken) < len(left):
        taken += loop.taken.get(timeout=20)
    assert sorted(taken) == sorted(left)
