"""Actors: what calls mean, in which order they run, and what happens when something ends.

Tests that take `either` are a contract: it holds over a real server, and for the actors in memory of fluster.testing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from fluster.actors import (
    ActorPool,
    ActorServer,
    AsyncActorPool,
    ClusterResolver,
    FixedResolver,
    actor,
    method,
)
from fluster.actors.protocol.members import LEAVING
from fluster.cluster import AsyncCluster, Cluster
from fluster.errors import (
    ActorDiedError,
    ActorNotFoundError,
    ActorTimeoutError,
    ConnectionLostError,
    MailboxFullError,
    RemoteError,
)
from fluster_bus.connection.bus import Bus
from fluster_bus.core import codec, subjects
from fluster_bus.core.errors import ClosedError
from fluster_bus.core.roles import Role
from fluster_bus.direct.line import Line
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Calculator, Env, Gate, MemoryEnv
from tests.insides import caller_of, served_by
from tests.waiting import wait_until

# ---- what a call gives ----------------------------------------------------------------------------------


def test_calls_return_what_methods_return(either: Env | MemoryEnv) -> None:
    either.serve("returns", Calculator())
    pool = either.pool("returns")
    assert pool.call().add(2, b=3) == 5
    assert pool.call().add_later(2, 3) == 5
    assert pool.submit().add(1).result(TIMEOUT_S) == 2
    assert pool.call(timeout=TIMEOUT_S).where("here")[:2] == ("returns", "where")
    deadline = pool.call(timeout=TIMEOUT_S).where("here")[2]
    assert 0 < deadline - time.monotonic() <= TIMEOUT_S
    assert pool.size == 1
    assert [each.name for each in pool.members()] == ["returns"]


def test_remote_exceptions_arrive_as_themselves(either: Env | MemoryEnv) -> None:
    either.serve("raises", Calculator())
    pool = either.pool("raises")
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        pool.call().fail(ZeroDivisionError("mine"))
    assert "in fail" in caught.value.__notes__[0]
    assert "hosted.py" not in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="add"):
        pool.call().add(1, 2, 3)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pool.call().echo(number for number in range(3))
    assert pool.call().add(1) == 2


def test_an_exit_in_user_code_ends_neither_side(either: Env | MemoryEnv) -> None:
    either.serve("exits", Calculator())
    pool = either.pool("exits")
    for error in (SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(RemoteError, match=type(error).__name__):
            pool.call().fail(error)
    assert pool.call().add(1) == 2


def test_wrong_use_says_what_to_do(either: Env | MemoryEnv) -> None:
    either.serve("wrong", Calculator())
    pool = either.pool("wrong")
    with pytest.raises(AttributeError, match="no method 'ad'; did you mean 'add'"):
        pool.call().ad(1)
    with pytest.raises(AttributeError, match="begins with an underscore"):
        pool.call()._hidden()  # noqa: SLF001 - that it is refused is what is tested
    with pytest.raises(AttributeError, match=r"write pool\.call\(\)\.add\(…\)"):
        pool.call.add(1)
    with pytest.raises(AttributeError, match=r"pool\.call\(\)\.add\(…\)"):
        pool.add(1)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pool.call().echo(threading.Lock())
    with pytest.raises(ValueError, match="above 0"):
        pool.call(timeout=0)
    known = ActorPool(either.cluster(), "wrong", actor_class=Calculator)
    with pytest.raises(AttributeError, match="Calculator has no method 'ad'; did you mean 'add'"):
        getattr(known.call(), "ad")  # noqa: B009 - the name alone is enough
    server = ActorServer(either.cluster())
    with pytest.raises(TypeError, match=r"pass an instance, Calculator\(…\)"):
        server.register("wrong", Calculator)
    with pytest.raises(TypeError, match="no method that could be called"):
        server.register("wrong", object())
    server.shutdown()


def test_an_unknown_name_is_told_at_once_with_near_ones(either: Env | MemoryEnv) -> None:
    either.serve("calculator", Calculator())
    either.pool("calculator")
    pool = ClusterResolver(either.cluster()).lookup("calculater")
    asks: list[Callable[[], Any]] = [lambda: pool.call().add(1), lambda: pool.broadcast().add(1).results(TIMEOUT_S)]
    for ask in asks:
        with pytest.raises(ActorNotFoundError, match="did you mean 'calculator'"):
            ask()
    with pytest.raises(ActorTimeoutError, match=r"has 0 of 1 members after 0\.05 s"):
        pool.wait_for_size(1, timeout=0.05)


def test_a_pool_grows_and_shrinks_with_its_members(either: Env | MemoryEnv) -> None:
    first = either.serve("grows", Calculator())
    pool = either.pool("grows")
    waiting = threading.Thread(target=pool.wait_for_size, args=(2, TIMEOUT_S))
    waiting.start()
    either.serve("grows", Calculator())
    waiting.join(TIMEOUT_S)
    assert not waiting.is_alive()
    first.shutdown()
    wait_until(lambda: pool.size == 1)
    assert pool.call().add(1) == 2


def test_members_take_turns(either: Env | MemoryEnv) -> None:
    either.serve("turns", *(Calculator() for _ in range(3)))
    pool = either.pool("turns", size=3)
    for number in range(9):
        pool.call().note(number)
    assert pool.broadcast().notes().results(TIMEOUT_S) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_a_fixed_resolver_goes_by_address(either: Env | MemoryEnv) -> None:
    either.serve("fixed", Calculator())
    address = either.pool("fixed").members()[0].address
    resolver = FixedResolver({"there": address}, either.cluster())
    pool = resolver.lookup("there")
    assert pool.call().add(1) == 2
    assert pool.broadcast().add(2).results(TIMEOUT_S) == [3]
    assert FixedResolver({"there": [address]}, either.cluster()).lookup("there").size == 1
    with pytest.raises(ActorNotFoundError, match="no address was given for 'their'; did you mean 'there'"):
        resolver.lookup("their")


# ---- one at a time, in order ----------------------------------------------------------------------------


def test_calls_of_one_client_run_in_the_order_sent_whatever_their_kind(either: Env | MemoryEnv) -> None:
    either.serve("order", Calculator(), Calculator())
    pool = either.pool("order", size=2)
    members = [each.endpoint_id for each in pool.members()]
    sent: dict[str, list[int]] = {member: [] for member in members}
    futures = []
    for number in range(600):
        if number % 7 == 0:
            pool.broadcast().note(number)
            for member in members:
                sent[member].append(number)
            continue
        member = members[number % 2]
        kind = "note_later" if number % 5 == 0 else "note"
        futures.append(pool.asynchronous.submit_to(member, kind, codec.encode(((number,), {}))))
        sent[member].append(number)
    assert pool.broadcast().notes().results(TIMEOUT_S) == [sent[member] for member in members]


@actor(max_concurrency=3)
class Three(Gate):
    pass


@pytest.mark.parametrize(("kind", "at_once"), [(Gate, 1), (Three, 3)])
def test_no_more_run_at_once_than_the_class_says(
    either: Env | MemoryEnv, kind: Callable[[], Gate], at_once: int
) -> None:
    gate = kind()
    name = f"at-once-{at_once}"
    either.serve(name, gate)
    pool = either.pool(name)
    futures = [pool.submit().wait() for _ in range(at_once + 2)]
    for _ in range(at_once):
        gate.is_entered()
    gate.opened.set()
    assert {future.result(TIMEOUT_S) for future in futures} == {"went through"}
    assert gate.most_at_once == at_once


@actor(max_concurrency=2)
class Meeting:
    """Two calls that need each other."""

    def __init__(self) -> None:
        self.barrier: asyncio.Barrier | None = None

    async def meet(self) -> int:
        self.barrier = self.barrier or asyncio.Barrier(2)
        return await self.barrier.wait()


def test_asynchronous_methods_run_side_by_side_if_the_class_says_so(either: Env | MemoryEnv) -> None:
    either.serve("meeting", Meeting())
    pool = either.pool("meeting")
    futures = [pool.submit().meet() for _ in range(4)]
    assert sorted(future.result(TIMEOUT_S) for future in futures) == [0, 0, 1, 1]


class Threads:
    """Tells on which threads its methods run."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.opened = threading.Event()

    def quick(self, number: int) -> int:
        self.threads.add(threading.get_ident())
        return number

    def long(self) -> str:
        self.threads.add(threading.get_ident())
        assert self.opened.wait(TIMEOUT_S)
        return "long"


