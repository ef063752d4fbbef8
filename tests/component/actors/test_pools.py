"""Pools over a real server: who gets which call, maps, broadcasts that fail in part, and handles that travel."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fluster.actors import ActorHandle, ActorPool, AsyncActorHandle, AsyncActorPool, Member, MemberState
from fluster.actors.client.broadcast import AsyncBroadcastResult, BroadcastAnswers, BroadcastResult
from fluster.actors.protocol.calls import Call
from fluster.cluster import AsyncCluster
from fluster.errors import ActorNotFoundError, ActorTimeoutError, NotRunError
from fluster.testing import LocalActors
from fluster_bus.core.roles import Role
from fluster_bus.messages import EndpointId
from tests.component.actor_env import TIMEOUT_S, Env


class Number:
    def __init__(self, number: int) -> None:
        self.number = number
        self.gate = threading.Event()
        self.running = threading.Semaphore(0)

    def mine(self, *_args: Any) -> int:
        return self.number

    def times(self, factor: int, plus: int = 0) -> int:
        if factor == 13:
            raise ValueError(factor)
        return self.number * factor + plus

    def wait(self, number: int) -> int:
        """As `mine`, once the test lets that member go on."""
        if number == self.number:
            self.running.release()
            assert self.gate.wait(TIMEOUT_S)
        return self.number

    def use(self, target: Any) -> Any:
        return target.call().mine()

    def use_methods(self, methods: Any) -> Any:
        return methods.mine()

    async def use_later(self, pool: AsyncActorPool[Any]) -> tuple[int, int]:
        members = await pool.members()
        return await pool.to(members[1]).call().mine(), len(members)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    env = Env(tmp_path_factory.mktemp("store"))
    yield env
    env.close()


@pytest.fixture
def address(shared: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `current_cluster()` finds."""
    cluster = shared.cluster()
    monkeypatch.setattr("fluster.cluster.current_cluster", lambda: cluster)


def numbers(env: Env, name: str, count: int) -> tuple[list[Number], ActorPool[Any]]:
    """Members that joined in order."""
    members = [Number(number) for number in range(count)]
    cluster = env.cluster()
    for place, member in enumerate(members):
        env.serve(name, member, cluster=cluster)
        env.pool(name, size=place + 1)
    return members, env.pool(name, size=count)


# ---- who gets a call ------------------------------------------------------------------------------------


def test_the_one_with_least_to_do_gets_the_call(shared: Env) -> None:
    members, _ = numbers(shared, "least", 3)
    pool: ActorPool[Any] = ActorPool(shared.cluster(), "least", policy="least")
    pool.wait_for_size(3, timeout=TIMEOUT_S)
    held = [pool.submit().wait(number) for number in range(3)]  # 0 takes 0, and so on
    for member in members:
        assert member.running.acquire(timeout=TIMEOUT_S)
    members[1].gate.set()
    assert held[1].result(TIMEOUT_S) == 1
    assert [pool.call(timeout=TIMEOUT_S).mine() for _ in range(5)] == [1] * 5
    for member in members:
        member.gate.set()
    assert [each.result(TIMEOUT_S) for each in held] == [0, 1, 2]


def test_a_pool_is_known_before_its_calls_while_another_thread_calls(shared: Env) -> None:
    numbers(shared, "new", 1)
    numbers(shared, "other", 1)
    cluster = shared.cluster()
    other: ActorPool[Any] = ActorPool(cluster, "other")
    other.wait_for_size(1, timeout=TIMEOUT_S)
    loop = cluster.portal.loop
    busy, called = threading.Event(), threading.Event()

    def keep_busy() -> None:
        busy.set()
        assert called.wait(TIMEOUT_S)

    async def call_behind() -> Any:
        """A call for which the loop will look in this very turn, after it was kept busy."""
        loop.call_soon(keep_busy)
        return other.asynchronous.submit().mine()

    begun = asyncio.run_coroutine_threadsafe(call_behind(), loop)
    assert busy.wait(TIMEOUT_S)
    pool: ActorPool[Any] = ActorPool(cluster, "new")
    first = pool.submit().mine()
    called.set()
    assert first.result(TIMEOUT_S) == 0
    assert begun.result(TIMEOUT_S).result(TIMEOUT_S) == 0


