"""How long a worker that is to leave waits for what it has."""

import asyncio

import pytest

from fluster_services.worker.presence.presence import Draining

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_without_work_it_is_done_at_once() -> None:
    draining = Draining()
    draining.ask(0)
    await draining.wait_asked()
    assert await draining.wait_done(set())


async def test_it_waits_for_work_that_grows_meanwhile() -> None:
    draining, work = Draining(), set[asyncio.Task[None]]()
    gate = asyncio.Event()

    def add(after: asyncio.Event | None) -> None:
        async def run() -> None:
            if after is not None:
                await after.wait()
                add(None)

        task = asyncio.create_task(run())
        work.add(task)
        task.add_done_callback(work.discard)

    add(gate)
    draining.ask(None)
    asyncio.get_running_loop().call_soon(gate.set)
    assert await draining.wait_done(work)
    assert work == set()


async def test_the_shortest_time_that_was_asked_for_counts() -> None:
    draining, forever = Draining(), asyncio.create_task(asyncio.Event().wait())
    draining.ask(None)
    draining.ask(3_600)
    waiting = asyncio.create_task(draining.wait_done({forever}))
    asyncio.get_running_loop().call_soon(draining.ask, 0)
    assert not await waiting
    forever.cancel()