def test_all_calls_run_on_one_thread_and_quick_answers_do_not_wait_for_long_calls(shared: Env) -> None:
    actor_ = Threads()
    shared.serve("threads-of-one", actor_)
    pool = shared.pool("threads-of-one")
    for _ in range(3):
        actor_.opened.clear()
        calls = [pool.submit().quick(number) for number in range(3)] + [pool.submit().long()]
        assert [call.result(TIMEOUT_S) for call in calls[:3]] == [0, 1, 2]
        calls += [pool.submit().quick(number) for number in range(200)]
        actor_.opened.set()
        assert [call.result(TIMEOUT_S) for call in calls[3:]] == ["long", *range(200)]
        assert pool.call().quick(7) == 7
    assert len(actor_.threads) == 1


# ---- limits ---------------------------------------------------------------------------------------------


@actor(mailbox_calls=3)
class Narrow(Gate):
    pass


def test_a_full_mailbox_answers_at_once(either: Env | MemoryEnv) -> None:
    gate = Narrow()
    either.serve("narrow", gate)
    pool = either.pool("narrow")
    futures = [pool.submit().wait() for _ in range(5)]
    gate.is_entered()
    with pytest.raises(MailboxFullError, match="narrow has 3 calls waiting"):
        futures[4].result(TIMEOUT_S)
    gate.opened.set()
    assert [future.result(TIMEOUT_S) for future in futures[:3]] == ["went through"] * 3


