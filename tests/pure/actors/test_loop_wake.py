"""One wake-up of a loop for all that comes until it looks, from any thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context

import pytest

from fluster.actors.results.loop_calls import LoopWake
from fluster_bus.core.errors import ClosedError


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often it was called from other threads; `interrupts` of these calls do not come to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.interrupts = 0

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.calls += 1
        return super().call_soon_threadsafe(callback, *args, context=context)


@pytest.fixture
def loop() -> Iterator[CountingLoop]:
    loop = CountingLoop()
    yield loop
    loop.close()


@pytest.mark.parametrize("wake", [LoopWake.wake, LoopWake.wake_soon])
def test_a_loop_is_woken_once_until_it_looks(loop: CountingLoop, wake: Callable[[LoopWake], None]) -> None:
    coming = LoopWake(loop)
    with ThreadPoolExecutor(1) as thread:
        for looks in range(1, 4):
            for _ in range(100):
                thread.submit(wake, coming).result()
            assert (loop.calls, coming.is_coming) == (looks, True)
            loop.run_until_complete(coming.wait())
            assert not coming.is_coming


def test_its_own_thread_wakes_it_without_a_call(loop: CountingLoop) -> None:
    coming = LoopWake(loop)

    async def wake() -> None:
        coming.wake()
        await coming.wait()
        coming.set()
        await coming.wait()

    loop.run_until_complete(wake())
    assert loop.calls == 0


@pytest.mark.parametrize("wake", [LoopWake.wake, LoopWake.wake_soon])
def test_a_wake_up_that_was_interrupted_is_made_by_the_next(
    loop: CountingLoop, wake: Callable[[LoopWake], None]
) -> None:
    coming = LoopWake(loop)
    loop.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        wake(coming)
    wake(coming)
    loop.run_until_complete(coming.wait())


def test_a_closed_loop_is_told_or_is_of_no_matter() -> None:
    loop = CountingLoop()
    coming = LoopWake(loop)
    loop.close()
    with pytest.raises(ClosedError, match="the connection to the cluster was closed"):
        coming.wake()
    coming.wake_soon()
