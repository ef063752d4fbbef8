"""How often a call is run: at most once, unless its method says `retries`; and never after its deadline."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from fluster.actors import ActorPool, AsyncActorPool, method
from fluster.actors.client import pending_calls
from fluster.cluster import AsyncCluster, Cluster
from fluster.errors import ActorDiedError, ActorNotFoundError, ConnectionLostError
from fluster_bus.core import codec
from fluster_bus.core.roles import Role
from tests.component.actor_env import TIMEOUT_S, Calculator, Env, Gate
from tests.waiting import wait_until

LATE_S = 3.0  # after which calls are late that were sent in time


class FlakyError(Exception):
    pass


class WorseError(FlakyError):
    pass


class Flaky(Gate):
    """Fails a given number of times, and counts how often its methods run."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.runs = 0

    def once(self) -> int:
        return self.run()

    @method(retries=3, retry_exceptions=(FlakyError,))
    def retried(self) -> int:
        return self.run()

    @method(retries=100)  # for as long as a slow machine takes to serve a successor
    def delivered(self) -> int:
        return self.run()

    @method(retries=3)
    def wait_again(self) -> str:
        self.runs += 1
        return self.wait()

    def run(self) -> int:
        self.runs += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.runs

    def count(self) -> int:
        return self.runs


def test_a_call_runs_once_unless_its_method_says_otherwise(shared: Env) -> None:
    flaky = Flaky(FlakyError("first"), FlakyError("second"))
    shared.serve("at-most-once", flaky)
    pool = shared.pool("at-most-once")
    with pytest.raises(FlakyError, match="first"):
        pool.call().once()
    with pytest.raises(FlakyError, match="second"):
        pool.call().delivered()  # retried for errors of delivery only
    assert flaky.runs == 2


def test_exceptions_that_the_method_names_are_retried_also_for_callers_without_its_class(shared: Env) -> None:
    flaky = Flaky(FlakyError("first"), WorseError("second"))
    shared.serve("named", flaky)
    assert shared.pool("named").call().retried() == 3
    assert shared.pool("named").submit().retried().result(TIMEOUT_S) == 4


def test_other_exceptions_and_one_too_many_are_raised(shared: Env) -> None:
    flaky = Flaky(ValueError("other"), *(FlakyError(str(number)) for number in range(4)))
    shared.serve("too-many", flaky)
    pool = shared.pool("too-many")
    with pytest.raises(ValueError, match="other"):
        pool.call().retried()
    with pytest.raises(FlakyError, match="3"):
        pool.call().retried()
    assert flaky.runs == 5


@pytest.mark.anyio
async def test_the_awaited_pool_retries_as_well(shared: Env) -> None:
    shared.serve("awaited-retry", Flaky(FlakyError("first")))
    shared.pool("awaited-retry")
    async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: AsyncActorPool[Any] = AsyncActorPool(cluster, "awaited-retry")
        assert await pool.call().retried() == 2


