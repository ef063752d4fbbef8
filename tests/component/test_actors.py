"""Actors: what calls mean, in which order they run, and what happens when something ends.

Tests that take `either` are a contract: it holds over a real server, and for the actors in memory of fluster.testing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from fluster.actors import (
    ActorContext,
    ActorPool,
    ActorServer,
    AsyncActorPool,
    ClusterResolver,
    FixedResolver,
    actor,
    method,
)
from fluster.cluster import AsyncCluster, Cluster
from fluster.cluster.portal import Portal
from fluster.errors import (
    ActorDiedError,
    ActorNotFoundError,
    ActorTimeoutError,
    ConnectionLostError,
    MailboxFullError,
    RemoteError,
)
from fluster.testing import LocalActors
from fluster_bus import arenas, codec, objects, payloads, subjects
from fluster_bus.arena import Lent
from fluster_bus.bus import Bus
from fluster_bus.errors import ClosedError, ObjectTooLargeError, PayloadLostError, ServiceError
from fluster_bus.messages import Done, Namespace
from fluster_bus.references import Reference
from fluster_bus.roles import Role
from fluster_bus.server import EmbeddedServer
from fluster_bus.streams import ensure_namespace
from tests.component.arena_peer import Block
from tests.waiting import wait_until

NAMESPACE = Namespace("default")
TIMEOUT_S = 20.0


class Proxy:
    """A way to the server that can be cut, or held up, while others stay."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._ways: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    @classmethod
    async def open(cls, server_port: int) -> Proxy:
        proxy = cls(server_port)
        proxy._listener = await asyncio.start_server(proxy._connect, "127.0.0.1")
        return proxy

    @property
    def port(self) -> int:
        assert self._listener is not None
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        self._writers |= {writer, far_writer}
        for way in (self._pass_on(reader, far_writer), self._pass_on(far_reader, writer)):
            task = asyncio.create_task(way)
            self._ways.add(task)
            task.add_done_callback(self._ways.discard)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                await self._flows.wait()
                if writer.is_closing():  # it was cut meanwhile
                    break
                writer.write(data)
        writer.close()

    async def hold(self) -> None:
        """Let nothing through until `release`; the connections stand."""
        self._flows.clear()

    async def release(self) -> None:
        self._flows.set()

    async def cut(self) -> None:
        """End all connections; new ones are let through."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def close(self) -> None:
        assert self._listener is not None
        self._flows.set()
        self._listener.close()
        await self.cut()
        await asyncio.gather(*self._ways, return_exceptions=True)


class Env:
    """A server, somebody who makes the namespace, and clusters that are closed at the end."""

    def __init__(self, store_dir: Path) -> None:
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(EmbeddedServer(store_dir))
        self.portal = Portal("controller")
        self._stack.callback(self.portal.close)
        bus = self.portal.run(self._controller)
        self._stack.callback(self.portal.run, bus.close)

    async def _controller(self) -> Bus:
        bus = await Bus.connect(self.server.credentials(Role.SERVICE), name="controller")
        await ensure_namespace(bus, NAMESPACE)

        async def done(_request: Done, _subject: str) -> Done:
            return Done()

        await bus.serve(subjects.ensure_namespace(NAMESPACE), Done, done)
        return bus

    def cluster(self, role: Role = Role.OPERATOR) -> Cluster:
        namespace = None if role is Role.OPERATOR else NAMESPACE
        return self._stack.enter_context(Cluster(self.server.credentials(role, namespace)))

    def proxy(self) -> Proxy:
        proxy = self.portal.run(Proxy.open, self.server.port)
        self._stack.callback(self.portal.run, proxy.close)
        return proxy

    def serve(self, name: str, *instances: object, cluster: Cluster | None = None) -> ActorServer:
        server = ActorServer(cluster or self.cluster())
        for instance in instances:
            server.register(name, instance)
        server.serve_background()
        self._stack.callback(server.shutdown, 1.0)
        return server

    def pool(self, name: str, *, size: int = 1) -> ActorPool[Any]:
        pool: ActorPool[Any] = ActorPool(self.cluster(), name)
        pool.wait_for_size(size, timeout=TIMEOUT_S)
        return pool

    def pass_time(self, seconds: float) -> None:
        """Let deadlines come, where somebody has to."""

    def close(self) -> None:
        self._stack.close()


class MemoryEnv:
    """The same in memory."""

    def __init__(self) -> None:
        self.actors = LocalActors()

    def cluster(self) -> Cluster:
        return self.actors.cluster

    def serve(self, name: str, *instances: object) -> ActorServer:
        server = ActorServer(self.actors.cluster, clock=self.actors.clock)
        for instance in instances:
            server.register(name, instance)
        server.serve_background()
        return server

    def pool(self, name: str, *, size: int = 1) -> ActorPool[Any]:
        pool = self.actors.pool(name)
        pool.wait_for_size(size, timeout=TIMEOUT_S)
        return pool

    def pass_time(self, seconds: float) -> None:
        self.actors.clock.advance(seconds, wait=False)

    def close(self) -> None:
        self.actors.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    """For tests that leave the server alone; each uses names of its own."""
    env = Env(tmp_path_factory.mktemp("store"))
    yield env
    env.close()


@pytest.fixture(scope="module")
def in_memory() -> Iterator[MemoryEnv]:
    env = MemoryEnv()
    yield env
    env.close()


@pytest.fixture(params=["shared", "in_memory"])
def either(request: pytest.FixtureRequest) -> Env | MemoryEnv:
    """For what holds for both."""
    env: Env | MemoryEnv = request.getfixturevalue(request.param)
    return env


@pytest.fixture
def env(tmp_path: Path) -> Iterator[Env]:
    """For tests that stop the server."""
    env = Env(tmp_path / "store")
    yield env
    env.close()


class Calculator:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    async def add_later(self, a: int, b: int) -> int:
        await asyncio.sleep(0.001)
        return a + b

    def note(self, what: Any) -> None:
        self.seen.append(what)

    async def note_later(self, what: Any) -> None:
        await asyncio.sleep(0)
        self.seen.append(what)

    def notes(self) -> list[Any]:
        return self.seen

    def where(self, ctx: ActorContext, what: str) -> tuple[str | None, str | None, float | None, str]:
        return ctx.actor_name, ctx.method, ctx.deadline, what

    def fail(self, error: BaseException) -> None:
        raise error

    def complain(self, text: Any) -> None:
        raise ValueError(text)

    def echo(self, data: Any) -> Any:
        return data

    def make(self, size: int) -> bytes:
        return bytes(size)

    def _hidden(self) -> None: ...


class Gate:
    """Its calls wait until the test lets them go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def wait(self) -> str:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.entered.release()
        assert self.opened.wait(TIMEOUT_S)
        with self._lock:
            self.at_once -= 1
        return "went through"

    def is_entered(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)


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
        pool.call()._hidden()
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


