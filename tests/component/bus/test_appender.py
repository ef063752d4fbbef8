"""Many messages for one acknowledgement: all stored, in order, each once, whatever else happens to the stream."""

from __future__ import annotations

import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.connection.nats_client import QuickClient
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import StorageError
from fluster_bus.messages import Event, JobId, JobStatus, Namespace, Transition
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.feeds import Feed
from fluster_bus.storage.provisioning import ensure_namespace
from fluster_bus.storage.streams import Appender, append
from tests.component.conftest import ConnectBus

pytestmark = pytest.mark.anyio

NAMESPACE = Namespace("default")
SUBJECT = subjects.events(NAMESPACE, "job")

Message = tuple[str, Event, str]


def _message(number: int) -> Message:
    transition = Transition(number=number, state=JobStatus.RUNNING, time=0.0)
    return SUBJECT, Event(job_id=JobId("job"), transition=transition), f"job.{number}"


async def _stored(bus: Bus) -> list[int]:
    stream, watch = buckets.events_stream(NAMESPACE), subjects.watch_events(NAMESPACE)
    feed = Feed(bus, stream, subject=subjects.events_of_all(NAMESPACE), watch=watch)
    return [Event.from_json(entry.data).transition.number async for entry in feed.stored()]


@pytest.fixture
async def bus(own_server: EmbeddedServer, connect_bus: ConnectBus) -> Bus:
    bus = await connect_bus(own_server)
    await ensure_namespace(bus, NAMESPACE)
    return bus


async def test_batches_are_stored_in_order_each_message_once(bus: Bus) -> None:
    appender = Appender(bus)
    for start in (1, 4, 5, 5, 4, 9):
        await appender.append([_message(number) for number in range(start, start + 4)])
    assert await _stored(bus) == list(range(1, 13))


async def test_another_writer_does_no_harm(bus: Bus) -> None:
    appender = Appender(bus)
    await appender.append([_message(1)])
    subject, message, message_id = _message(100)
    await append(bus, subject, message, message_id=message_id)
    await appender.append([_message(number) for number in range(2, 6)])
    await appender.append([_message(number) for number in range(6, 9)])
    assert await _stored(bus) == [1, 100, *range(2, 9)]


async def test_what_is_not_stored_is_told_and_the_next_try_stores_it(
    bus: Bus, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    appender = Appender(bus)
    await appender.append([_message(1)])
    subject, message, message_id = _message(2)
    with pytest.raises(StorageError):
        await appender.append([_message(3), (subject.replace("default", "nowhere"), message, message_id)])
    await appender.append([_message(number) for number in range(2, 5)])
    assert sorted(await _stored(bus)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("raw", "headers"),
    [
        (b"A: 1\r\nB:2\r\nC:\t3 \r\n\r\n", {"A": "1", "B": "2", "C": "3"}),
        (b"Colon: a:b\r\nno colon\r\nwith space: 1\r\n: 2\r\n\r\n", {"Colon": "a:b", "": "2"}),
        ("Text: héé\r\nNämé: 1\r\n\r\n".encode(), {"Text": "héé"}),
        (b"Bad: \xff\r\n\r\n", {"Bad": "\ufffd"}),
        (b"", {}),
    ],
)
def test_headers_are_read_as_nats_py_reads_them(raw: bytes, headers: dict[str, str]) -> None:
    assert QuickClient._parse_header_lines(raw) == headers  # noqa: SLF001 - nats-py's own, which ours must agree with
    assert super(QuickClient, QuickClient)._parse_header_lines(raw) == headers
