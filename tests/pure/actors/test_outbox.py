"""Replies of actors, on their way out."""

import asyncio

import pytest

from fluster.actors.server.outbox import Outbox, Reply
from fluster.testing.memory_bus import MemoryBus
from fluster_bus.storage.objects import ObjectStore

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Recorder(MemoryBus):
    """Notes what is published, and whether it was by the time of a flush."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[bytes] = []
        self.flushed = 0

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        del subject, reply, headers
        self.published.append(data)

    async def flush(self) -> None:
        self.flushed = len(self.published)


@pytest.mark.parametrize("is_asleep", [True, False])
async def test_it_is_not_empty_before_the_loop_has_come_to_what_was_added(*, is_asleep: bool) -> None:
    bus = Recorder()
    outbox = Outbox(bus, asyncio.get_running_loop(), ObjectStore(bus, "test"))
    running = asyncio.create_task(outbox.run())
    if is_asleep:
        await asyncio.sleep(0)
    for number in range(5):
        outbox.add(Reply("inbox", "", 0, ok=True, payload=b"late"))
        await outbox.wait_empty()
        assert bus.flushed == number + 1
    running.cancel()
    await asyncio.wait([running])
    await bus.close()


async def test_nobody_waits_for_what_can_be_sent_no_more() -> None:
    bus = MemoryBus()
    outbox = Outbox(bus, asyncio.get_running_loop(), ObjectStore(bus, "test"))
    running = asyncio.create_task(outbox.run())
    closing = asyncio.create_task(bus.close())
    outbox.add(Reply("inbox", "", 0, ok=True, payload=b"late"))
    await closing
    await running
    assert outbox._empty.is_set()  # noqa: SLF001 - an outbox that has ended is not run again