def test_policies_by_name_and_of_one_s_own(shared: Env) -> None:
    class Newest:
        def choose(self, members: Any, out: Any) -> Any:
            return members[-1]

    _, default = numbers(shared, "policies", 3)
    cluster = shared.cluster()
    assert {default.call().mine() for _ in range(3)} == {0, 1, 2}
    pool: ActorPool[Any] = ActorPool(cluster, "policies", policy=Newest())
    assert [pool.call().mine() for _ in range(4)] == [2] * 4
    at_random: ActorPool[Any] = ActorPool(cluster, "policies", policy="random")
    assert {at_random.call().mine() for _ in range(100)} == {0, 1, 2}
    with pytest.raises(ValueError, match="policy='rand'"):
        ActorPool(cluster, "policies", policy="rand")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("me", (TypeError, "chose 'me': return one of the members")),
        (None, (TypeError, "chose None")),
        (ZeroDivisionError("by the policy"), (ZeroDivisionError, "by the policy")),
    ],
)
def test_a_policy_that_fails_fails_its_call_and_no_other(chosen: Any, expected: tuple[type[Exception], str]) -> None:
    class Wrong:
        def choose(self, members: Any, out: Any) -> Any:
            if isinstance(chosen, Exception):
                raise chosen
            return chosen

    with LocalActors() as actors:
        good = actors.deploy(Number, 7, name="wrong")
        pool: ActorPool[Any] = ActorPool(actors.cluster, "wrong", policy=Wrong())
        for _ in range(2):
            with pytest.raises(expected[0], match=expected[1]):
                pool.submit().mine().result(TIMEOUT_S)
        assert pool.broadcast().mine().results(TIMEOUT_S) == [7]
        assert good.call(timeout=TIMEOUT_S).mine() == 7


def test_a_key_keeps_its_member_while_that_lives(shared: Env) -> None:
    cluster = shared.cluster()
    servers = [shared.serve("keyed", Number(number), cluster=cluster) for number in range(4)]
    pool, other = shared.pool("keyed", size=4), shared.pool("keyed", size=4)
    owners = {key: pool.on(key).call().mine() for key in range(60)}
    assert {key: other.on(key).submit().mine().result(TIMEOUT_S) for key in range(60)} == owners
    assert set(owners.values()) == {0, 1, 2, 3}
    servers[2].shutdown()
    for key, owner in owners.items():
        assert (pool.on(key).call().mine() == owner) == (owner != 2)


def test_one_member_is_called(shared: Env) -> None:
    _, pool = numbers(shared, "one", 3)
    found = pool.members()
    assert [pool.to(each).call().mine() for each in found] == [0, 1, 2]
    assert pool.to(str(found[1].endpoint_id)).submit().mine().result(TIMEOUT_S) == 1
    with pytest.raises(NotRunError, match="gone"):
        pool.to("gone").call().mine()
    with pytest.raises(ValueError, match="is a member of 'one'"):
        ActorPool[Any](shared.cluster(), "another").to(found[0])
    with pytest.raises(NotRunError, match="task 0 of 'one' is dead"):
        pool.to(replace(found[0], endpoint_id=EndpointId(""), state=MemberState.DEAD))
    with pytest.raises(TypeError, match=r"one of pool\.members"):
        pool.to(0)  # type: ignore[arg-type]


# ---- maps -----------------------------------------------------------------------------------------------