class Patient(Gate):
    @method(timeout=2)
    def hurried(self) -> str:
        return self.wait()


def test_a_slow_call_times_out_and_one_that_waits_too_long_is_never_run(either: Env | MemoryEnv) -> None:
    gate = Patient()
    either.serve("slow", gate)
    pool = either.pool("slow")
    hurried = pool.submit().hurried()
    gate.is_entered()
    waits = pool.submit(timeout=2).wait()
    either.pass_time(2)
    with pytest.raises(ActorTimeoutError, match=r"slow\.hurried: no answer within 2 s"):
        hurried.result(TIMEOUT_S)  # the timeout that the method declares is known from the registry
    with pytest.raises(TimeoutError, match="it may have run"):
        waits.result(TIMEOUT_S)
    gate.opened.set()
    assert pool.call(timeout=TIMEOUT_S).wait() == "went through"
    entered = 0
    while gate.entered.acquire(blocking=False):
        entered += 1
    assert entered == 1  # the last one: `hurried` was before it


def test_a_broadcast_has_a_timeout_for_all(either: Env | MemoryEnv) -> None:
    gate = Gate()
    either.serve("broadcast", gate, gate)
    pool = either.pool("broadcast", size=2)
    result = pool.broadcast().wait()
    with pytest.raises(ActorTimeoutError, match=r"not all members have answered after 0\.05 s"):
        result.results(0.05)
    gate.opened.set()
    assert result.results(TIMEOUT_S) == ["went through"] * 2
    assert list(result) == ["went through"] * 2


