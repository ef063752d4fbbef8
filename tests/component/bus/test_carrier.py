"""What actors need of a connection: the same over a real server and in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from fluster.testing.memory_bus import MemoryBus, MemoryRegistry, matches
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import Carrier, retried_when_connected, wait_to_retry
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery, error_reply
from fluster_bus.core.errors import (
    BusError,
    ClosedError,
    MessageTooLargeError,
    NoRespondersError,
    RequestTimeoutError,
    ServiceError,
)
from fluster_bus.core.names import unique_name
from fluster_bus.messages import EndpointId, Namespace
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.tables import Deleted, Row

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["nats", "memory"])
async def carrier(request: pytest.FixtureRequest, bus: Bus) -> AsyncIterator[Carrier]:
    memory = MemoryBus()
    yield bus if request.param == "nats" else memory
    await memory.close()


class Ear:
    """Listens, and remembers."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Delivery] = asyncio.Queue()

    async def next(self) -> Delivery:
        return await asyncio.wait_for(self.heard.get(), 60)

    def texts(self) -> list[str]:
        return [self.heard.get_nowait().data.decode() for _ in range(self.heard.qsize())]


async def test_messages_arrive_in_order_with_all_that_they_carry(carrier: Carrier) -> None:
    subject, ear = unique_name("to"), Ear()
    await carrier.subscribe(f"{subject}.*.b", ear.heard.put)
    await carrier.publish(f"{subject}.a.b", b"1", reply="_INBOX.x", headers={"K": "v"})
    for number in range(2, 50):
        await carrier.publish(f"{subject}.a.b", str(number).encode())
    await carrier.publish(f"{subject}.a.c", b"not for us")
    await carrier.flush()
    first = await ear.next()
    assert (first.subject, first.data, first.reply, first.headers) == (f"{subject}.a.b", b"1", "_INBOX.x", {"K": "v"})
    assert [(await ear.next()).data for _ in range(2, 50)] == [str(number).encode() for number in range(2, 50)]
    assert ear.heard.empty()


async def test_each_listener_hears_it_and_one_of_a_queue(carrier: Carrier) -> None:
    subject, alone, also, queued = unique_name("to"), Ear(), Ear(), Ear()
    await carrier.subscribe(subject, alone.heard.put)
    await carrier.subscribe(f"{subject}.>", also.heard.put)
    for _ in range(3):
        await carrier.subscribe(subject, queued.heard.put, queue="members")
    for number in range(20):
        await carrier.publish(subject, str(number).encode())
    await carrier.flush()
    assert alone.texts() == [str(number) for number in range(20)]
    assert sorted(queued.texts(), key=int) == [str(number) for number in range(20)]
    assert also.texts() == []


async def test_who_asks_where_nobody_listens_is_told(carrier: Carrier) -> None:
    ear, inbox = Ear(), carrier.inbox()
    assert subjects.is_inbox(inbox)
    await carrier.subscribe(f"{inbox}.*", ear.heard.put)
    await carrier.publish(unique_name("nobody"), b"", reply=f"{inbox}.1")
    answer = await ear.next()
    assert (answer.subject, answer.status) == (f"{inbox}.1", "503")


async def test_a_request_has_its_answer_or_says_why_there_is_none(carrier: Carrier) -> None:
    subject = unique_name("service")

    async def answer(delivery: Delivery) -> None:
        if delivery.data == b"bad":
            data, headers = error_reply("Bad", ValueError("no"))
            await carrier.publish(delivery.reply, data, headers=headers)
        elif delivery.data != b"silence":
            await carrier.publish(delivery.reply, delivery.data * 2)

    with pytest.raises(NoRespondersError, match=f"no program listens on {subject}"):
        await carrier.request(subject)
    await carrier.subscribe(subject, answer)
    assert (await carrier.request(subject, b"a")).data == b"aa"
    with pytest.raises(ServiceError, match="no") as caught:
        await carrier.request(subject, b"bad")
    assert caught.value.code == "Bad"
    with pytest.raises(RequestTimeoutError, match=r"within 0\.05 s"):
        await carrier.request(subject, b"silence", timeout_s=0.05)


async def test_a_drained_interest_has_handled_what_was_sent_before(carrier: Carrier) -> None:
    subject, ear = unique_name("to"), Ear()
    interest = await carrier.subscribe(subject, ear.heard.put)
    for number in range(10):
        await carrier.publish(subject, str(number).encode())
    await interest.drain()
    assert len(ear.texts()) == 10
    await carrier.publish(subject, b"too late")
    await carrier.flush()
    await interest.drain()
    await interest.unsubscribe()
    assert ear.texts() == []