def test_a_method_is_mapped_over_items(shared: Env) -> None:
    shared.serve("mapped", Number(2), Number(2))
    pool = shared.pool("mapped", size=2)
    assert list(pool.map().times(range(20, 520), plus=1)) == [each * 2 + 1 for each in range(20, 520)]
    assert list(pool.map(max_out=3).times([1, 2, 3], [10, 20])) == [12, 24]
    assert sorted(pool.map_unordered(max_out=7).times(range(100, 200))) == list(range(200, 400, 2))
    results = pool.map().times([12, 13, 14])
    assert next(results) == 24
    with pytest.raises(ValueError, match="13"):
        next(results)
    assert list(results) == [28]
    with pytest.raises(ValueError, match="max_out=0"):
        pool.map(max_out=0)
    with pytest.raises(TypeError, match=r"map\(\)\.times\(items\)"):
        pool.map().times()
    with pytest.raises(TypeError, match="5 has no items"):
        pool.map().times(5)
    for ask in ("results", "answers", "futures"):
        with pytest.raises(TypeError, match="timeout='x': give seconds as a number"):
            getattr(pool.broadcast().mine(), ask)("x")


def test_no_more_calls_are_out_than_was_said(shared: Env) -> None:
    shared.serve("bounded", Number(1))
    pool = shared.pool("bounded")
    for kind in (pool.map, pool.map_unordered):
        items = itertools.count(100)
        results = kind(max_out=5).times(items)
        assert len(list(itertools.islice(results, 20))) == 20
        assert next(items) in (124, 125)  # 24 were taken, or one more that was not called for
        results.close()
        assert list(results) == []


# ---- broadcasts -----------------------------------------------------------------------------------------


def test_a_broadcast_that_fails_in_part_says_where(shared: Env) -> None:
    members, pool = numbers(shared, "partial", 3)
    result = pool.broadcast().wait(1)
    assert members[1].running.acquire(timeout=TIMEOUT_S)
    assert [future.result(TIMEOUT_S) for future in result.futures(TIMEOUT_S)[::2]] == [0, 2]
    answers = result.answers(0.2)
    assert [each.member for each in answers] == pool.members()
    assert [each.value for each in answers] == [0, None, 2]
    assert [each.is_ok for each in answers] == [True, False, True]
    with pytest.raises(ActorTimeoutError, match=f"{pool.members()[1].endpoint_id} has not answered"):
        answers[1].result()
    early = [each.value for each in result.as_completed(0.2)]
    assert (sorted(early[:2]), early[2]) == ([0, 2], None)
    members[1].gate.set()
    assert sorted(each.result() for each in result.as_completed(TIMEOUT_S)) == [0, 1, 2]
    failed = pool.broadcast().times(13).answers(TIMEOUT_S)
    assert [type(each.error) for each in failed] == [ValueError] * 3
    with pytest.raises(ActorNotFoundError):
        ActorPool[Any](shared.cluster(), "nobody").broadcast().mine().answers(TIMEOUT_S)


def test_one_deadline_is_for_all_members(shared: Env) -> None:
    members, pool = numbers(shared, "deadline", 2)
    late = pool.broadcast(timeout=2.0).wait(0)
    assert members[0].running.acquire(timeout=TIMEOUT_S)
    answers = late.answers(TIMEOUT_S)
    assert isinstance(answers[0].error, ActorTimeoutError)
    assert answers[1].value == 1
    members[0].gate.set()


def test_a_broadcast_whose_members_are_not_known_yet_runs_out_of_time(shared: Env) -> None:
    result: BroadcastResult[Any] = BroadcastResult(BroadcastAnswers("pool.all", shared.portal.loop))
    for ask in (result.results, result.answers, result.futures, lambda timeout: list(result.as_completed(timeout))):
        with pytest.raises(ActorTimeoutError, match=r"after 0\.01 s"):
            ask(0.01)


@pytest.mark.anyio
async def test_who_gives_up_waiting_takes_nothing_back() -> None:
    answers: BroadcastAnswers[Any] = BroadcastAnswers("pool.all", asyncio.get_running_loop())
    result = AsyncBroadcastResult(answers)
    with pytest.raises(ActorTimeoutError, match=r"after 0\.01 s"):
        await result.results(0.01)
    answers.open([Member.at("pool", "to.a")], lambda ticket: Call("pool", "all", b"", ticket, begun=True))
    (future,) = answers.futures()
    with pytest.raises(ActorTimeoutError):
        await result.results(0.01)
    future.set_result(3)
    assert await result.results(TIMEOUT_S) == [3]
    assert [each.value async for each in result.as_completed()] == [3]


