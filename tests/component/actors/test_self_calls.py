"""Actors that call themselves: an error at once where they would wait for ever, and answers where they would not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fluster.actors import actor, method
from fluster.actors.protocol.members import LANES_VARIABLE
from fluster.errors import ActorDeadlockError, ActorTimeoutError
from tests.component.actor_env import TIMEOUT_S, Env, MemoryEnv

Either = Env | MemoryEnv


@actor(concurrency_groups={"beside": 1})
class Selfish:
    pool: Any  # its own, which the test puts there

    def one(self) -> int:
        return 1

    @method(timeout=0.2)
    def limited(self) -> int:
        return 2

    @method(concurrency_group="beside")
    def beside(self) -> int:
        return 3

    def ask(self, use: Callable[[Any], Any]) -> Any:
        return use(self.pool)

    @method(concurrency_group="beside")
    def ask_beside(self, use: Callable[[Any], Any]) -> Any:
        return use(self.pool)

    async def ask_later(self, use: Callable[[Any], Any]) -> Any:
        return use(self.pool)


@actor(max_concurrency=2)
class Broad(Selfish):
    pass


def served(env: Either, name: str, instance: Selfish) -> Any:
    env.serve(name, instance)
    instance.pool = env.pool(name)
    return env.pool(name)


CALLS: dict[str, Callable[[Any], Any]] = {
    "call": lambda pool: pool.call().one(),
    "key": lambda pool: pool.on("key").call().one(),
    "member": lambda pool: pool.to(pool.members()[0]).call().one(),
}


@pytest.mark.parametrize("use", CALLS.values(), ids=CALLS)
def test_an_actor_that_would_wait_for_itself_is_told(either: Either, use: Callable[[Any], Any]) -> None:
    pool = served(either, f"selfish-{[*CALLS.values()].index(use)}", Selfish())
    with pytest.raises(
        ActorDeadlockError, match=r"selfish-\d\.one was called by the actor itself, .*write self\.one\("
    ):
        pool.submit().ask(use).result(TIMEOUT_S)
    assert pool.call().one() == 1


def test_also_without_lanes(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LANES_VARIABLE, "off")
    env = Env(tmp_path_factory.mktemp("store"))
    pool = served(env, "selfish", Selfish())
    with pytest.raises(ActorDeadlockError):
        pool.submit().ask(CALLS["call"]).result(TIMEOUT_S)
    env.close()


def test_calls_that_can_be_answered_are(either: Either) -> None:
    pool = served(either, "sociable", Selfish())
    assert pool.submit().ask(lambda own: own.call().beside()).result(TIMEOUT_S) == 3
    assert pool.submit().ask_beside(lambda own: own.call().one()).result(TIMEOUT_S) == 1
    assert pool.submit().ask(lambda own: type(own.submit().one()).__name__).result(TIMEOUT_S) == "ActorFuture"
    broad = served(either, "broad", Broad())
    assert broad.submit().ask(CALLS["call"]).result(TIMEOUT_S) == 1


def test_who_gave_a_timeout_gets_it(shared: Env) -> None:
    pool = served(shared, "patient", Selfish())
    for use in (lambda own: own.call(timeout=0.2).one(), lambda own: own.call().limited()):
        with pytest.raises(ActorTimeoutError):
            pool.submit().ask(use).result(TIMEOUT_S)


def test_others_of_the_pool_are_asked(shared: Env) -> None:
    first, second = Selfish(), Selfish()
    shared.serve("two", first, second)
    first.pool = second.pool = shared.pool("two", size=2)
    members = shared.pool("two", size=2).members()
    pool = shared.pool("two", size=2)
    other = members[1].endpoint_id
    assert pool.to(members[0]).submit().ask(lambda own: own.to(other).call().one()).result(TIMEOUT_S) == 1