def test_a_broadcast_tells_of_each_member(either: Env | MemoryEnv) -> None:
    class Half(Calculator):
        def fail(self, error: BaseException) -> None:
            return None

    either.serve("half", Half(), Calculator())
    result = either.pool("half", size=2).broadcast().fail(ValueError("one"))
    with pytest.raises(ValueError, match="one"):
        result.results(TIMEOUT_S)
    found = result.results(TIMEOUT_S, return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["NoneType", "ValueError"]
    answers = iter(result)
    kinds = []
    for _ in range(2):
        try:
            kinds.append(type(next(answers)))
        except ValueError as error:
            kinds.append(type(error))
    assert set(kinds) == {type(None), ValueError}


# ---- ends -----------------------------------------------------------------------------------------------


def test_a_graceful_shutdown_finishes_what_has_arrived(either: Env | MemoryEnv) -> None:
    gate = Gate()
    server = either.serve("graceful", gate)
    either.serve("graceful", gate)
    pool = either.pool("graceful", size=2)
    futures = [pool.submit().wait() for _ in range(8)]
    for _ in range(2):
        gate.is_entered()
    ending = threading.Thread(target=server.shutdown)
    ending.start()
    wait_until(lambda: pool.size == 1)
    futures.append(pool.submit().wait())
    gate.opened.set()
    assert {future.result(TIMEOUT_S) for future in futures} == {"went through"}
    ending.join(TIMEOUT_S)
    assert not ending.is_alive()


def test_a_shutdown_that_takes_too_long_tells_who_waits(either: Env | MemoryEnv) -> None:
    gate = Gate()
    server = either.serve("hurry", gate)
    pool = either.pool("hurry")
    running, waiting = pool.submit().wait(), pool.submit().wait()
    gate.is_entered()
    server.shutdown(timeout=0.05)
    with pytest.raises(ActorDiedError, match="was not run"):
        waiting.result(TIMEOUT_S)
    with pytest.raises(ActorDiedError, match="may have run"):
        running.result(TIMEOUT_S)
    gate.opened.set()


def test_calls_of_a_closed_client_end(shared: Env) -> None:
    gate = Gate()
    shared.serve("closed", gate)
    cluster = shared.cluster()
    pool: ActorPool[Any] = ActorPool(cluster, "closed")
    out = pool.submit().wait()
    gate.is_entered()
    cluster.close()
    with pytest.raises(ClosedError):
        out.result(TIMEOUT_S)
    with pytest.raises(ClosedError):
        pool.call().wait()
    gate.opened.set()


def test_a_lost_connection_ends_what_is_out_and_what_comes_after_waits_for_the_next(env: Env) -> None:
    gate = Gate()
    env.serve("survives", gate, Calculator())
    env.serve("also", Calculator(), Calculator())
    pool, also = env.pool("survives", size=2), env.pool("also", size=2)
    out = pool.submit().wait()
    gate.is_entered()
    env.server.stop()
    with pytest.raises(ConnectionLostError, match="may have run"):
        out.result(TIMEOUT_S)
    waits = also.submit().add(1)
    answers = also.broadcast().add(2)
    gate.opened.set()
    env.server.start()
    assert waits.result(TIMEOUT_S) == 2
    assert answers.results(TIMEOUT_S) == [3, 3]
    assert [also.call().add(number) for number in range(20)] == list(range(1, 21))
    assert also.size == 2


def is_cut_off(pool: ActorPool[Any]) -> bool:
    """True once the client has noticed that its connections are lost."""
    caller = caller_of(pool)
    return not caller.bus.connected and (caller.carried.lane is None or not caller.carried.lane.connected)


def test_while_the_connection_is_lost_a_call_waits_no_longer_than_its_deadline(env: Env) -> None:
    env.serve("deadline", Calculator())
    pool = env.pool("deadline")
    env.server.stop()
    wait_until(lambda: is_cut_off(pool))  # what is sent before that is noticed is lost at once
    with pytest.raises(ActorTimeoutError):
        pool.call(timeout=0.1).note("late")
    cancelled = pool.submit().note("cancelled")
    assert cancelled.cancel()
    env.server.start()
    assert pool.call(timeout=TIMEOUT_S).notes() == []


@pytest.mark.parametrize("ask", ["results", "answers", "futures", "as_completed"])
def test_while_the_connection_is_lost_a_broadcast_waits_no_longer_than_its_deadline(env: Env, ask: str) -> None:
    env.serve("all-late", Calculator(), Calculator())
    pool = env.pool("all-late", size=2)
    env.server.stop()
    wait_until(lambda: is_cut_off(pool))
    late = pool.broadcast(timeout=0.1).note("late")
    with pytest.raises(ActorTimeoutError, match="was not run"):
        list(getattr(late, ask)())
    with pytest.raises(ActorTimeoutError, match="was not run"):
        list(pool.broadcast(timeout=0.1).note("late"))
    env.server.start()
    assert pool.broadcast(timeout=TIMEOUT_S).notes().results() == [[], []]


def test_a_call_to_an_actor_that_lost_its_connection_does_not_hang(env: Env) -> None:
    gate, proxy = Gate(), env.proxy()
    address = replace(env.server.credentials(Role.OPERATOR), url=f"nats://127.0.0.1:{proxy.port}")
    with Cluster(address) as cut_off:
        env.serve("cut", gate, cluster=cut_off)
        pool = env.pool("cut")
        out = pool.submit().wait()
        gate.is_entered()
        env.portal.run(proxy.cut)
        with pytest.raises(ConnectionLostError, match="the actor lost its connection"):
            out.result(TIMEOUT_S)
        gate.opened.set()
        assert pool.call(timeout=TIMEOUT_S).wait() == "went through"
        assert pool.size == 1


def test_who_hears_that_an_actor_lost_its_connection_finds_it_back(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, proxy, may_dial = Gate(), env.proxy(), threading.Event()
    address = replace(env.server.credentials(Role.OPERATOR), url=f"nats://127.0.0.1:{proxy.port}")
    with Cluster(address) as cut_off:
        env.serve("back", gate, cluster=cut_off)
        pool = env.pool("back")
        out = pool.submit(timeout=TIMEOUT_S).wait()
        gate.is_entered()
        again: list[Any] = []
        out.add_done_callback(lambda _out: again.append(pool.submit(timeout=TIMEOUT_S).wait()))
        dial, reconnected = Line.dial, threading.Event()

        def dial_late(*args: Any, **kwargs: Any) -> Line:
            assert may_dial.wait(TIMEOUT_S)
            return dial(*args, **kwargs)

        monkeypatch.setattr(Line, "dial", dial_late)  # the actor's lane is back after its process's other connection
        cut_off.asynchronous.bus.on_reconnect(reconnected.set)
        env.portal.run(proxy.cut)
        assert reconnected.wait(TIMEOUT_S)
        # All that its process has told of it by now reaches the pool before this, of one that is not called.
        nowhere = f"fluster.{cut_off.namespace}.actors.nowhere"
        other = cut_off.asynchronous.new_endpoint("back", nowhere, metadata={LEAVING: "yes"})
        cut_off.portal.run(cut_off.asynchronous.registry.register, other)
        wait_until(lambda: len(pool.members()) == 2)
        may_dial.set()
        with pytest.raises(ConnectionLostError, match="the actor lost its connection"):
            out.result(TIMEOUT_S)
        gate.opened.set()
        assert wait_until(lambda: again)[0].result(TIMEOUT_S) == "went through"


def test_a_broadcast_that_an_actor_missed_while_it_was_cut_off_ends(env: Env) -> None:
    here, away, proxy = Gate(), Gate(), env.proxy()
    address = replace(env.server.credentials(Role.OPERATOR), url=f"nats://127.0.0.1:{proxy.port}")
    here.opened.set()
    with Cluster(address) as cut_off:
        env.serve("missed", here)
        server = env.serve("missed", away, cluster=cut_off)
        lane = served_by(server)[0].lane
        pool = env.pool("missed", size=2)
        env.portal.run(proxy.hold)
        env.portal.run(proxy.cut)
        wait_until(lambda: not (cut_off.asynchronous.bus.connected or (lane is not None and lane.connected)))
        answers = pool.broadcast().wait()
        here.is_entered()
        env.portal.run(proxy.release)
        errors = {type(each.error) for each in answers.answers(TIMEOUT_S)}
        assert errors == {type(None), ConnectionLostError}


# ---- awaited --------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_awaited_pool_does_the_same(shared: Env) -> None:
    shared.serve("awaited", Calculator(), Calculator())
    async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: AsyncActorPool[Any] = AsyncActorPool(cluster, "awaited")
        await pool.wait_for_size(2, timeout=TIMEOUT_S)
        assert await pool.call().add(2, 3) == 5
        assert await asyncio.gather(*(pool.submit().add(number) for number in range(10))) == list(range(1, 11))
        assert await pool.broadcast().add(1).results(TIMEOUT_S) == [2, 2]
        assert [answer async for answer in pool.broadcast().add(1)] == [2, 2]
        assert (pool.size, len(await pool.members())) == (2, 2)
        with pytest.raises(ValueError, match="bad"):
            await pool.call().fail(ValueError("bad"))
        with pytest.raises(TypeError, match="takes an AsyncCluster"):
            AsyncActorPool(shared.cluster(), "awaited")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="takes a Cluster"):
            ActorPool(cluster, "awaited")  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="await"):
            pool.call().add(1).result()


