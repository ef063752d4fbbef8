"""What only one process of a machine does at a time."""

import asyncio
import sys
import uuid
from contextlib import AsyncExitStack

import anyio
import pytest

from fluster_services.worker.linux.process_locks import alone

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody waits"),
]

HOLDER = """
import asyncio, os, sys
from fluster_services.worker.linux.process_locks import alone
async def main():
    async with alone(sys.argv[1], lambda: None):
        os.write(1, b"held")
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_one_after_the_other_and_whoever_waits_is_told() -> None:
    name, inside, waited, most = uuid.uuid4().hex, 0, 0, 0

    def on_wait() -> None:
        nonlocal waited
        waited += 1

    async def work() -> None:
        nonlocal inside, most
        async with alone(name, on_wait):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(100)))
    assert (most, waited) == (1, 99)


async def test_who_gives_up_or_fails_lets_the_next_one_in() -> None:
    name, told = uuid.uuid4().hex, asyncio.Event()
    async with AsyncExitStack() as holder:
        await holder.enter_async_context(alone(name, told.set))
        waiting = asyncio.create_task(_hold(name, told))
        await told.wait()
        waiting.cancel()
        await asyncio.wait({waiting})
    with pytest.raises(ZeroDivisionError):
        await _fail(name)
    async with asyncio.timeout(60), alone(name, told.set):
        pass


async def _hold(name: str, told: asyncio.Event) -> None:
    async with alone(name, told.set):
        raise AssertionError("it is held")


async def _fail(name: str) -> None:
    async with alone(name, lambda: None):
        raise ZeroDivisionError


async def test_one_that_is_killed_lets_the_next_one_in() -> None:
    name, told = uuid.uuid4().hex, asyncio.Event()
    async with await anyio.open_process([sys.executable, "-c", HOLDER, name], stderr=None) as holder:
        assert holder.stdout is not None
        assert await holder.stdout.receive() == b"held"

        async def follow() -> None:
            async with alone(name, told.set):
                pass

        following = asyncio.create_task(follow())
        await told.wait()
        assert not following.done()
        holder.kill()
        async with asyncio.timeout(60):
            await following
