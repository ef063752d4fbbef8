"""Actors that take JSON only: called like any other, and nothing is unpickled at either end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from fluster.actors import ActorContext, ActorPool, FixedResolver, actor, method
from fluster.errors import (
    ActorDiedError,
    ActorTimeoutError,
    InvalidArgumentsError,
    MailboxFullError,
    RemoteError,
)
from fluster_bus.connection.bus import Bus
from fluster_bus.core import codec, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.core.roles import Role
from fluster_bus.storage.registry import Registry, new_endpoint_id
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Env, Gate
from tests.component.actors.test_actors import plain

exploded: list[str] = []


class Bomb:
    """Tells when it is unpickled."""

    def __reduce__(self) -> Any:
        return exploded.append, ("unpickled",)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    env = Env(tmp_path_factory.mktemp("store"))
    yield env
    env.close()


class Point(BaseModel):
    x: int
    y: int = 0


class CustomError(Exception):
    pass


@actor(codec="json")
class Shapes:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def move(self, point: Point, *, by: int = 1) -> Point:
        return Point(x=point.x + by, y=point.y + by)

    async def later(self, numbers: tuple[int, ...]) -> int:
        await asyncio.sleep(0)
        return sum(numbers)

    def note(self, number: int) -> None:
        self.seen.append(number)

    def notes(self) -> list[int]:
        return self.seen

    def left_s(self, ctx: ActorContext) -> bool:
        return ctx.deadline is not None

    def fail(self, kind: str) -> None:
        raise {"value": ValueError("bad"), "stop": StopIteration("stop"), "custom": CustomError("mine")}[kind]

    def odd(self) -> object:
        return object()


@actor(codec="json", mailbox_calls=2)
class JsonGate(Gate):
    pass


def test_calls_of_fluster_travel_as_json(shared: Env) -> None:
    shared.serve("shapes", Shapes())
    pool = shared.pool("shapes")
    assert pool.members()[0].codec == "json"
    assert pool.call().move(Point(x=2), by=3) == {"x": 5, "y": 3}
    assert pool.call().move({"x": "2"}) == {"x": 3, "y": 1}
    assert pool.call().later([1, 2, 3]) == 6
    assert [future.result(TIMEOUT_S) for future in [pool.submit().later([1, n]) for n in range(100)]] == [
        1 + n for n in range(100)
    ]
    assert pool.call().left_s() is False
    assert pool.call(timeout=TIMEOUT_S).left_s() is True


def test_errors_of_python_and_fluster_arrive_as_themselves_others_as_text(shared: Env) -> None:
    shared.serve("json-errors", Shapes())
    pool = shared.pool("json-errors")
    with pytest.raises(ValueError, match=r"^bad\n") as caught:
        pool.call().fail("value")
    assert "in fail" in caught.value.__notes__[0]
    for kind, message in (("custom", r"CustomError: mine"), ("stop", "StopIteration: stop")):
        with pytest.raises(RemoteError, match=message):
            pool.call().fail(kind)
    with pytest.raises(InvalidArgumentsError, match=r"point\.x: Field required"):
        pool.call().move({})
    with pytest.raises(TypeError, match="the arguments have no JSON form"):
        pool.call().move(object())
    with pytest.raises(TypeError, match="the result has no JSON form"):
        pool.call().odd()
    assert pool.call().later([]) == 0


def test_broadcasts_and_order(shared: Env) -> None:
    shared.serve("json-all", Shapes(), Shapes())
    pool = shared.pool("json-all", size=2)
    for number in range(50):
        (pool.broadcast() if number % 5 == 0 else pool.submit()).note(number)
    seen = pool.broadcast().notes().results(TIMEOUT_S)
    assert [each for each in seen[0] if each % 5 == 0] == [each for each in seen[1] if each % 5 == 0]
    assert all(each == sorted(each) for each in seen)
    assert {*seen[0]} | {*seen[1]} == set(range(50))


def test_a_full_mailbox_and_an_end_are_told(shared: Env) -> None:
    gate = JsonGate()
    server = shared.serve("json-gate", gate)
    pool = shared.pool("json-gate")
    running = pool.submit().wait()
    gate.is_entered()
    waiting = pool.submit().wait()
    with pytest.raises(MailboxFullError):
        pool.call().wait()
    gate.opened.set()
    assert [each.result(TIMEOUT_S) for each in (running, waiting)] == ["went through"] * 2
    server.shutdown()
    with pytest.raises((ActorDiedError, LookupError)):
        pool.call().wait()


def test_what_came_too_late_is_never_run(shared: Env) -> None:
    gate = JsonGate()
    shared.serve("json-late", gate)
    pool = shared.pool("json-late")
    running = pool.submit().wait()
    gate.is_entered()
    with pytest.raises(ActorTimeoutError):
        pool.call(timeout=0.05).wait()
    gate.opened.set()
    assert running.result(TIMEOUT_S) == "went through"
    assert pool.call().wait() == "went through"
    gate.is_entered()
    assert not gate.entered.acquire(blocking=False)


@pytest.mark.anyio
async def test_a_pickle_is_refused_and_not_read(shared: Env) -> None:
    shared.serve("json-only", Shapes())
    member = shared.pool("json-only").members()[0]
    async with plain(shared) as client:
        for subject in (f"{member.address}.move", subjects.actor_any(NAMESPACE, "json-only", "_calls")):
            answer = await client.request(subject, codec.encode([("move", None, codec.encode(Bomb()))]), timeout=60)
            assert "takes JSON only" in json.loads(answer.data)["error"]["message"]
        answer = await client.request(
            f"{member.address}.move", b'[{"x": 1}]', timeout=60, headers={"Fluster-Deadline": "soon"}
        )
        assert "'soon' is no" in json.loads(answer.data)["error"]["message"]
    assert exploded == []


def test_who_does_not_know_that_it_takes_json_only_is_told(shared: Env) -> None:
    shared.serve("json-fixed", Shapes())
    address = shared.pool("json-fixed").members()[0].address
    pool = FixedResolver({"there": address}, shared.cluster()).lookup("there")
    for future in [pool.submit().later([1]) for _ in range(3)]:
        with pytest.raises(InvalidMessageError, match="json-fixed takes JSON only"):
            future.result(TIMEOUT_S)


class Stranger:
    """Speaks for an actor without being one: answers each message with a given text."""

    def __init__(self, env: Env, name: str) -> None:
        self.heard: list[str] = []
        self._env, self._name = env, name
        self._several = threading.Semaphore(0)
        self.bus: Bus = env.portal.run(self._open)

    async def _open(self) -> Bus:
        bus = await Bus.connect(self._env.server.credentials(Role.OPERATOR), name="stranger")
        registry = Registry(bus, NAMESPACE)
        endpoint_id = new_endpoint_id()
        address = subjects.actor_member(NAMESPACE, self._name, endpoint_id)
        await bus.subscribe(subjects.actor_one(NAMESPACE, self._name, endpoint_id), self._on_call)
        metadata = {"fluster:codec": "json"}
        await registry.register(registry.endpoint(self._name, address, endpoint_id=endpoint_id, metadata=metadata))
        await bus.flush()
        return bus

    def _on_call(self, delivery: Delivery) -> None:
        self.heard.append(delivery.reply)
        self._several.release()

    def hears(self) -> str:
        assert self._several.acquire(timeout=TIMEOUT_S)
        return self.heard[-1]

    def says(self, subject: str, data: bytes) -> None:
        self._env.portal.run(self.bus.publish, subject, data)
        self._env.portal.run(self.bus.flush)


@pytest.fixture
def stranger(shared: Env) -> Iterator[Stranger]:
    stranger = Stranger(shared, "stranger")
    yield stranger
    with contextlib.suppress(Exception):
        shared.portal.run(stranger.bus.close)


def test_nothing_that_a_stranger_answers_is_unpickled(shared: Env, stranger: Stranger) -> None:
    gate = Gate()
    shared.serve("friend", gate)
    cluster = shared.cluster()
    friend: ActorPool[Any] = ActorPool(cluster, "friend")
    pool: ActorPool[Any] = ActorPool(cluster, "stranger")
    pool.wait_for_size(1, timeout=TIMEOUT_S)
    waits = friend.submit().wait()
    gate.is_entered()
    call = pool.submit().anything()
    inbox, _, number = stranger.hears().rpartition(".")
    stranger.says(f"{inbox}.{int(number) - 1}", b'{"result": "forged"}')  # for the friend's call
    stranger.says(f"{inbox}.{number}", codec.encode(("x", [(0, True, codec.encode(Bomb()))])))
    with pytest.raises(InvalidMessageError, match="is not a reply"):
        call.result(TIMEOUT_S)
    stranger.says(f"{inbox}.{number}", codec.encode(("x", [(0, True, codec.encode(Bomb()))])))
    gate.opened.set()
    assert waits.result(TIMEOUT_S) == "went through"
    call = pool.submit().anything()
    stranger.says(stranger.hears(), b'{"result": [1]}')
    assert call.result(TIMEOUT_S) == [1]
    assert exploded == []


@actor(codec="json")
class Stubborn:
    def __init__(self) -> None:
        self.tries = 0

    @method(retries=3, retry_exceptions=(ConnectionResetError,))
    def third_time(self) -> int:
        self.tries += 1
        if self.tries < 3:
            raise ConnectionResetError("again")
        return self.tries


def test_retries_and_waiting_for_room_work_as_ever(shared: Env) -> None:
    shared.serve("json-stubborn", Stubborn())
    assert shared.pool("json-stubborn").call().third_time() == 3
    gate = JsonGate()
    shared.serve("json-room", gate)
    pool = shared.pool("json-room")
    futures = [pool.submit(wait=True).wait() for _ in range(6)]
    gate.is_entered()
    gate.opened.set()
    assert [future.result(TIMEOUT_S) for future in futures] == ["went through"] * 6