@contextlib.contextmanager
def sharing_nothing() -> Iterator[None]:
    """As on another machine: what is made meanwhile can share no memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(arenas.SIZE_VARIABLE, "0")
        patch.setattr(arenas, "_here", arenas._Here())
        yield


@pytest.fixture
def no_arenas() -> Iterator[None]:
    with sharing_nothing():
        yield


@pytest.mark.parametrize("size", [1_000_000, 20_000_000])
def test_large_arguments_and_results_lie_in_memory_that_is_shared(either: Env | MemoryEnv, size: int) -> None:
    name = f"roomy-{size}"
    either.serve(name, Calculator(), Calculator())
    pool = either.pool(name, size=2)
    data = Block(b"x" * size)
    results = [pool.call().echo(data), pool.submit().echo([data]).result(TIMEOUT_S)[0]]
    results += pool.broadcast().echo(data).results(TIMEOUT_S)
    assert [bytes(result.data) for result in results] == [data.data] * 4
    assert all(result.data.readonly for result in results)
    arena = arenas._here._own()
    assert arena._lent
    del results
    wait_until(lambda: arena.tidy(time.monotonic()) and not arena._lent, describe=lambda: arena._lent)


def test_receivers_elsewhere_get_the_bytes_themselves(shared: Env) -> None:
    with sharing_nothing():
        shared.serve("far", Calculator())
    shared.serve("far", Calculator())
    pool = shared.pool("far", size=2)
    for size in (1_000_000, 20_000_000):
        data = Block(b"x" * size)
        results = [pool.call().echo(data) for _ in range(2)] + pool.broadcast().echo(data).results(TIMEOUT_S)
        assert [bytes(result.data) for result in results] == [data.data] * 4
    futures = [pool.submit().echo(bytes(1_000_000)) for _ in range(40)]  # joined they would be too large
    assert [len(future.result(TIMEOUT_S)) for future in futures] == [1_000_000] * 40


def test_callers_elsewhere_get_the_bytes_themselves(shared: Env) -> None:
    shared.serve("near", Calculator())
    with sharing_nothing():
        pool = shared.pool("near")
        for size in (1_000_000, 20_000_000):
            assert len(pool.call().make(size)) == size


def test_what_was_lost_with_its_sender_is_told(shared: Env) -> None:
    shared.serve("losing", Calculator())
    pool = shared.pool("losing")
    lost = payloads.encode((bytes(1_000_000),))
    assert isinstance(lost, Lent)
    reference = Reference.decode(bytes(lost))
    with pytest.raises(PayloadLostError, match=r"1,000,0\d\d bytes in the memory of process \d+ cannot be read"):
        pool.asynchronous.submit_to(None, "echo", reference._replace(arena=bytes(16)).encode()).result(TIMEOUT_S)


@pytest.mark.usefixtures("no_arenas")
def test_what_no_message_can_carry_goes_by_the_object_store(shared: Env) -> None:
    shared.serve("large", Calculator())
    pool = ActorPool[Any](shared.cluster(Role.CLIENT), "large")
    pool.wait_for_size(1)
    assert pool.call().echo(b"x" * 4_000_000) == b"x" * 4_000_000
    data = [b"a", b"x" * 9_000_000, b"b", b"y" * 20_000_000]
    futures = [pool.submit().echo(each) for each in data]
    assert [future.result(TIMEOUT_S) for future in futures] == data
    assert pool.broadcast().echo(data[1]).results(TIMEOUT_S) == [data[1]]
    assert len(pool.call().make(9_000_000)) == 9_000_000

    async def awaited() -> bytes:  # on the very loop by which the answer arrives
        result: bytes = await AsyncActorPool[Any](pool.asynchronous.cluster, "large").call().make(10_000_000)
        return result

    assert len(pool.portal.run(awaited)) == 10_000_000


@pytest.mark.usefixtures("no_arenas")
def test_what_is_too_large_to_be_stored_is_told(shared: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.serve("enormous", Calculator())
    pool = shared.pool("enormous")
    monkeypatch.setattr(objects, "MAX_OBJECT_BYTES", 10_000_000)
    futures = [pool.submit().echo(data) for data in (b"a", b"x" * 11_000_000, b"b")]
    with pytest.raises(ObjectTooLargeError, match="over the limit of 10,000,000"):
        futures[1].result(TIMEOUT_S)
    assert [futures[0].result(TIMEOUT_S), futures[2].result(TIMEOUT_S)] == [b"a", b"b"]
    with pytest.raises(ObjectTooLargeError) as caught:
        pool.call().make(11_000_000)
    assert any("the result has 11,0" in note for note in caught.value.__notes__)


def test_a_json_result_is_told_when_it_is_too_large(shared: Env) -> None:
    shared.serve("wordy", Calculator())
    pool = shared.pool("wordy")

    async def ask() -> None:
        bus = pool.asynchronous.cluster.bus
        await bus.request(subjects.actor_any(NAMESPACE, "wordy", "echo"), b'["%s"]' % (b"x" * 8_388_000))

    with pytest.raises(ServiceError, match=r"the result of wordy\.echo has 8,388,014 bytes, over the server's limit"):
        pool.portal.run(ask)


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
    @method(timeout=0.05)
    def hurried(self) -> str:
        return self.wait()


def test_a_slow_call_times_out_and_one_that_waits_too_long_is_never_run(either: Env | MemoryEnv) -> None:
    gate = Patient()
    either.serve("slow", gate)
    pool = either.pool("slow")
    hurried = pool.submit().hurried()
    gate.is_entered()
    waits = pool.submit(timeout=0.05).wait()
    either.pass_time(0.05)
    with pytest.raises(ActorTimeoutError, match=r"slow\.hurried: no answer within 0.05 s"):
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
    caller = pool.asynchronous._caller
    return not caller._bus.connected and (caller._lane is None or not caller._lane.connected)


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
            ("add", b"{", "fluster_bus.errors.InvalidMessageError"),
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
