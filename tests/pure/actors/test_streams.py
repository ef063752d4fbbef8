"""Streams: how far a producer may be ahead, the turns of generators, and what a reader sees."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.actors import ActorContext, ActorStream, actor, method
from fluster.actors.definition.context import Cancellation
from fluster.actors.definition.definition import methods_of
from fluster.actors.protocol import frames
from fluster.actors.protocol.failures import encode_failure
from fluster.actors.protocol.flow_control import Produced, Read, Window
from fluster.actors.results.reader import StreamReader
from fluster.actors.server.producer import Items, Producer
from fluster.errors import ActorTimeoutError, ConnectionLostError
from fluster.testing import LocalActors
from fluster_bus.core import codec
from fluster_bus.core.errors import ClosedError, InvalidMessageError, ObjectNotFoundError

TIMEOUT_S = 60


# ---- windows --------------------------------------------------------------------------------------------


@given(
    window=st.builds(Window, st.integers(1, 20), st.integers(1, 200)),
    sizes=st.lists(st.integers(0, 300), max_size=60),
    choices=st.lists(st.sampled_from(["produce", "arrive", "read", "tell", "lose"]), max_size=400),
)
def test_a_producer_is_never_far_ahead_and_never_stuck(window: Window, sizes: list[int], choices: list[str]) -> None:
    """Whatever comes when: bounded, in order, and at the end all is read, though credits were lost on the way."""
    produced, read = Produced(window), Read(window)
    coming, on_way, credit = deque(sizes), deque[int](), deque[tuple[int, int]]()
    lost = 0

    def step(choice: str) -> bool:
        nonlocal lost
        if choice == "produce" and coming and produced.has_room:
            size = coming.popleft()
            produced.send(size)
            on_way.append(size)
        elif choice == "read" and on_way:
            if read.read(on_way.popleft()):
                credit.append((read.told_items, read.told_size))
        elif choice == "tell" and credit:
            produced.on_read(*credit.popleft())
        elif choice == "lose" and len(credit) > 1:  # the next one tells the same and more
            credit.popleft()
            lost += 1
        else:
            return False
        ahead = produced.items - read.items
        assert len(on_way) == ahead <= window.items
        assert sum(on_way) < window.size + max(sizes)
        return True

    for choice in choices:
        step(choice)
    while any([step("produce"), step("read"), step("tell")]):
        pass
    assert not coming
    assert read.items == len(sizes)


def test_what_a_reader_tells_is_never_believed_beyond_what_was_sent() -> None:
    produced = Produced(Window(2, 100))
    produced.send(1)
    produced.on_read(1_000_000, 1_000_000)
    produced.on_read(0, 0)
    assert (produced.read_items, produced.read_size) == (1, 1)


class Defined:
    def plain(self) -> None: ...

    def stream(self) -> Iterator[int]:
        yield 1

    @method(stream_window=3, stream_window_bytes=10)
    async def later(self) -> AsyncIterator[int]:
        yield 1


def test_the_definition_tells_generators_and_their_windows() -> None:
    found = methods_of(actor(Defined))
    assert found["plain"].window is None
    assert found["stream"].window == Window(256, 4 << 20)
    assert (found["later"].window, found["later"].is_async) == (Window(3, 10), True)
    for value in (0, -1, 1.5, True, "many"):
        with pytest.raises(ValueError, match="stream_window"):
            method(stream_window=value)  # type: ignore[arg-type]


# ---- the producer ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    reply: str
    index: int
    cancellation: Cancellation
    method: str = "numbers"


class Stage:
    """A producer without an actor around it."""

    def __init__(self, items: Items, *, window: int = 3) -> None:
        self.cancellation = Cancellation()
        self.resumed = threading.Semaphore(0)
        self.announced = 0
        self.producer = Producer(
            items,
            Window(window, 1_000),
            call=Job("inbox.1", 0, self.cancellation),
            endpoint_id="abc",
            encode=codec.encode,
            store=lambda _data: None,
            announce=self._announce,
            resume=lambda _producer: self.resumed.release(),
            on_end=lambda _producer: None,
        )

    def _announce(self, _producer: Producer) -> None:
        self.announced += 1

    def turn(self) -> bool:
        if not self.producer.is_async:
            return self.producer.run()
        return self.producer.run_on(asyncio.get_running_loop()).result(0)

    def taken(self) -> list[Any]:
        return [codec.decode(data) for _size, (_first, items) in self.producer.take() for data in items]


class Watched:
    def __init__(self) -> None:
        self.ends: list[str] = []

    def numbers(self, end: int) -> Iterator[int]:
        try:
            yield from range(end)
        finally:
            self.ends.append("ended")

    async def numbers_later(self, end: int) -> AsyncIterator[int]:
        try:
            for number in range(end):
                yield number
        finally:
            await asyncio.sleep(0)
            self.ends.append("ended")


def test_a_turn_ends_when_the_window_is_full_and_the_next_goes_on() -> None:
    watched = Watched()
    stage = Stage(watched.numbers(5))  # type: ignore[arg-type]
    assert not stage.producer.run()
    assert stage.announced == 1
    assert [(first, len(items)) for _size, (first, items) in stage.producer.take()] == [(0, 3)]
    assert list(stage.producer.take()) == []
    stage.producer.on_read(0, 0)
    assert not stage.resumed.acquire(blocking=False)
    stage.producer.on_read(2, 0)
    stage.producer.on_read(3, 100)
    assert stage.resumed.acquire(blocking=False)
    assert not stage.resumed.acquire(blocking=False)  # one turn, not two
    assert stage.producer.run()
    assert stage.taken() == [3, 4]
    assert (stage.announced, watched.ends, stage.producer.error) == (2, ["ended"], None)


def test_one_that_is_cancelled_while_it_waits_takes_a_turn_to_close() -> None:
    watched = Watched()
    stage = Stage(watched.numbers(5))  # type: ignore[arg-type]
    assert not stage.producer.run()
    stage.producer.cancel()
    assert stage.resumed.acquire(blocking=False)
    assert watched.ends == []
    assert stage.producer.run()
    assert watched.ends == ["ended"]
    stage.producer.on_read(3, 100)
    assert not stage.resumed.acquire(blocking=False)


def test_one_that_is_cancelled_before_its_first_turn_runs_nothing() -> None:
    watched = Watched()
    stage = Stage(watched.numbers(5))  # type: ignore[arg-type]
    stage.producer.cancel()
    assert stage.producer.run()
    assert (stage.taken(), watched.ends, stage.producer.error) == ([], [], None)


def test_what_goes_wrong_closes_the_generator() -> None:
    watched = Watched()

    def unpicklable() -> Iterator[Any]:
        try:
            yield threading.Lock()
        finally:
            watched.ends.append("ended")

    stage = Stage(unpicklable())  # type: ignore[arg-type]
    assert stage.producer.run()
    assert isinstance(stage.producer.error, TypeError)
    assert watched.ends == ["ended"]


def test_many_items_travel_in_messages_of_a_bounded_size() -> None:
    stage = Stage(Watched().numbers(2 * frames.MAX_ITEMS + 1), window=5_000)  # type: ignore[arg-type]
    assert not stage.producer.run()
    portions = [(first, len(items)) for _size, (first, items) in stage.producer.take()]
    assert portions[0][0] == 0
    assert all(count <= frames.MAX_ITEMS for _first, count in portions)
    assert all(first + count == following for (first, count), (following, _) in itertools.pairwise(portions))


@pytest.mark.anyio
@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_asynchronous_generator_runs_in_one_task_for_all_its_turns(cancelled: bool) -> None:
    tasks: set[Any] = set()
    watched = Watched()

    async def numbers() -> AsyncIterator[int]:
        async for number in watched.numbers_later(5):
            tasks.add(asyncio.current_task())
            yield number

    stage = Stage(numbers())  # type: ignore[arg-type]
    loop = asyncio.get_running_loop()
    assert not await asyncio.wrap_future(stage.producer.run_on(loop))
    assert stage.taken() == [0, 1, 2]
    if cancelled:
        stage.producer.cancel()
    else:
        stage.producer.on_read(3, 100)
    assert stage.resumed.acquire(blocking=False)
    assert await asyncio.wrap_future(stage.producer.run_on(loop))
    assert stage.producer.error is None
    assert stage.taken() == ([] if cancelled else [3, 4])
    assert len(tasks) == 1


@pytest.mark.anyio
async def test_an_asynchronous_generator_that_waits_is_interrupted() -> None:
    entered, ends = asyncio.Event(), []

    async def hang() -> AsyncIterator[int]:
        try:
            yield 1
            entered.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            ends.append("ended")

    stage = Stage(hang())  # type: ignore[arg-type]
    turn = stage.producer.run_on(asyncio.get_running_loop())
    await entered.wait()
    stage.producer.cancel()
    assert await asyncio.wrap_future(turn)
    assert ends == ["cancelled", "ended"]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("kept", [5_000, 700])
def test_turns_credits_and_a_cancel_of_several_threads_lose_nothing(lanes: int, kept: int) -> None:
    """A reader takes what is ready and tells so, threads take the turns; after `kept` items it wants no more."""
    watched = Watched()
    turns: SimpleQueue[Producer | None] = SimpleQueue()
    ready: SimpleQueue[Producer | None] = SimpleQueue()
    producer = Producer(
        watched.numbers(5_000),  # type: ignore[arg-type]
        Window(3, 1_000),
        call=Job("inbox.1", 0, Cancellation()),
        endpoint_id="abc",
        encode=codec.encode,
        store=lambda _data: None,
        announce=ready.put,
        resume=turns.put,
        on_end=lambda _producer: None,
    )

    def run_lane() -> None:
        while (turn := turns.get()) is not None:
            if turn.run():
                ready.put(turn)  # as the end of the stream
                ready.put(None)

    threads = [threading.Thread(target=run_lane) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    turns.put(producer)
    found: list[int] = []
    while (announced := ready.get(timeout=TIMEOUT_S)) is not None:
        for size, (first, items) in announced.take():
            assert first == len(found)
            found += map(codec.decode, items)
            assert size == sum(map(len, items))
        if len(found) >= kept:
            producer.cancel()
        producer.on_read(len(found), 1_000_000)
    for _ in threads:
        turns.put(None)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert kept <= len(found) <= kept + 3
    assert found == list(range(len(found)))
    assert (watched.ends, producer.error) == (["ended"], None)


# ---- the reader -----------------------------------------------------------------------------------------


class Ear:
    """What a reader tells the actor."""

    def __init__(self, *, window: int = 4, timeout_s: float | None = TIMEOUT_S) -> None:
        self.told: list[tuple[int, int]] = []
        self.withdrawn = 0
        self.store: dict[bytes, Future[bytes]] = {}
        self.reader = StreamReader(
            "source.numbers",
            Window(window, 1_000),
            timeout_s=timeout_s,
            loop=asyncio.new_event_loop(),
            on_read=lambda: self.told.append((self.reader.progress.told_items, self.reader.progress.told_size)),
            withdraw=self._withdraw,
            fetch=self._fetch,
        )
        self.reader.loop.close()
        self.stream: ActorStream[Any] | None = ActorStream(self.reader)

    def _withdraw(self) -> None:
        self.withdrawn += 1

    def _fetch(self, data: bytes) -> Future[bytes]:
        return self.store[data]

    def hear(self, first: int, *items: Any) -> bool:
        return self.reader.take(first, [codec.encode(item) for item in items])

    def read(self) -> Any:
        assert self.stream is not None
        return next(self.stream)


def stored_at(ear: Ear, name: bytes) -> Future[bytes]:
    """What is to be fetched for an item that has arrived."""
    reference = b"\x03" + name
    ear.reader.take(0, [reference])
    ear.store[reference] = Future()
    return ear.store[reference]


def test_an_item_that_was_stored_is_fetched_and_counts_with_its_size() -> None:
    ear = Ear(window=2)
    big = codec.encode("x" * 600)
    stored_at(ear, b"big").set_result(big)
    assert ear.read() == "x" * 600
    assert ear.told == [(1, len(big))]


@pytest.mark.anyio
async def test_it_is_awaited_too() -> None:
    ear = Ear(window=2)
    fetched = stored_at(ear, b"big")
    assert ear.stream is not None
    reading = asyncio.ensure_future(anext(ear.stream))
    await asyncio.sleep(0)
    fetched.set_result(codec.encode("big"))
    assert await reading == "big"


@pytest.mark.parametrize("is_async", [False, True])
def test_an_item_that_cannot_be_fetched_ends_the_stream(is_async: bool) -> None:
    def read(ear: Ear) -> Any:
        assert ear.stream is not None
        return asyncio.run(awaited(ear.stream)) if is_async else ear.read()

    async def awaited(stream: ActorStream[Any]) -> Any:
        return await anext(stream)

    lost, late, closed = Ear(), Ear(timeout_s=0.01), Ear()
    stored_at(lost, b"lost").set_exception(ObjectNotFoundError("gone"))
    stored_at(late, b"late")
    stored_at(closed, b"closed").cancel()
    for ear, error in ((lost, ObjectNotFoundError), (late, ActorTimeoutError), (closed, ClosedError)):
        with pytest.raises(error):
            read(ear)
    assert (lost.withdrawn, late.withdrawn) == (1, 1)


def test_items_come_in_order_and_are_told_by_half_windows() -> None:
    ear = Ear()
    ear.hear(0, "a", "b", "c")
    ear.hear(3, "d")
    ear.reader.settle(True, b"")
    assert ear.stream is not None
    assert list(ear.stream) == ["a", "b", "c", "d"]
    assert [items for items, _size in ear.told] == []  # it had ended
    other = Ear()
    other.hear(0, "a", "b", "c", "d")
    assert [other.read() for _ in range(4)] == ["a", "b", "c", "d"]
    assert [items for items, _size in other.told] == [2, 4]


def test_what_came_before_an_error_is_read_first() -> None:
    ends: list[Callable[[StreamReader], None]] = [
        lambda reader: reader.settle(False, encode_failure(KeyError("k"))),
        lambda reader: reader.set_exception(KeyError("k")),
    ]
    for end in ends:
        ear = Ear()
        ear.hear(0, 1)
        end(ear.reader)
        assert ear.read() == 1
        with pytest.raises(KeyError):
            ear.read()
        with pytest.raises(StopIteration):
            ear.read()


def test_a_gap_or_a_double_ends_the_stream() -> None:
    for first in (0, 2):
        ear = Ear()
        assert ear.hear(0, "a")
        assert not ear.hear(first, "b")
        assert ear.read() == "a"
        with pytest.raises(ConnectionLostError, match="lost on their way"):
            ear.read()


def test_a_reader_that_lets_go_withdraws_the_call_once() -> None:
    ear = Ear()
    ear.hear(0, 1, 2)
    assert ear.read() == 1
    assert ear.stream is not None
    ear.stream.close()
    assert list(ear.stream) == []
    ear.stream = None
    assert ear.withdrawn == 1
    ear.hear(2, 3)
    dropped = Ear()
    dropped.stream = None
    assert dropped.withdrawn == 1
    ended = Ear()
    ended.reader.settle(True, b"")
    ended.stream = None
    assert ended.withdrawn == 0


def test_an_item_that_does_not_come_in_time_closes_the_stream() -> None:
    ear = Ear(timeout_s=0.01)
    with pytest.raises(ActorTimeoutError, match=r"no further item within 0\.01 s"):
        ear.read()
    assert ear.withdrawn == 1


@pytest.mark.parametrize("act", [lambda ear: ear.hear(0, 7), lambda ear: ear.reader.settle(True, b"")])
def test_a_reader_that_waits_is_woken(act: Callable[[Ear], None]) -> None:
    ear = Ear()
    thread = threading.Thread(target=act, args=[ear])
    thread.start()
    assert ear.stream is not None
    assert next(ear.stream, 7) == 7
    thread.join()


@pytest.mark.anyio
async def test_an_awaiting_reader_is_woken_from_another_thread() -> None:
    ear = Ear()
    stream = ear.stream
    assert stream is not None

    def feed() -> None:
        for number in range(100):
            ear.hear(number, number)
        ear.reader.settle(True, b"")

    thread = threading.Thread(target=feed)
    thread.start()
    assert [item async for item in stream] == list(range(100))
    thread.join()


def test_what_a_reader_tells_names_streams_of_its_own_inbox_only() -> None:
    assert frames.reads_of("_INBOX.secret.0", frames.encode_reads([(7, 0, 10, 100)])) == [
        (("_INBOX.secret.7", 0), 10, 100)
    ]
    for junk in (b"", codec.encode([(7, 0, 10, 100)]), b"[1]", b'[["a", 0, 1, 2]]', b'[[1, 0, "x", 2]]', b"null"):
        with pytest.raises(InvalidMessageError):
            frames.reads_of("_INBOX.secret.0", junk)


# ---- all of it, without a server ------------------------------------------------------------------------


class Counting:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.entered = threading.Event()
        self.told = threading.Event()

    @method(stream_window=4)
    def numbers(self) -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            self.ended.set()

    def wait(self, ctx: ActorContext) -> None:
        self.entered.set()
        if ctx.wait_cancelled(TIMEOUT_S):
            self.told.set()


def test_streams_and_cancels_work_for_actors_in_a_test_s_own_process() -> None:
    counting = Counting()
    with LocalActors() as actors:
        actors.register("counting", counting)
        pool = actors.pool("counting")
        with pool.call().numbers() as numbers:
            assert list(itertools.islice(numbers, 20)) == list(range(20))
        assert counting.ended.wait(TIMEOUT_S)
        future = pool.submit().wait()
        assert counting.entered.wait(TIMEOUT_S)
        assert future.cancel()
        assert counting.told.wait(TIMEOUT_S)
