"""How much is taken in at once."""

from __future__ import annotations

import asyncio

import pytest

from fluster_services.controller.submissions.intake import IntakeRoom

pytestmark = pytest.mark.anyio


async def test_bytes_and_numbers_are_bounded_and_one_always_has_room() -> None:
    room = IntakeRoom(at_once=3, most_bytes=100)
    await room.enter(1_000)
    second = asyncio.create_task(room.enter(1))
    await asyncio.sleep(0)
    assert not second.done()
    room.leave(1_000)
    await second
    await room.enter(50)
    await room.enter(49)
    fourth = asyncio.create_task(room.enter(0))
    await asyncio.sleep(0)
    assert not fourth.done()
    room.leave(1)
    await fourth
