"""A worker's signs of life: its fence counts from the sending of the last that was heard, however late the answer came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.names import unique_name
from fluster_bus.core.version import VERSION
from fluster_bus.messages import Capacity, Heartbeat, HeartbeatReply, WorkerId
from fluster_bus.messages.parts.wire_range import WireRange
from fluster_bus.running.fence_clock import fence_clock
from fluster_services.config import Timing
from fluster_services.worker.presence.presence import Presence
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

TIMING = Timing(heartbeat_s=15, fence_after_s=90, worker_timeout_s=120)


class Listener:
    """A controller that hears beats, and answers them on command."""

    def __init__(self, bus: Bus) -> None:
        self.worker_id = WorkerId(unique_name("w"))
        self.heard = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.renewed = list[float]()
        self.apart = list[str | None]()
        self.wire: WireRange | None = None
        self.presence = Presence(
            bus,
            self.worker_id,
            total=Capacity(cpu=1),
            timing=TIMING,
            free=Capacity,
            attempts=lambda: (),
            renew=self.renewed.append,
            on_apart=self._on_apart,
        )

    async def _on_apart(self, why: str | None) -> None:
        self.apart.append(why)

    async def on_beat(self, beat: Heartbeat, _subject: str) -> HeartbeatReply:
        assert beat.worker_id == self.worker_id
        self.heard.set()
        await self.may_answer.wait()
        return HeartbeatReply(registered=True, wire=self.wire)

    async def answer_late(self) -> float:
        """When a beat was answered that had been heard for a while."""
        await self.heard.wait()
        heard_at = fence_clock()
        await wait_until_async(lambda: fence_clock() >= heard_at + 0.1)
        answered_at = fence_clock()
        self.may_answer.set()
        return answered_at


@pytest.fixture
async def listener(bus: Bus) -> AsyncIterator[Listener]:
    listener = Listener(bus)
    await bus.serve(subjects.heartbeats(listener.worker_id), Heartbeat, listener.on_beat)
    yield listener
    listener.may_answer.set()


async def test_a_beat_counts_from_its_sending(listener: Listener) -> None:
    presence = listener.presence
    presence.heard_at = 0.0
    beating = asyncio.create_task(presence.beat())
    answered_at = await listener.answer_late()
    assert await beating
    assert answered_at - TIMING.heartbeat_s < presence.heard_at <= answered_at - 0.1
    assert presence.fence_at == presence.heard_at + TIMING.fence_after_s


async def test_what_runs_is_renewed_for_what_is_left_since_the_sending(listener: Listener) -> None:
    beating = asyncio.create_task(listener.presence.beat())
    await listener.answer_late()
    assert await beating
    (left_s,) = listener.renewed
    assert TIMING.fence_after_s - TIMING.heartbeat_s < left_s <= TIMING.fence_after_s - 0.1


async def test_a_beat_that_nobody_heard_changes_nothing(bus: Bus) -> None:
    listener = Listener(bus)
    presence = listener.presence
    heard_at = presence.heard_at
    assert not await presence.beat()
    assert (presence.heard_at, listener.renewed) == (heard_at, [])


async def test_a_controller_that_speaks_otherwise_is_told_of_once_and_no_reason_to_end(listener: Listener) -> None:
    presence = listener.presence
    listener.may_answer.set()
    for wire in (None, WireRange(newest=9, oldest=8), WireRange(newest=9, oldest=8), WireRange(newest=2, oldest=1)):
        listener.wire = wire
        assert await presence.beat()
    why, again = listener.apart
    assert why is not None
    assert "speaks versions 8 to 9" in why
    assert why.endswith(f"update worker {listener.worker_id} (fluster {VERSION})")
    assert again is None