def test_a_retry_never_comes_after_the_deadline(shared: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(pending_calls, name, 100 * TIMEOUT_S)
    flaky = Flaky(*(FlakyError(str(number)) for number in range(9)))
    shared.serve("hurried", flaky)
    pool = shared.pool("hurried")
    began = time.monotonic()
    with pytest.raises(FlakyError, match="0"):
        pool.call(timeout=TIMEOUT_S).retried()  # the first pause is longer
    assert time.monotonic() - began < TIMEOUT_S
    assert flaky.runs == 1


def test_a_call_whose_actor_ends_is_run_by_another(shared: Env) -> None:
    first, second = Flaky(), Flaky()
    ending = shared.serve("successor", first)
    shared.serve("successor", second)
    pool = shared.pool("successor", size=2)
    second.opened.set()
    futures = [pool.submit().wait_again() for _ in range(4)]
    first.is_entered()
    ending.shutdown(timeout=0.05)  # one is under way, one waits
    assert [future.result(TIMEOUT_S) for future in futures] == ["went through"] * 4
    assert (first.runs, second.runs) == (1, 4)
    first.opened.set()


def test_a_call_that_finds_nobody_is_sent_to_who_comes_next(shared: Env) -> None:
    server = shared.serve("vacant", Flaky())
    pool = shared.pool("vacant")
    known = ActorPool(shared.cluster(), "vacant-from-the-beginning", actor_class=Flaky)
    server.shutdown()
    wait_until(lambda: pool.size == 0)  # a call before that may be out when the end is known
    with pytest.raises(ActorNotFoundError):
        pool.call().once()
    futures = [pool.submit().delivered(), known.submit().delivered()]
    shared.serve("vacant", Flaky())
    shared.serve("vacant-from-the-beginning", Flaky())
    assert [future.result(TIMEOUT_S) for future in futures] == [1, 1]


def test_a_pool_that_is_shut_down_ends_the_calls_that_pause(shared: Env) -> None:
    shared.serve("pausing", Flaky(*(FlakyError("again") for _ in range(9))))
    pool = shared.pool("pausing")
    future = pool.submit().retried()
    pool.submit().once().exception(TIMEOUT_S)  # comes after: the first has failed by now
    pool.shutdown()
    with pytest.raises(ActorNotFoundError, match="was shut down"):
        future.result(TIMEOUT_S)


def test_a_lost_connection_repeats_only_what_may_be_repeated(env: Env) -> None:
    gate, flaky = Gate(), Flaky()
    env.serve("lost-once", gate)
    env.serve("lost-again", flaky)
    once, again = env.pool("lost-once"), env.pool("lost-again")
    out, repeated = once.submit().wait(), again.submit().wait_again()
    gate.is_entered()
    flaky.is_entered()
    env.server.stop()
    with pytest.raises(ConnectionLostError, match="may have run"):
        out.result(TIMEOUT_S)
    for each in (gate, flaky):
        each.opened.set()
    env.server.start()
    assert repeated.result(TIMEOUT_S) == "went through"
    assert flaky.runs == 2


@contextlib.contextmanager
def seen_by_the_server(env: Env, pool: str) -> Iterator[Callable[[int], object]]:
    """What waits until the server has handed on so many messages with calls to a member."""
    arrived: SimpleQueue[object] = SimpleQueue()
    with env.cluster() as cluster:
        subject = f"fluster.default.actors.{pool}.one.*.*"
        cluster.portal.run(cluster.asynchronous.bus.subscribe, subject, arrived.put)
        cluster.portal.run(cluster.asynchronous.bus.flush)
        yield lambda count: [arrived.get(timeout=TIMEOUT_S) for _ in range(count)]


def wait_past(deadline: float) -> None:
    wait_until(lambda: time.monotonic() > deadline)


def test_what_a_slow_connection_delivers_after_its_deadline_is_not_run(env: Env) -> None:
    """The client is gone by then, so that it has taken nothing back: the deadline alone tells."""
    calculator, slow, proxy = Calculator(), env.proxy(), env.proxy()
    address = env.server.credentials(Role.OPERATOR)
    with Cluster(replace(address, url=f"nats://127.0.0.1:{slow.port}")) as served:
        env.serve("late", calculator, cluster=served)
        pool = env.pool("late")
        with (
            Cluster(replace(address, url=f"nats://127.0.0.1:{proxy.port}")) as caller,
            seen_by_the_server(env, "late") as sent,
        ):
            callers: ActorPool[Any] = ActorPool(caller, "late")
            callers.wait_for_size(1, timeout=TIMEOUT_S)
            env.portal.run(slow.hold)
            late = callers.submit(timeout=LATE_S).note("late")
            deadline = time.monotonic() + LATE_S
            sent(1)
            env.portal.run(proxy.cut)
            with pytest.raises(ConnectionLostError, match="may have run"):
                late.result(TIMEOUT_S)
            wait_past(deadline)
            waits = pool.submit().note("in time")
            env.portal.run(slow.release)
            waits.result(TIMEOUT_S)
    assert calculator.seen == ["in time"]


def test_what_a_client_sent_over_a_lost_connection_is_not_run_after_its_deadline(env: Env) -> None:
    """It is on its way when the client loses the connection, and arrives when the client can take nothing back."""
    calculator, proxy = Calculator(), env.proxy()
    env.serve("reconnects", calculator)
    direct = env.pool("reconnects")
    address = replace(env.server.credentials(Role.OPERATOR), url=f"nats://127.0.0.1:{proxy.port}")
    with Cluster(address) as caller, seen_by_the_server(env, "reconnects") as sent:
        pool: ActorPool[Any] = ActorPool(caller, "reconnects")
        pool.wait_for_size(1, timeout=TIMEOUT_S)
        env.portal.run(proxy.hold)
        late = [pool.submit(timeout=LATE_S).note(f"late {number}") for number in range(10)]
        deadline = time.monotonic() + LATE_S
        wait_until(lambda: b"late 9" in proxy.held)
        env.portal.run(proxy.cut_near)
        for future in late:
            with pytest.raises(ConnectionLostError, match="may have run"):
                future.result(TIMEOUT_S)
        wait_past(deadline)
        env.portal.run(proxy.release)
        sent(1)  # they travel together
        direct.call().note("in time")
        wait_until(lambda: went_through(pool))
    assert set(calculator.seen) == {"in time"}


def went_through(pool: ActorPool[Any]) -> bool:
    try:
        pool.call(timeout=TIMEOUT_S).note("in time")
    except ConnectionLostError:
        return False
    return True


def test_a_broadcast_is_never_repeated(shared: Env) -> None:
    flaky = Flaky(FlakyError("broadcast"))
    shared.serve("not-repeated", flaky)
    pool = shared.pool("not-repeated")
    with pytest.raises(FlakyError, match="broadcast"):
        pool.broadcast().retried().results(TIMEOUT_S)
    assert flaky.runs == 1


def test_threads_that_wait_for_retries_do_not_hold_up_others(shared: Env) -> None:
    shared.serve("shared-retry", Flaky(*(FlakyError("again") for _ in range(2))))
    pool = shared.pool("shared-retry")
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(pool.call().retried()))
    thread.start()
    assert pool.call().count() >= 0
    thread.join(TIMEOUT_S)
    assert len(results) == 1


def test_a_direct_call_to_an_actor_that_died_is_not_sent_to_another(shared: Env) -> None:
    ending = shared.serve("direct", Flaky())
    shared.serve("direct", Flaky())
    pool = shared.pool("direct", size=2)
    member = pool.members()[0]
    ending.shutdown()
    with pytest.raises(ActorDiedError):
        pool.asynchronous.submit_to(member.endpoint_id, "delivered", codec.encode(((), {}))).result(TIMEOUT_S)
