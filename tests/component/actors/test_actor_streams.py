"""Generators of actors, read over a real server: order, bounds, ends on either side."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import nats
import pytest

from fluster.actors import ActorContext, ActorPool, ActorStream, AsyncActorPool, actor, method
from fluster.actors.server import host
from fluster.cluster import AsyncCluster, Cluster
from fluster.errors import ActorDiedError, ActorTimeoutError, ConnectionLostError
from fluster_bus.core import subjects
from fluster_bus.core.errors import ClosedError, ObjectTooLargeError
from fluster_bus.core.roles import Role
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Env, sharing_nothing
from tests.insides import served_by
from tests.waiting import wait_until

WINDOW = 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    """Each test uses names of its own."""
    env = Env(tmp_path_factory.mktemp("store"))
    yield env
    env.close()


@pytest.fixture
def env(shared: Env, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    """For tests that stop the server."""
    del shared
    env = Env(tmp_path_factory.mktemp("own"))
    yield env
    env.close()


class Source:
    """Tells the test what becomes of its generators."""

    def __init__(self) -> None:
        self.yielded = 0
        self.ended = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def is_ended(self) -> None:
        assert self.ended.acquire(timeout=TIMEOUT_S)

    def is_entered(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)

    def count(self, end: int) -> Iterator[int]:
        try:
            for number in range(end):
                self.yielded += 1
                yield number
        finally:
            self.ended.release()

    async def count_later(self, end: int) -> AsyncGenerator[int, None]:
        try:
            for number in range(end):
                self.yielded += 1
                yield number
                if number % 7 == 0:
                    await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            self.ended.release()

    @method(stream_window=WINDOW, retries=3)
    def endless(self) -> Iterator[int]:
        return (yield from self.count(1 << 60))

    @method(stream_window=WINDOW)
    async def endless_later(self) -> AsyncIterator[int]:
        items = self.count_later(1 << 60)
        try:
            async for number in items:
                yield number
        finally:
            await items.aclose()

    @method(stream_window=WINDOW)
    def slow_reader(self, end: int) -> Iterator[int]:
        yield from range(end)

    @method(stream_window_bytes=100_000)
    def large(self, size: int) -> Iterator[bytes]:
        for _ in itertools.count():
            self.yielded += 1
            yield bytes(size)

    def fail(self, after: int) -> Iterator[int]:
        yield from range(after)
        raise ZeroDivisionError("mine")

    async def fail_later(self, after: int) -> AsyncIterator[int]:
        for number in range(after):
            yield number
        raise ZeroDivisionError("mine")

    def odd(self) -> Iterator[Any]:
        try:
            yield 1
            yield threading.Lock()
        finally:
            self.ended.release()

    def big(self, sizes: list[int]) -> Iterator[bytes]:
        try:
            yield from map(bytes, sizes)
        finally:
            self.ended.release()

    async def big_later(self, sizes: list[int]) -> AsyncGenerator[bytes, None]:
        try:
            for size in sizes:
                yield bytes(size)
        finally:
            self.ended.release()

    def hang(self, ctx: ActorContext) -> Iterator[int]:
        try:
            yield 1
            self.entered.release()
            ctx.wait_cancelled(TIMEOUT_S)
            yield 2
        finally:
            self.ended.release()

    async def hang_later(self) -> AsyncIterator[int]:
        try:
            yield 1
            self.entered.release()
            await asyncio.Event().wait()
        finally:
            self.ended.release()

    def gated(self) -> Iterator[int]:
        try:
            yield 1
            self.block()
        finally:
            self.ended.release()

    def block(self) -> str:
        self.entered.release()
        assert self.opened.wait(TIMEOUT_S)
        return "went through"

    def add(self, a: int) -> int:
        return a + 1


@actor(max_concurrency=3)
class Wide(Source):
    pass


BOTH_KINDS = pytest.mark.parametrize("kind", [Source, Wide])
COUNTS = pytest.mark.parametrize("count", ["count", "count_later"])
ENDLESS = pytest.mark.parametrize("endless", ["endless", "endless_later"])
_names = map("source-{}".format, itertools.count())


def serve(env: Env, source: Source | None = None, **options: Any) -> tuple[Any, ActorPool[Any]]:
    name, source = next(_names), source or Source()
    env.serve(name, source, **options)
    return source, env.pool(name)


# ---- what arrives ---------------------------------------------------------------------------------------


@BOTH_KINDS
@COUNTS
def test_all_items_arrive_in_order(shared: Env, kind: type[Source], count: str) -> None:
    source, pool = serve(shared, kind())
    for size in (0, 1, 2, 5_000):
        assert list(getattr(pool.call(), count)(size)) == list(range(size))
        source.is_ended()
    future = getattr(pool.submit(), count)(3)
    with future.result(TIMEOUT_S) as stream:
        assert isinstance(stream, ActorStream)
        assert list(stream) == [0, 1, 2]
        assert next(stream, "end") == "end"
    assert [list(each) for each in pool.broadcast().count(3).results(TIMEOUT_S)] == [[0, 1, 2]]
    assert pool.call().add(1) == 2


def test_several_streams_at_once(shared: Env) -> None:
    _source, pool = serve(shared, Wide())
    streams = [pool.call().count(2_000) for _ in range(3)] + [pool.call().count_later(2_000) for _ in range(3)]
    assert list(zip(*streams, strict=True)) == [(number,) * 6 for number in range(2_000)]


def test_a_single_item_is_not_delayed(shared: Env) -> None:
    source, pool = serve(shared)
    stream = pool.call(timeout=TIMEOUT_S).hang()
    assert next(stream) == 1
    source.is_entered()
    stream.close()


@pytest.mark.parametrize("fail", ["fail", "fail_later"])
def test_an_exception_comes_in_its_place(shared: Env, fail: str) -> None:
    _source, pool = serve(shared)
    stream = getattr(pool.call(), fail)(300)
    assert list(itertools.islice(stream, 300)) == list(range(300))
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        next(stream)
    assert f"in {fail}" in caught.value.__notes__[0]
    assert "producer.py" not in caught.value.__notes__[0]


def test_wrong_arguments_are_told_by_the_call(shared: Env) -> None:
    _source, pool = serve(shared)
    with pytest.raises(TypeError, match="count"):
        pool.call().count()
    with pytest.raises(TypeError, match="is not a stream"):
        asyncio.run(anext(aiter(pool.submit().add(1))))


def test_an_item_that_cannot_travel_ends_the_stream(shared: Env) -> None:
    source, pool = serve(shared)
    with sharing_nothing():
        stream = pool.call().odd()
        assert next(stream) == 1
        with pytest.raises(TypeError):
            next(stream)
        source.is_ended()


@pytest.mark.parametrize("big", ["big", "big_later"])
def test_items_that_no_message_can_carry_are_stored(shared: Env, monkeypatch: pytest.MonkeyPatch, big: str) -> None:
    source, pool = serve(shared)
    sizes = [3, 9 << 20, 10 << 20, 5, 9 << 20]
    with sharing_nothing():
        assert [len(item) for item in getattr(pool.call(), big)(sizes)] == sizes
        source.is_ended()

        async def read() -> list[int]:
            async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
                awaited: AsyncActorPool[Any] = AsyncActorPool(cluster, pool.name)
                return [len(item) async for item in getattr(awaited.submit(), big)(sizes)]

        assert asyncio.run(read()) == sizes
        source.is_ended()
        monkeypatch.setattr("fluster_bus.storage.objects.MAX_OBJECT_BYTES", 9 << 20)
        stream = getattr(pool.call(), big)([1, 10 << 20, 2])
        assert len(next(stream)) == 1
        with pytest.raises(ObjectTooLargeError):
            next(stream)
        source.is_ended()


# ---- how far it is ahead --------------------------------------------------------------------------------


@BOTH_KINDS
@ENDLESS
def test_the_generator_is_no_more_than_a_window_ahead_and_others_run_meanwhile(
    shared: Env, kind: type[Source], endless: str
) -> None:
    source, pool = serve(shared, kind())
    stream = getattr(pool.call(), endless)()
    for number in range(50):
        assert next(stream) == number
        assert pool.call().add(number) == number + 1  # does not wait for the stream to end
        assert source.yielded <= number + 1 + WINDOW
    wait_until(lambda: source.yielded >= 50 + WINDOW // 2)
    stream.close()
    source.is_ended()


@pytest.mark.parametrize("shares_memory", [True, False])
def test_large_items_count_by_their_bytes(shared: Env, *, shares_memory: bool) -> None:
    with contextlib.nullcontext() if shares_memory else sharing_nothing():
        _large_items_count(shared)


def _large_items_count(shared: Env) -> None:
    source, pool = serve(shared)
    for number, item in enumerate(pool.call().large(33_000)):
        assert len(item) == 33_000
        assert source.yielded <= number + 1 + 4
        if number == 20:
            break
    source.yielded = 0
    stream = pool.call().large(1_000_000)  # each larger than the window
    for number in range(5):
        next(stream)
        assert source.yielded <= number + 2


# ---- ends -----------------------------------------------------------------------------------------------


@BOTH_KINDS
@ENDLESS
def test_leaving_the_loop_ends_the_generator(shared: Env, kind: type[Source], endless: str) -> None:
    source, pool = serve(shared, kind())

    def start() -> ActorStream[int]:
        stream: ActorStream[int] = getattr(pool.call(), endless)()
        return stream

    for _ in start():
        break
    source.is_ended()
    with pytest.raises(KeyError):  # noqa: PT012
        for _ in start():
            raise KeyError
    gc.collect()  # the traceback held on to it
    source.is_ended()
    stream = start()
    next(stream)
    stream.close()
    stream.close()
    source.is_ended()
    assert list(stream) == []
    with start() as stream:
        assert next(stream) == 0
    source.is_ended()
    assert pool.call().add(1) == 2


@BOTH_KINDS
@ENDLESS
def test_a_stream_at_which_nobody_ever_looks_is_closed(shared: Env, kind: type[Source], endless: str) -> None:
    name = next(_names)
    server = shared.serve(name, kind())
    opened = threading.Event()
    getattr(shared.pool(name).submit(), endless)().add_done_callback(lambda _future: opened.set())
    assert opened.wait(TIMEOUT_S)
    (served,) = served_by(server)  # a generator that was closed before it began reports nothing
    wait_until(lambda: not served.actor.streams.all())


@pytest.mark.parametrize("hang", ["hang", "hang_later"])
def test_a_generator_that_waits_is_ended_as_well(shared: Env, hang: str) -> None:
    source, pool = serve(shared)
    stream = getattr(pool.call(), hang)()
    assert next(stream) == 1
    source.is_entered()
    stream.close()
    source.is_ended()
    assert pool.call().add(1) == 2


def test_a_stream_that_has_not_begun_can_be_cancelled(shared: Env) -> None:
    source, pool = serve(shared)
    running = pool.submit().block()
    source.is_entered()
    future = pool.submit().count(3)
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    source.opened.set()
    assert running.result(TIMEOUT_S) == "went through"
    assert pool.call().add(1) == 2
    assert source.yielded == 0


@pytest.mark.parametrize("hang", ["hang", "hang_later"])
def test_the_timeout_bounds_the_time_to_each_item(shared: Env, hang: str) -> None:
    source, pool = serve(shared)
    stream = getattr(pool.call(timeout=2.0), hang)()
    assert next(stream) == 1
    with pytest.raises(ActorTimeoutError, match=r"no further item within 2 s"):
        next(stream)
    source.is_ended()
    busy = pool.submit().block()
    source.is_entered()
    with pytest.raises(ActorTimeoutError):
        pool.call(timeout=0.1).count(3)
    source.opened.set()
    busy.result(TIMEOUT_S)


def test_closing_in_another_thread_ends_the_wait(shared: Env) -> None:
    source, pool = serve(shared)
    stream = pool.call().hang()
    assert next(stream) == 1
    source.is_entered()
    threading.Thread(target=stream.close).start()
    assert list(stream) == []


def test_an_actor_that_ends_ends_its_streams(shared: Env) -> None:
    name, source = next(_names), Source()
    server = shared.serve(name, source)
    pool = shared.pool(name)
    stream = pool.call().gated()
    assert next(stream) == 1
    source.is_entered()
    server.shutdown(timeout=0.05)
    with pytest.raises(ActorDiedError):
        next(stream)
    assert list(stream) == []
    source.opened.set()
    source.is_ended()


def test_a_call_that_outlives_its_server_and_its_cluster_ends_in_peace(shared: Env) -> None:
    name, source = next(_names), Source()
    cluster = Cluster(shared.server.credentials(Role.OPERATOR))
    server = shared.serve(name, source, cluster=cluster)
    future = shared.pool(name).submit().block()
    source.is_entered()
    server.shutdown(timeout=0.05)
    with pytest.raises(ActorDiedError):
        future.result(TIMEOUT_S)
    cluster.close()
    lane = next(thread for thread in threading.enumerate() if thread.name == f"{name}-0")
    source.opened.set()
    lane.join(TIMEOUT_S)
    assert not lane.is_alive()


def test_a_graceful_shutdown_lets_streams_go_on_to_their_end(shared: Env) -> None:
    name, source = next(_names), Source()
    server = shared.serve(name, source)
    pool = shared.pool(name)
    kept, closed = pool.call().slow_reader(100), pool.call().slow_reader(100)
    assert (next(kept), next(closed)) == (0, 0)
    ending = threading.Thread(target=server.shutdown)
    ending.start()
    wait_until(lambda: pool.size == 0)
    closed.close()
    assert list(kept) == list(range(1, 100))
    ending.join(TIMEOUT_S)
    assert not ending.is_alive()


def test_a_lost_connection_ends_a_stream_on_both_sides(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_ASK_READERS_S", 0.05)
    source, pool = serve(env)
    stream = pool.call().endless()
    assert next(stream) == 0
    env.server.stop()
    with pytest.raises(ConnectionLostError):
        for _ in stream:
            pass
    env.server.start()
    source.is_ended()
    assert pool.call(timeout=TIMEOUT_S).add(1) == 2


def test_a_reader_that_is_gone_is_noticed(shared: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_ASK_READERS_S", 0.05)
    name, source = next(_names), Source()
    shared.serve(name, source)
    staying = shared.pool(name).call().endless()
    with Cluster(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: ActorPool[Any] = ActorPool(cluster, name)
        pool.wait_for_size(1, timeout=TIMEOUT_S)
        stream = pool.call().endless()
        assert next(stream) == 0
    source.is_ended()
    with pytest.raises(ClosedError):
        list(stream)
    assert list(itertools.islice(staying, 20)) == list(range(20))
    assert not source.ended.acquire(blocking=False)


# ---- awaited --------------------------------------------------------------------------------------------


@pytest.mark.anyio
@COUNTS
async def test_the_awaited_pool_reads_with_async_for(shared: Env, count: str) -> None:
    name, source = next(_names), Source()
    shared.serve(name, source)
    async with await AsyncCluster.connect(shared.server.credentials(Role.OPERATOR)) as cluster:
        pool: AsyncActorPool[Any] = AsyncActorPool(cluster, name)
        await pool.wait_for_size(1, timeout=TIMEOUT_S)
        assert [item async for item in getattr(pool.call(), count)(3_000)] == list(range(3_000))
        stream = await getattr(pool.call(), count)(3)
        assert [item async for item in stream] == [0, 1, 2]
        found = []
        async for item in pool.call().endless_later():
            found.append(item)
            assert await pool.call().add(item) == item + 1
            if item == 20:
                break
        assert found == list(range(21))
        for _ in range(3):
            await asyncio.to_thread(source.is_ended)
        with pytest.raises(ZeroDivisionError):
            async for _ in pool.call().fail_later(3):
                pass
        with pytest.raises(ActorTimeoutError):
            async for _ in pool.call(timeout=2.0).hang_later():
                pass
        await asyncio.to_thread(source.is_ended)
        stream = await pool.call().hang()
        assert await anext(stream) == 1
        with pytest.raises(RuntimeError, match="async for"):
            next(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        await stream.aclose()
        await asyncio.to_thread(source.is_ended)


# ---- JSON ------------------------------------------------------------------------------------------------


@actor(codec="json")
class JsonSource(Source):
    pass


def test_a_generator_of_an_actor_that_takes_json_only_cannot_be_read(shared: Env) -> None:
    source, pool = serve(shared, JsonSource())
    for count in ("count", "count_later"):
        with pytest.raises(
            TypeError, match="is a generator: an actor that takes JSON only has no streams: return a list"
        ):
            getattr(pool.call(), count)(3)
    assert source.yielded == 0


# ---- plain NATS -----------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_plain_client_is_told_that_it_cannot_read_a_generator(shared: Env) -> None:
    source, pool = serve(shared)
    client = await nats.connect(shared.server.credentials(Role.OPERATOR).to_url())
    for name in ("count", "count_later"):
        answer = await client.request(subjects.actor_any(NAMESPACE, pool.name, name), b"[3]", timeout=TIMEOUT_S)
        assert "is a generator: only Fluster's own callers can read it" in json.loads(answer.data)["error"]["message"]
    await client.close()
    assert source.yielded == 0