async def test_a_callback_that_fails_does_not_end_the_interest(carrier: Carrier) -> None:
    subject, ear = unique_name("to"), Ear()

    def hear(delivery: Delivery) -> None:
        if delivery.data == b"bad":
            raise ValueError("bad")
        ear.heard.put_nowait(delivery)

    await carrier.subscribe(subject, hear)
    await carrier.publish(subject, b"bad")
    await carrier.publish(subject, b"good")
    assert (await ear.next()).data == b"good"


async def test_what_is_too_large_is_refused(bus: Bus) -> None:
    assert bus.max_payload == 8 << 20
    with pytest.raises(MessageTooLargeError, match="has 9,000,000 bytes, over the server's limit of 8,388,608"):
        await bus.publish("anywhere", bytes(9_000_000))


async def test_memory_carries_what_is_larger() -> None:
    bus = MemoryBus()
    ear = Ear()
    await bus.subscribe("anywhere", ear.heard.put)
    await bus.publish("anywhere", bytes(9_000_000))
    assert len((await ear.next()).data) == 9_000_000 <= bus.max_payload
    await bus.close()


async def test_what_is_closed_says_so() -> None:
    bus = MemoryBus()
    forever = asyncio.Event()

    async def wait() -> None:
        await forever.wait()

    bus.spawn(wait(), "waiting")
    await bus.close()
    await bus.close()
    assert not bus.connected
    for use in (bus.publish("a"), bus.subscribe("a", lambda _delivery: None), bus.flush(), bus.wait_connected()):
        with pytest.raises(ClosedError):
            await use


async def test_what_failed_is_tried_again_until_it_succeeds(carrier: Carrier) -> None:
    told: list[str] = []
    outcomes = [BusError("first"), RequestTimeoutError("second")]

    async def attempt() -> int:
        if outcomes:
            raise outcomes.pop(0)
        return 7

    def on_error(error: BusError) -> None:
        told.append(str(error))

    assert await retried_when_connected(carrier, attempt, on_error=on_error, pause_s=0) == 7
    assert told == ["first", "second"]


async def test_an_error_ends_the_attempts_that_is_raised_at_once_or_by_what_hears_it(carrier: Carrier) -> None:
    attempts: list[BusError] = []

    async def attempt() -> None:
        attempts.append(MessageTooLargeError("too large"))
        raise attempts[-1]

    async def on_error(error: BusError) -> None:
        raise ServiceError("hopeless", "it is hopeless") from error

    with pytest.raises(MessageTooLargeError):
        await retried_when_connected(carrier, attempt, on_error=on_error, unless=(MessageTooLargeError,))
    with pytest.raises(ServiceError, match="hopeless"):
        await retried_when_connected(carrier, attempt, on_error=on_error)
    assert len(attempts) == 2


async def test_nothing_is_tried_again_when_it_is_closed() -> None:
    bus = MemoryBus()
    await bus.close()
    told: list[BusError] = []
    with pytest.raises(ClosedError):
        await wait_to_retry(bus)
    with pytest.raises(ClosedError):
        await retried_when_connected(bus, lambda: bus.publish("a"), on_error=told.append)
    assert len(told) == 1


@pytest.mark.parametrize(
    ("pattern", "subject", "heard"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*.b.>", "a.c.d", False),
    ],
)
async def test_patterns(pattern: str, subject: str, heard: bool) -> None:
    assert matches(pattern, subject) is heard


@pytest.fixture(params=["nats", "memory"])
async def registry(request: pytest.FixtureRequest, bus: Bus, namespace: Namespace) -> Registry:
    return Registry(bus, namespace) if request.param == "nats" else MemoryRegistry(namespace)


async def test_a_registry_tells_who_is_there_and_who_comes_and_goes(registry: Registry) -> None:
    first, second = (registry.endpoint("calc", f"to.{each}", endpoint_id=EndpointId(each)) for each in ("one", "two"))
    other = registry.endpoint("other", "to.other")
    for each in (first, other):
        await registry.register(each)
    seen: list[object] = []
    async with asyncio.timeout(60), aclosing(registry.table.watch(buckets.endpoints_named("calc"))) as changes:
        async for change in changes:
            match change:
                case Row():
                    seen.append(change.value.endpoint_id)
                case Deleted():
                    seen.append(f"{subjects.last_token(change.key)} left")
                case CaughtUp():
                    seen.append("caught up")
                    await registry.register(other)
                    await registry.register(second)
                    await registry.register(first)
                    await registry.unregister(second)
            if seen[-1] == "two left":
                break
    assert seen == ["one", "caught up", "two", "one", "two left"]
    assert await registry.lookup("calc") == [first]
    assert {each.name for each in await registry.list()} == {"calc", "other"}
    await registry.unregister(first)
    await registry.unregister(first)
    assert await registry.lookup("calc") == []