# ---- plain NATS -----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def plain(env: Env) -> Any:
    client: Client = await nats.connect(env.server.credentials(Role.OPERATOR).to_url())
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.anyio
async def test_a_plain_client_calls_with_json(shared: Env) -> None:
    shared.serve("json", Calculator())
    member = shared.pool("json").members()[0]
    async with plain(shared) as client:

        async def ask(subject: str, body: bytes) -> Any:
            return await client.request(subject, body, timeout=TIMEOUT_S)

        to_any = subjects.actor_any(NAMESPACE, "json", "add")
        for subject in (to_any, f"{member.address}.add", subjects.actor_all(NAMESPACE, "json", "add")):
            for body in (b'{"args": [2, 3]}', b"[2, 3]", b'{"kwargs": {"a": 2, "b": 3}}'):
                assert json.loads((await ask(subject, body)).data) == {"result": 5}
        assert json.loads((await ask(subjects.actor_any(NAMESPACE, "json", "notes"), b"")).data) == {"result": []}
        for method_name, body, kind in (
            ("add", b"{", "fluster_bus.core.errors.InvalidMessageError"),
            ("add", b'["x", 1]', "fluster.errors.InvalidArgumentsError"),
            ("nothing", b"", "AttributeError"),
            ("_hidden", b"", "AttributeError"),
            ("make", b"[3]", "TypeError"),
            ("complain", b'["a\\r\\nb\\u0000\\ud800"]', "ValueError"),  # a text that no header can hold
        ):
            answer = await ask(subjects.actor_any(NAMESPACE, "json", method_name), body)
            assert json.loads(answer.data)["error"]["type"] == kind
            assert answer.headers["Nats-Service-Error-Code"] == kind
            assert answer.headers["Nats-Service-Error"]


