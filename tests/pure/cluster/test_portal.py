"""The thread with an event loop that blocking methods run on."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from collections.abc import Iterator

import pytest

from fluster.cluster.portal import Portal
from fluster_bus.core.errors import ClosedError

WAIT_S = 60.0


@pytest.fixture
def portal() -> Iterator[Portal]:
    made = Portal()
    yield made
    made.close()


async def echo(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_what_runs_there_sees_the_context_of_its_caller(portal: Portal) -> None:
    name = contextvars.ContextVar("name", default="nobody")
    name.set("the caller")

    async def seen() -> str:
        return name.get()

    assert portal.run(seen) == "the caller"


def test_what_runs_there_is_cancelled_by_close_and_waited_for(portal: Portal) -> None:
    runs, ended = threading.Event(), []

    async def stay() -> None:
        try:
            runs.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    refused: list[BaseException] = []

    def wait() -> None:
        try:
            portal.run(stay)
        except ClosedError as error:
            refused.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert runs.wait(WAIT_S)
    portal.close()
    assert ended
    thread.join(WAIT_S)
    assert len(refused) == 1


def test_a_call_that_meets_close_is_answered_or_refused() -> None:
    for _ in range(20):
        portal, begun = Portal(), threading.Barrier(5)
        outcomes: list[str] = []

        def call_on(portal: Portal = portal, begun: threading.Barrier = begun, found: list[str] = outcomes) -> None:
            begun.wait(WAIT_S)
            try:
                while True:
                    assert portal.run(echo, 3) == 3
            except ClosedError:
                found.append("refused")

        threads = [threading.Thread(target=call_on) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.wait(WAIT_S)
        portal.close()
        for thread in threads:
            thread.join(WAIT_S)
        assert outcomes == ["refused"] * 4
        gc.collect()  # a coroutine that was never awaited would be reported here, as a warning


def test_a_call_after_close_is_refused(portal: Portal) -> None:
    portal.close()
    portal.close()
    with pytest.raises(ClosedError, match="was closed"):
        portal.run(echo, 1)
    gc.collect()


def test_a_call_from_its_own_thread_is_refused_since_it_would_wait_for_itself(portal: Portal) -> None:
    async def call() -> int:
        return portal.run(echo, 1)

    with pytest.raises(RuntimeError, match="await the asynchronous API there"):
        portal.run(call)
    assert portal.run(echo, 2) == 2
    gc.collect()
