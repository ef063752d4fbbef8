"""Pauses between attempts, and waits that an event or a time ends."""

from __future__ import annotations

import asyncio

import pytest

from fluster_bus.running.backoff import Backoff
from fluster_bus.running.coroutines import wait_set


def test_pauses_double_up_to_the_longest_and_begin_again() -> None:
    backoff = Backoff(0.5, 3.0)
    pauses = []
    for _ in range(5):
        pauses.append(backoff.pause_s)
        backoff.lengthen()
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.pause_s == 0.5


@pytest.mark.anyio
async def test_a_wait_ends_with_its_event() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_set(event, None))
    await asyncio.sleep(0)
    assert not waiting.done()
    event.set()
    assert await waiting
    assert await wait_set(event, 0)  # it was set before


@pytest.mark.anyio
async def test_a_wait_ends_with_its_time() -> None:
    assert not await wait_set(asyncio.Event(), 0.001)
    assert not await wait_set(asyncio.Event(), -1)


@pytest.mark.anyio
async def test_a_wait_that_is_cancelled_does_not_return() -> None:
    waiting = asyncio.create_task(wait_set(asyncio.Event(), 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
