from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fluster.actors import ActorFuture
from fluster.actors.protocol.failures import encode_failure
from fluster.actors.server.mailbox import Mailbox
from fluster.errors import ActorTimeoutError
from fluster.testing import LocalActors
from fluster_bus.core import codec

TIMEOUT_S = 60


def future() -> ActorFuture[Any]:
    return ActorFuture("calculator.add")


def test_a_result_is_read_when_it_is_asked_for() -> None:
    one = future()
    one.settle(True, codec.encode([1, 2]))
    assert one.done()
    assert one.result() == [1, 2]
    assert one.result() is one.result()
    assert one.exception() is None


def test_what_the_method_raised_is_raised() -> None:
    one = future()
    one.settle(False, encode_failure(KeyError("k")))
    with pytest.raises(KeyError):
        one.result()
    assert isinstance(one.exception(), KeyError)


def test_waiting_runs_out_and_may_begin_again() -> None:
    one = future()
    with pytest.raises(TimeoutError, match=r"calculator\.add has not answered after 0.01 s"):
        one.result(0.01)
    one.settle(True, codec.encode(3))
    assert one.result(0) == 3


def test_patience_is_a_number() -> None:
    for ask in (future().result, future().exception):
        with pytest.raises(TypeError, match="timeout='x': give seconds as a number"):
            ask("x")  # type: ignore[arg-type]


def test_a_timeout_error_of_the_method_is_not_taken_for_ours() -> None:
    one = future()
    one.settle(False, encode_failure(TimeoutError("theirs")))
    with pytest.raises(TimeoutError, match="theirs") as caught:
        one.result(1)
    assert not isinstance(caught.value, ActorTimeoutError)


def test_a_result_that_cannot_be_read_here_says_so() -> None:
    one = future()
    one.settle(True, b"cno.such.module\nThing\n.")
    with pytest.raises(ModuleNotFoundError) as caught:
        one.result()
    assert "cannot be read in this process" in caught.value.__notes__[0]


def test_a_cancelled_future_raises_what_futures_raise() -> None:
    one = future()
    assert one.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        one.result()


def test_it_works_with_the_tools_of_concurrent_futures() -> None:
    good, bad = future(), future()
    good.settle(True, codec.encode(1))
    bad.settle(False, encode_failure(ValueError("no")))
    done, _ = concurrent.futures.wait([good, bad, future()], return_when=concurrent.futures.FIRST_EXCEPTION)
    assert done == {good, bad}
    called: list[Any] = []
    good.add_done_callback(lambda each: called.append(each.result()))
    assert called == [1]


@pytest.mark.anyio
async def test_it_can_be_awaited() -> None:
    one, other = future(), future()
    loop = asyncio.get_running_loop()
    thread = threading.Thread(target=one.settle, args=(True, codec.encode("answer")))
    thread.start()
    assert await one == "answer"
    assert await one == "answer"
    thread.join()
    loop.call_soon(other.settle, False, encode_failure(ValueError("no")))
    with pytest.raises(ValueError, match="no"):
        await other


@pytest.mark.anyio
async def test_blocking_on_the_loop_that_brings_the_answer_is_refused() -> None:
    one: ActorFuture[Any] = ActorFuture("calculator.add", asyncio.get_running_loop())
    with pytest.raises(RuntimeError, match="`await` the future instead"):
        one.result()
    one.settle(True, codec.encode(1))
    assert one.result() == 1


def test_a_mailbox_is_bounded_in_number_and_bytes() -> None:
    box: Mailbox[str] = Mailbox(max_items=2, max_bytes=10)
    assert box.put("huge", 50)  # alone, however large
    assert not box.put("next", 1)
    assert box.take() == "huge"
    box.done(50)
    assert box.put("a", 6)
    assert not box.put("b", 5)
    assert box.put("c", 4)
    assert not box.put("d", 0)
    assert len(box) == 2


def test_a_mailbox_tells_when_it_is_idle() -> None:
    box: Mailbox[int] = Mailbox(max_items=10, max_bytes=10)
    idle: list[bool] = []
    box.put(1, 1)
    box.when_idle(lambda: idle.append(True))
    assert idle == []
    box.take()
    box.done(1)
    assert idle == [True]


def test_a_closed_mailbox_gives_back_what_waited() -> None:
    box: Mailbox[int] = Mailbox(max_items=10, max_bytes=10)
    for number in range(3):
        box.put(number, 1)
    assert box.take() == 0
    assert box.close(takers=2) == [1, 2]
    assert box.take() is None
    assert box.take() is None


# ---- futures whose condition is made late ---------------------------------------------------------------


def test_python_s_own_functions_take_such_futures() -> None:
    futures = [future() for _ in range(6)]
    for number, one in enumerate(futures[:3]):
        one.settle(True, codec.encode(number))

    def settle_the_others() -> None:
        for one in futures[3:]:
            one.settle(True, codec.encode(9))

    setting = threading.Timer(0.01, settle_the_others)
    setting.start()
    assert sorted(each.result() for each in concurrent.futures.as_completed(futures, TIMEOUT_S)) == [0, 1, 2, 9, 9, 9]
    assert concurrent.futures.wait(futures, TIMEOUT_S).not_done == set()
    setting.join()


def test_a_callback_is_called_once_whenever_it_is_added() -> None:
    early, late = future(), future()
    called: list[Any] = []
    early.add_done_callback(called.append)
    for one in (early, late):
        one.settle(True, codec.encode(1))
    late.add_done_callback(called.append)
    assert called == [early, late]


def test_a_future_that_is_cancelled_never_runs() -> None:
    untouched, watched = future(), future()
    watched.add_done_callback(lambda _future: None)
    for one in (untouched, watched):
        assert one.cancel()
        assert not one.set_running_or_notify_cancel()
        assert one.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            one.result(TIMEOUT_S)


def test_of_a_cancel_and_a_start_one_wins() -> None:
    for _ in range(300):
        one = future()
        both = threading.Barrier(2)
        outcome: dict[str, bool] = {}

        def cancel(one: ActorFuture[Any] = one, both: threading.Barrier = both, out: dict[str, bool] = outcome) -> None:
            both.wait()
            out["cancelled"] = one.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        both.wait()
        outcome["runs"] = one.set_running_or_notify_cancel()
        thread.join()
        assert outcome["runs"] != outcome["cancelled"]


def test_who_waits_while_it_is_settled_is_woken() -> None:
    for _ in range(300):
        one = future()
        both = threading.Barrier(2)
        found: list[Any] = []

        def wait(one: ActorFuture[Any] = one, both: threading.Barrier = both, found: list[Any] = found) -> None:
            both.wait()
            found.append(one.result(TIMEOUT_S))

        thread = threading.Thread(target=wait)
        thread.start()
        both.wait()
        one.settle(True, codec.encode(5))
        thread.join()
        assert found == [5]


def test_what_is_settled_twice_is_told() -> None:
    one = future()
    one.set_result(1)
    with pytest.raises(concurrent.futures.InvalidStateError):
        one.set_result(2)


def test_futures_and_streams_do_not_travel() -> None:
    with pytest.raises(TypeError, match=r"ActorFuture calculator.add new> is a future.*: pass its result\(\)"):
        codec.encode([future()])

    class Counter:
        def count(self) -> Iterator[int]:
            yield from range(3)

    with LocalActors() as actors:
        pool = actors.deploy(Counter)
        with pytest.raises(TypeError, match=r"ActorStream Counter.count \w+> is a stream"):
            codec.encode([pool.call().count()])
