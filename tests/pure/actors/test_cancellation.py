"""Cancelled calls: at the future, on the wire, and in the mailbox."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.actors import ActorContext, ActorFuture
from fluster.actors.definition.context import Cancellation
from fluster.actors.protocol import frames
from fluster.actors.server.mailbox import Mailbox
from fluster_bus.core import codec
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.messages import Namespace

TIMEOUT_S = 60


def sent_future(withdrawn: list[object]) -> ActorFuture[Any]:
    future: ActorFuture[Any] = ActorFuture("calculator.add", withdraw=withdrawn.append)
    assert future.begin("the call")
    return future


# ---- the future -----------------------------------------------------------------------------------------


def test_a_call_that_is_out_is_withdrawn_once_and_its_answer_dropped() -> None:
    withdrawn: list[object] = []
    future = sent_future(withdrawn)
    ends: list[bool] = []
    future.add_done_callback(lambda each: ends.append(each.cancelled()))
    assert future.cancel()
    assert future.cancel()
    future.settle(True, codec.encode(3))
    future.set_exception(ValueError())
    assert (withdrawn, ends) == (["the call"], [True])
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert concurrent.futures.wait([future], timeout=TIMEOUT_S).done == {future}


def test_a_call_that_was_not_sent_needs_no_word_to_anybody() -> None:
    withdrawn: list[object] = []
    future: ActorFuture[Any] = ActorFuture("calculator.add", withdraw=withdrawn.append)
    assert future.cancel()
    assert not future.begin("the call")
    assert withdrawn == []


def test_a_call_that_has_ended_cannot_be_cancelled() -> None:
    withdrawn: list[object] = []
    future = sent_future(withdrawn)
    future.settle(True, codec.encode(3))
    assert not future.cancel()
    assert (future.result(), withdrawn) == (3, [])


def test_those_who_wait_are_woken_by_the_cancel() -> None:
    future = sent_future([])
    waiting = threading.Barrier(3)
    woken: list[object] = []

    def wait_for_result() -> None:
        waiting.wait(TIMEOUT_S)
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(TIMEOUT_S)
        woken.append("result")

    def wait_for_several() -> None:
        waiting.wait(TIMEOUT_S)
        woken.append(len(concurrent.futures.wait([future], TIMEOUT_S).done))

    threads = [threading.Thread(target=each) for each in (wait_for_result, wait_for_several)]
    for thread in threads:
        thread.start()
    waiting.wait(TIMEOUT_S)
    assert future.cancel()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert set(woken) == {"result", 1}


@pytest.mark.anyio
async def test_a_cancelled_task_cancels_the_call_that_it_awaits() -> None:
    withdrawn: list[object] = []
    future = sent_future(withdrawn)

    async def wait() -> None:
        await future

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.cancelled()
    assert withdrawn == ["the call"]


# ---- the message ----------------------------------------------------------------------------------------


def test_a_cancel_names_calls_of_its_own_inbox_only() -> None:
    payload = frames.encode_cancel([(7, 0), (9, 63)])
    assert frames.cancelled_calls("_INBOX.secret.12", payload) == [("_INBOX.secret.7", 0), ("_INBOX.secret.9", 63)]
    for junk in (b"", pickle.dumps([(7, 0)]), b"[1]", b'[["other.7", 0]]', b"null"):
        with pytest.raises(InvalidMessageError):
            frames.cancelled_calls("_INBOX.secret.12", junk)


# ---- the mailbox ----------------------------------------------------------------------------------------


def mailbox(max_items: int = 100) -> Mailbox[str]:
    return Mailbox(max_items=max_items, max_bytes=1_000)


def test_what_is_removed_is_never_taken_and_makes_room() -> None:
    box = mailbox(max_items=2)
    assert box.put("a", 1, key=1)
    assert box.put("b", 1, key=2)
    assert box.remove(1) == "a"
    assert box.remove(1) is None
    box.done(1)
    assert box.put("c", 1, key=1)
    assert [box.take(), box.take()] == ["b", "c"]
    assert box.remove(2) is None


def test_a_doubled_key_reaches_only_the_first() -> None:
    box = mailbox()
    box.put("first", 1, key=1)
    box.put("second", 1, key=1)
    box.put("nameless", 1)
    assert box.remove(1) == "first"
    assert box.remove(1) is None
    assert [box.take(), box.take()] == ["second", "nameless"]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.integers(0, 5)),
            st.tuples(st.just("remove"), st.integers(0, 5)),
            st.just(("take", 0)),
        ),
        max_size=60,
    )
)
def test_whatever_is_removed_the_rest_is_taken_in_order(steps: list[tuple[str, int]]) -> None:
    box = mailbox(max_items=8)
    expected: OrderedDict[object, str] = OrderedDict()
    for number, (step, key) in enumerate(steps):
        if step == "put" and key not in expected:
            assert box.put(f"{number}", 1, key=key) == (len(expected) < 8)
            expected[key] = f"{number}"
        elif step == "remove":
            removed = expected.pop(key, None)
            assert box.remove(key) == removed
            if removed is not None:
                box.done(1)
        elif step == "take" and expected:
            assert box.take() == expected.popitem(last=False)[1]
            box.done(1)
    assert len(box) == len(expected)
    assert box.close(takers=1) == list(expected.values())
    assert box.take() is None


def test_takers_and_removers_share_what_there_is() -> None:
    """Each item is taken once or removed once, and a taker is never left without what waits."""
    box: Mailbox[int] = Mailbox(max_items=10_000, max_bytes=10_000)
    taken: list[int] = []

    def take() -> None:
        while (item := box.take()) is not None:
            taken.append(item)
            box.done(1)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    removed = []
    for number in range(5_000):
        box.put(number, 1, key=number)
        if number % 3 == 0:
            found = box.remove(number - number % 2)
            if found is not None:
                removed.append(found)
                box.done(1)
    idle = threading.Event()
    box.when_idle(idle.set)
    assert idle.wait(TIMEOUT_S)
    assert box.close(takers=2) == []
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(taken + removed) == list(range(5_000))


# ---- at the method --------------------------------------------------------------------------------------


def test_a_cancellation_is_told_once_to_all() -> None:
    cancellation = Cancellation()
    told: list[str] = []
    cancellation.on_cancel(lambda: told.append("before"))
    assert not cancellation.wait(0)
    cancellation.cancel()
    cancellation.cancel()
    cancellation.on_cancel(lambda: told.append("after"))
    assert told == ["before", "after"]
    assert cancellation.wait(TIMEOUT_S)
    assert cancellation.cancelled


def test_a_context_without_a_call_is_never_cancelled() -> None:
    context = ActorContext(namespace=Namespace("default"))
    assert not context.cancelled
    with pytest.raises(RuntimeError, match="there is no call"):
        context.wait_cancelled(0)
