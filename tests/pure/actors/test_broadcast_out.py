"""A broadcast whose thread reads its answers has futures only for who asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from fluster.actors.client.broadcast import BroadcastAnswers, BroadcastResult
from fluster.actors.protocol.calls import Broadcast
from fluster.actors.protocol.frames import now
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import RoundRobin
from fluster.actors.routing.messages_out import BroadcastOut
from fluster.actors.routing.pool_state import PoolState
from fluster_bus.core import codec


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def carried(loop: asyncio.AbstractEventLoop) -> tuple[BroadcastResult[Any], BroadcastOut]:
    """A broadcast to a, b and c that is out, and what its caller has of it."""
    answers: BroadcastAnswers[Any] = BroadcastAnswers("pool.all", loop, lambda _call: None)
    broadcast = Broadcast("pool", "all", b"", answers.open, answers.fail, answers.carry)
    members = [Member.at("pool", f"to.{name}") for name in "abc"]
    message = BroadcastOut(PoolState("pool", RoundRobin(), shares_subject=True), broadcast, members, now())
    answers.carry(members, message)
    return BroadcastResult(answers), message


def answer(message: BroadcastOut, index: int, payload: bytes) -> bool:
    return message.take(message.members[index].endpoint_id, payload)


def test_results_stand_in_the_order_of_the_members_however_they_come(loop: asyncio.AbstractEventLoop) -> None:
    result, message = carried(loop)
    changes: list[None] = []
    message.when_changed(lambda: changes.append(None))
    for index in (2, 0, 1):
        assert not changes
        assert message.results() is None
        assert answer(message, index, codec.encode([index]))
    assert changes == [None]
    assert message.take("new", codec.encode("was not asked"))
    assert result.results() == [[0], [1], [2]]
    assert [future.result() for future in result.futures()] == result.results()
    assert [each.value for each in result.answers()] == result.results()
    assert result.results()[0] is result.futures()[0].result()


def test_who_asks_for_futures_has_them_of_all_and_the_rest_is_told_by_their_calls(
    loop: asyncio.AbstractEventLoop,
) -> None:
    result, message = carried(loop)
    message.number = -3
    assert answer(message, 1, codec.encode("b"))
    changes: list[None] = []
    message.when_changed(lambda: changes.append(None))
    futures = result.futures(0)
    assert changes == [None]
    assert [future.done() for future in futures] == [False, True, False]
    assert futures == result.futures(0)
    assert not answer(message, 0, codec.encode("a"))
    calls = message.make_calls().calls
    assert [call.number for call in calls.values()] == [-3, -3]
    message.when_changed(lambda: changes.append(None))
    for index in (0, 2):
        calls.pop(message.members[index].endpoint_id).ticket.settle(True, codec.encode(index))
    assert len(changes) == 3
    message.when_changed(lambda: changes.append(None))  # there is nothing to wait for any more
    assert len(changes) == 4
    assert result.results() == [0, "b", 2]


def test_a_result_that_cannot_be_read_here_is_told_by_its_future(loop: asyncio.AbstractEventLoop) -> None:
    result, message = carried(loop)
    for index, payload in enumerate((codec.encode(1), b"\x80\x05cno.such.module\nThing\n.", codec.encode(3))):
        assert answer(message, index, payload)
    with pytest.raises(ModuleNotFoundError) as caught:
        result.results()
    assert "cannot be read in this process" in caught.value.__notes__[0]
    assert [each.value for each in result.answers()] == [1, None, 3]
    one, error, three = result.results(return_exceptions=True)
    assert (one, type(error), three) == (1, ModuleNotFoundError, 3)
