from __future__ import annotations

import pytest

from fluster.actors.client.pending_calls import LONGEST_PAUSE_S, pause_before_retry
from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Call, Done
from fluster.actors.protocol.failures import RETRY, encode_failure
from fluster.actors.protocol.frames import Moment
from fluster.actors.results.futures import ActorFuture
from fluster.actors.routing.routing_pass import NobodyServesError
from fluster.errors import ActorDiedError, ActorNotFoundError, ActorTimeoutError, ConnectionLostError, MailboxFullError

NOW = frames.now()


def call(*, retried: int = 0, deadline: Moment | None = None, pinned: str | None = None, order: int = 1) -> Call:
    return Call("pool", "m", b"", ActorFuture("pool.m"), deadline=deadline, pinned=pinned, retried=retried, order=order)


def failed(error: Exception, each: Call | None = None) -> Done:
    return Done(each or call(), ok=False, error=error)


@pytest.mark.parametrize("error", [ConnectionLostError("x"), ActorDiedError("x"), NobodyServesError("x")])
def test_errors_of_delivery_are_worth_another_try(error: Exception) -> None:
    assert pause_before_retry(failed(error), 1, NOW)
    assert pause_before_retry(failed(error), 0, NOW) is None
    assert pause_before_retry(failed(error, call(retried=3)), 3, NOW) is None


@pytest.mark.parametrize(
    "error", [ActorTimeoutError("x"), MailboxFullError("x"), ActorNotFoundError("the pool is closed")]
)
def test_other_errors_are_not(error: Exception) -> None:
    assert pause_before_retry(failed(error), 5, NOW) is None


def test_what_the_method_raised_is_retried_where_the_actor_says_so() -> None:
    plain = Done(call(), ok=False, payload=encode_failure(ValueError("x")))
    advised = Done(call(), ok=False, payload=encode_failure(ValueError("x"), advice=RETRY))
    assert pause_before_retry(plain, 5, NOW) is None
    assert pause_before_retry(advised, 5, NOW)


def test_a_call_that_is_meant_for_one_actor_does_not_outlive_it() -> None:
    assert pause_before_retry(failed(ActorDiedError("x"), call(pinned="a")), 5, NOW) is None
    assert pause_before_retry(failed(ConnectionLostError("x"), call(pinned="a")), 5, NOW)


def test_pauses_grow_up_to_a_limit_and_differ() -> None:
    pauses = [pause_before_retry(failed(ActorDiedError("x"), call(retried=n)), 1_000, NOW) or 0 for n in (0, 1, 2, 99)]
    assert pauses == sorted(pauses)
    assert pauses[-1] <= LONGEST_PAUSE_S * 1.25
    assert len({pause_before_retry(failed(ActorDiedError("x"), call(order=n)), 1, NOW) for n in range(20)}) == 20


def test_nothing_is_retried_that_would_come_after_its_deadline() -> None:
    assert pause_before_retry(failed(ActorDiedError("x"), call(deadline=NOW.after(1.0))), 1, NOW)
    assert pause_before_retry(failed(ActorDiedError("x"), call(deadline=NOW.after(0.01))), 1, NOW) is None