@pytest.mark.anyio
async def test_the_awaited_pool_has_it_all(shared: Env) -> None:
    members, _ = await asyncio.to_thread(numbers, shared, "awaited-pool", 3)
    async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: AsyncActorPool[Any] = AsyncActorPool(cluster, "awaited-pool", policy="random")
        await pool.wait_for_size(3, timeout=TIMEOUT_S)
        assert [each async for each in pool.map().mine(range(2))] != []
        assert max([each async for each in pool.map_unordered(max_out=2).mine(range(6))]) <= 2
        assert await pool.on("key").call().mine() == await pool.on("key").submit().mine()
        assert [await pool.to(each).call().mine() for each in await pool.members()] == [0, 1, 2]
        result = pool.broadcast().wait(1)
        prompt = (await result.futures(TIMEOUT_S))[::2]
        assert [await asyncio.wrap_future(future) for future in prompt] == [0, 2]
        answers = await result.answers(0.2)
        assert [each.value for each in answers] == [0, None, 2]
        late = [each.value async for each in pool.broadcast(timeout=2.0).mine().as_completed(TIMEOUT_S)]
        assert sorted(late, key=str) == [0, 2, None]
        members[1].gate.set()


@pytest.mark.anyio
async def test_whoever_waits_for_members_is_told_when_the_pool_is_shut_down(shared: Env) -> None:
    async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: AsyncActorPool[Any] = AsyncActorPool(cluster, "given-up")
        await pool.wait_for_size(0)
        waiting = asyncio.create_task(pool.wait_for_size(1, timeout=TIMEOUT_S))
        await pool.shutdown()
        with pytest.raises(ActorNotFoundError, match="the pool 'given-up' was shut down"):
            await waiting


# ---- handles that travel --------------------------------------------------------------------------------


def test_handles_find_their_target_by_name(shared: Env, address: None) -> None:
    _, pool = numbers(shared, "travelling", 3)
    _, other = numbers(shared, "traveller", 1)
    found = pool.members()
    handles: list[tuple[Any, set[int]]] = [
        (pool.to(found[1]), {1}),
        (pool.on("key"), {pool.on("key").call().mine()}),
        (ActorPool[Any](shared.cluster(), "travelling", policy="random"), {0, 1, 2}),
        (ActorPool[Any](shared.cluster(), "travelling", fixed=(found[2],)), {2}),
    ]
    for target, expected in handles:
        there = pickle.loads(pickle.dumps(target))
        assert {there.call().mine() for _ in range(100 if len(expected) > 1 else 3)} == expected, target
        assert repr(there) == repr(target)
        assert other.call().use(target) in expected  # from another actor
        assert other.call().use_methods(target.call()) in expected


def test_threads_share_a_handle(shared: Env) -> None:
    _, pool = numbers(shared, "threads", 2)
    one = pool.to(pool.members()[1])
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(one.call().mine())) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 10
    assert isinstance(one, ActorHandle)


@pytest.mark.anyio
async def test_an_awaited_pool_travels_and_is_awaited_on_any_loop(shared: Env, address: None) -> None:
    await asyncio.to_thread(numbers, shared, "any-loop", 2)
    async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: AsyncActorPool[Any] = AsyncActorPool(cluster, "any-loop")
        assert (await pool.to((await pool.members())[0]).call().use_later(pool)) == (1, 2)
        there = pickle.loads(pickle.dumps(pool))  # lives on another loop than this test
        await there.wait_for_size(2, timeout=TIMEOUT_S)
        assert await there.broadcast().mine().results(TIMEOUT_S) == [0, 1]
        handle = pickle.loads(pickle.dumps(pool.to((await pool.members())[1])))
        assert await handle.call().mine() == 1
        assert isinstance(handle, AsyncActorHandle)
        with pytest.raises(ActorTimeoutError):
            await there.wait_for_size(3, timeout=0.01)
