"""Hooks, and actors that are made anew in their process when they fail."""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
import time
from typing import Any

import pytest

from fluster.actors import ActorPool, ActorServer, actor, every
from fluster.actors.server.supervision import RestartBudget
from fluster.errors import ActorDiedError, ActorFailedError, ActorGivenUpError
from tests.component.actor_env import TIMEOUT_S, Env, Gate
from tests.insides import caller_of
from tests.missed_signals import missed_signal
from tests.waiting import wait_until_async


class BrokenError(Exception):
    pass


class Journal:
    """What happened to all instances of one actor, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.changed = threading.Condition()

    def add(self, line: str) -> None:
        with self.changed:
            self.lines.append(line)
            self.changed.notify_all()

    def wait_for(self, line: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: line in self.lines, TIMEOUT_S), self.lines


@actor(max_restarts=2, restart_window=60, fatal_exceptions=(BrokenError,))
class Fragile:
    def __init__(self, journal: Journal, gate: Gate) -> None:
        self.journal, self.gate = journal, gate
        self.count = 0
        journal.add("made")

    def on_start(self) -> None:
        self.journal.add("started")

    def on_stop(self) -> None:
        self.journal.add("stopped")

    def on_failure(self, error: Exception) -> bool:
        self.journal.add(f"failed: {error}")
        return "repaired" in str(error)

    def add(self) -> int:
        self.count += 1
        return self.count

    def fail(self, text: str) -> None:
        raise BrokenError(text)

    def fail_by_name(self) -> None:
        raise ActorFailedError("no use")

    def complain(self) -> None:
        raise ValueError("nothing fatal")

    def wait_and_fail(self) -> None:
        self.gate.wait()
        raise BrokenError("after a while")


class FragileAsync(Fragile):
    async def on_start(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.journal.add("started")

    async def on_stop(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.journal.add("stopped")

    async def on_failure(self, error: Exception) -> bool:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().on_failure(error)

    async def fail(self, text: str) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        raise BrokenError(text)


@actor(max_concurrency=3, max_restarts=2, fatal_exceptions=(BrokenError,))
class FragileSideBySide(FragileAsync):
    pass


class Served:
    """A fragile actor, its server and a pool of it."""

    def __init__(self, env: Env, name: str, kind: type[Fragile] = Fragile, *, restartable: bool = True) -> None:
        self.journal, self.gate = Journal(), Gate()
        self.server = ActorServer(env.cluster())
        make = functools.partial(kind, self.journal, self.gate)
        self.server.register(name, make(), factory=make if restartable else None)
        self.server.serve_background()
        self.pool = env.pool(name)

    async def flush(self) -> None:
        """Return when all calls so far are with the server, and so before whatever the actor hears next."""
        caller = caller_of(self.pool)
        await wait_until_async(lambda: not caller.is_sending)
        await self.pool.asynchronous.cluster.bus.flush()


KINDS = [Fragile, FragileAsync, FragileSideBySide]


@pytest.mark.parametrize("kind", KINDS)
def test_an_actor_starts_fails_is_made_anew_and_stops(shared: Env, kind: type[Fragile]) -> None:
    served = Served(shared, f"life-of-{kind.__name__}", kind)
    pool, journal = served.pool, served.journal
    assert [pool.call().add(), pool.call().add()] == [1, 2]
    with pytest.raises(BrokenError, match="bang"):
        pool.call().fail("bang")
    assert pool.call().add() == 1
    with pytest.raises(ActorFailedError):
        pool.call().fail_by_name()
    assert pool.call().add() == 1
    served.server.shutdown()
    again = ["made", "started"]
    assert journal.lines == [*again, "failed: bang", *again, "failed: no use", *again, "stopped"]


def test_hooks_cannot_be_called_from_outside(shared: Env) -> None:
    served = Served(shared, "hooks")
    for hook in ("on_start", "on_stop", "on_failure"):
        with pytest.raises(AttributeError, match="no method"):
            getattr(served.pool.call(), hook)()
    served.server.shutdown()


def test_what_is_not_fatal_or_was_repaired_changes_nothing(shared: Env) -> None:
    served = Served(shared, "repaired")
    assert served.pool.call().add() == 1
    for _ in range(5):
        with pytest.raises(ValueError, match="nothing fatal"):
            served.pool.call().complain()
        with pytest.raises(BrokenError):
            served.pool.call().fail("can be repaired")
    assert served.pool.call().add() == 2
    assert served.journal.lines.count("made") == 1
    served.server.shutdown()


def test_calls_that_wait_run_on_the_next_instance(shared: Env) -> None:
    served = Served(shared, "waiting")
    assert served.pool.call().add() == 1
    failing = served.pool.submit().wait_and_fail()
    served.gate.is_entered()
    waiting = [served.pool.submit().add() for _ in range(3)]
    served.gate.opened.set()
    with pytest.raises(BrokenError, match="after a while"):
        failing.result(TIMEOUT_S)
    assert [future.result(TIMEOUT_S) for future in waiting] == [1, 2, 3]
    served.server.shutdown()


def test_two_failures_of_one_instance_are_one(shared: Env) -> None:
    served = Served(shared, "two", FragileSideBySide)
    failing = [served.pool.submit().wait_and_fail() for _ in range(3)]
    for _ in failing:
        served.gate.is_entered()
    served.gate.opened.set()
    for future in failing:
        assert isinstance(future.exception(TIMEOUT_S), BrokenError)
    assert served.pool.call().add() == 1
    assert served.journal.lines.count("made") == 2
    served.server.shutdown()


def test_one_that_fails_too_often_is_given_up_and_tells_why(shared: Env) -> None:
    served = Served(shared, "given-up")
    ended: list[Exception] = []

    def serve() -> None:
        try:
            served.server.serve()
        except ActorGivenUpError as error:
            ended.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    for number in range(2):
        with pytest.raises(BrokenError):
            served.pool.call().fail(f"bang {number}")
    failing = served.pool.submit().wait_and_fail()
    served.gate.is_entered()
    waiting = served.pool.submit().add()
    served.pool.portal.run(served.flush)
    served.gate.opened.set()
    with pytest.raises(BrokenError):
        failing.result(TIMEOUT_S)
    why = r"given-up was given up: it failed after 2 restarts within 60 s: .*BrokenError: after a while"
    with pytest.raises(ActorDiedError, match=why):
        waiting.result(TIMEOUT_S)
    serving.join(TIMEOUT_S)
    assert "was given up" in str(ended[0])
    assert served.pool.size == 0
    assert "stopped" not in served.journal.lines


def test_without_a_factory_the_first_failure_is_the_last(shared: Env) -> None:
    served = Served(shared, "no-factory", restartable=False)
    with pytest.raises(BrokenError):
        served.pool.call().fail("bang")
    with pytest.raises(ActorGivenUpError, match=r"given no factory to make it anew: .*bang"):
        served.server.serve()


def test_without_restarts_the_first_failure_is_the_last_too(shared: Env) -> None:
    class Plain:
        def fail(self) -> None:
            raise ActorFailedError("bang")

    server = ActorServer(shared.cluster())
    server.register("plain", Plain(), factory=Plain)
    server.serve_background()
    with pytest.raises(ActorFailedError):
        shared.pool("plain").call().fail()
    with pytest.raises(ActorGivenUpError, match=r"its max_restarts is 0: .*bang"):
        server.serve()


def test_a_constructor_that_fails_the_second_time_gives_the_actor_up(shared: Env) -> None:
    journal = Journal()

    @actor(max_restarts=5)
    class Once:
        def __init__(self) -> None:
            journal.add("made")
            if journal.lines.count("made") > 1:
                raise ValueError("only once")

        def fail(self) -> None:
            raise ActorFailedError("bang")

    server = ActorServer(shared.cluster())
    server.register("once", Once(), factory=Once)
    server.serve_background()
    with pytest.raises(ActorFailedError):
        shared.pool("once").call().fail()
    with pytest.raises(ActorGivenUpError, match="could not be made anew: ValueError: only once"):
        server.serve()


def test_who_serves_sees_a_sigterm_also_just_before_it_waits_for_it(shared: Env) -> None:
    server = ActorServer(shared.cluster())
    server.register("served-until-sigterm", Gate())
    pool: ActorPool[Any] = ActorPool(shared.cluster(), "served-until-sigterm")
    with missed_signal(signal.SIGTERM, ready=lambda: pool.wait_for_size(1, timeout=TIMEOUT_S)):
        server.serve()
    pool.wait_for_size(0, timeout=TIMEOUT_S)


def test_what_on_start_raises_is_raised_where_it_is_served(shared: Env) -> None:
    class Unwilling(Gate):
        def on_start(self) -> None:
            raise BrokenError("not today")

    server = ActorServer(shared.cluster())
    server.register("unwilling", Unwilling())
    with pytest.raises(BrokenError, match="not today"):
        server.serve_background()
    server.shutdown()


def test_a_timer_that_fails_has_the_actor_made_anew_and_goes_on_with_the_next(shared: Env) -> None:
    journal = Journal()

    @actor(max_restarts=1)
    class Ticking:
        def __init__(self) -> None:
            journal.add("made")
            self.number = journal.lines.count("made")

        @every(0.01)
        def tick(self) -> None:
            journal.add(f"tick of {self.number}")
            if self.number == 1:
                raise ActorFailedError("bang")

    server = ActorServer(shared.cluster())
    server.register("ticking", Ticking(), factory=Ticking)
    server.serve_background()
    journal.wait_for("tick of 2")
    server.shutdown()
    assert journal.lines[:4] == ["made", "tick of 1", "made", "tick of 2"]


def test_hooks_that_fail_end_nothing_else(shared: Env, caplog: pytest.LogCaptureFixture) -> None:
    class Careless(Fragile):
        def on_stop(self) -> None:
            raise BrokenError("stop")

        def on_failure(self, error: Exception) -> bool:
            raise BrokenError("failure")

    served = Served(shared, "careless", Careless)
    with pytest.raises(BrokenError):
        served.pool.call().fail("bang")
    assert served.pool.call().add() == 1
    served.server.shutdown()
    assert "on_failure of careless failed" in caplog.text
    assert "on_stop of careless failed" in caplog.text


def test_a_shutdown_does_not_wait_for_ever_for_on_stop(shared: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluster.actors.server.host.HOOK_TIMEOUT_S", 0.05)
    gate = Gate()

    class Slow(Fragile):
        def on_stop(self) -> None:
            gate.wait()

    served = Served(shared, "slow-stop", Slow)
    began = time.monotonic()
    served.server.shutdown()
    assert time.monotonic() - began < TIMEOUT_S / 2, "the hook itself waits for as long as TIMEOUT_S"
    gate.opened.set()


@pytest.mark.parametrize("is_async", [False, True])
def test_an_on_failure_that_hangs_is_not_waited_for_for_ever(
    shared: Env,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_async: bool,
) -> None:
    monkeypatch.setattr("fluster.actors.server.supervision.HOOK_TIMEOUT_S", 0.05)
    gate = Gate()

    class Hangs(Fragile):
        def on_failure(self, error: Exception) -> Any:
            return asyncio.to_thread(gate.wait) if is_async else gate.wait()

    served = Served(shared, f"hanging-{is_async}", Hangs)
    served.pool.call().add()
    with pytest.raises(BrokenError):
        served.pool.call().fail("bang")
    assert served.pool.call(timeout=TIMEOUT_S).add() == 1  # on the next instance
    assert f"on_failure of hanging-{is_async} was still busy after 0.05 s" in caplog.text
    gate.opened.set()


def test_the_budget_of_restarts() -> None:
    budget = RestartBudget(2, 60.0)
    assert [budget.spend(now) for now in (0.0, 10.0, 20.0, 60.0, 61.0, 69.0, 71.0)] == [
        True,
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert not RestartBudget(0, 60.0).spend(0.0)


def test_mistakes_are_told() -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"max_restarts": -1}, ValueError, "max_restarts=-1"),
        ({"restart_window": 0}, ValueError, "restart_window=0"),
        ({"restart_window": "60"}, TypeError, "number of seconds"),
        ({"fatal_exceptions": BrokenError}, TypeError, "give a tuple"),
    ]
    for options, kind, text in wrong:
        with pytest.raises(kind, match=text):
            actor(**options)