@pytest.mark.anyio
async def test_a_reply_subject_that_is_no_inbox_is_refused(shared: Env) -> None:
    calculator = Calculator()
    shared.serve("inbox", calculator)
    shared.pool("inbox")
    async with plain(shared) as client:
        to_any = subjects.actor_any(NAMESPACE, "inbox", "note")
        await client.publish(to_any, b'["forged"]', reply="fluster.sys.capacity")
        await client.publish(to_any, b'["one way"]')
        await client.flush()
    wait_until(lambda: calculator.seen == ["one way"])


@pytest.mark.anyio
async def test_plain_tools_list_the_pool_with_its_methods(shared: Env) -> None:
    shared.serve("listed", Calculator())
    pool = shared.pool("listed")
    pool.call().add(1)
    endpoint_id = pool.members()[0].endpoint_id
    async with plain(shared) as client:
        info = json.loads((await client.request("$SRV.INFO.listed", timeout=TIMEOUT_S)).data)
        assert info["id"] == endpoint_id
        methods = {each["name"]: each for each in info["endpoints"]}
        assert methods["add"]["subject"] == subjects.actor_any(NAMESPACE, "listed", "add")
        assert methods["add"]["metadata"]["doc"] == "Add two numbers."
        assert json.loads(methods["add"]["metadata"]["parameters"])["properties"]["a"] == {"type": "integer"}
        assert json.loads(methods["add"]["metadata"]["returns"]) == {"type": "integer"}
        assert "_hidden" not in methods
        stats = json.loads((await client.request(f"$SRV.STATS.listed.{endpoint_id}", timeout=TIMEOUT_S)).data)
        assert {each["name"]: each["num_requests"] for each in stats["endpoints"]}["add"] == 1


def test_a_single_call_shows_its_method_in_the_subject(shared: Env) -> None:
    shared.serve("shown", Calculator())
    pool = shared.pool("shown")
    heard: list[str] = []

    async def listen() -> Bus:
        bus = await Bus.connect(shared.server.credentials(Role.OPERATOR), name="listener")
        await bus.subscribe(
            subjects.actor_one(NAMESPACE, "shown", subjects.ANY_TOKEN), lambda each: heard.append(each.subject)
        )
        await bus.flush()
        return bus

    bus = shared.portal.run(listen)
    pool.call().add(1)
    wait_until(lambda: [subjects.last_token(subject) for subject in heard] == ["add"])
    shared.portal.run(bus.close)


# ---- others' rights -------------------------------------------------------------------------------------


def test_jobs_serve_and_clients_call_with_their_own_rights(shared: Env) -> None:
    shared.serve("rights", Calculator(), cluster=shared.cluster(Role.JOB))
    for role in (Role.CLIENT, Role.JOB):
        pool: ActorPool[Any] = ActorPool(shared.cluster(role), "rights")
        pool.wait_for_size(1, timeout=TIMEOUT_S)
        assert pool.call().add(1) == 2
        assert pool.broadcast().add(1).results(TIMEOUT_S) == [2]


def test_many_threads_share_a_pool(either: Env | MemoryEnv) -> None:
    either.serve("threads", *(Calculator() for _ in range(2)))
    pool = either.pool("threads", size=2)
    wrong: list[Any] = []

    def work(start: int) -> None:
        futures = [pool.submit().add(start, number) for number in range(50)]
        if [pool.call().add(start, number) for number in range(10)] != [start + number for number in range(10)]:
            wrong.append(start)
        if [future.result(TIMEOUT_S) for future in futures] != [start + number for number in range(50)]:
            wrong.append(start)

    threads = [threading.Thread(target=work, args=(1_000 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert wrong == []
