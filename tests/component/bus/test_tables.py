"""Records in buckets: compare-and-set, and a watch that misses nothing and doubles nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, server_subjects, stream_bounds, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import (
    BusError,
    KeyExistsError,
    MessageTooLargeError,
    RevisionConflictError,
    StorageError,
    StreamNotFoundError,
)
from fluster_bus.messages import Capacity, Done, Event, JobId, JobStatus, Namespace, Transition
from fluster_bus.messages.parts.model import Message
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage import feeds, provisioning
from fluster_bus.storage.feeds import CaughtUp, Feed
from fluster_bus.storage.stored_messages import store_call
from fluster_bus.storage.streams import append
from fluster_bus.storage.tables import Deleted, Row, Table
from tests.component.conftest import ConnectBus
from tests.insides import nats_client_of, subscriptions_of
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

Change = Row["Note"] | Deleted | CaughtUp


class Note(Message):
    """A record for these tests."""

    text: str = ""


def _notes(bus: Bus, namespace: str) -> Table[Note]:
    """In the bucket of a namespace's jobs, which takes any record."""
    return Table(
        bus,
        buckets.jobs_bucket(namespace),
        lambda _key, data: Note.from_json(data),
        watch=lambda key: subjects.watch_jobs(namespace, key),
    )


@pytest.fixture
def notes(bus: Bus, namespace: Namespace) -> Table[Note]:
    return _notes(bus, namespace)


async def _next(watch: AsyncGenerator[Change]) -> Change:
    async with asyncio.timeout(60):
        return await anext(watch)


# ---- records --------------------------------------------------------------------------------------------


async def test_a_record_comes_back(notes: Table[Note]) -> None:
    assert await notes.get("a") is None
    revision = await notes.create("a", Note(text="first"))
    assert await notes.get("a") == Row("a", Note(text="first"), revision)
    later = await notes.update("a", Note(text="second"), revision)
    assert later > revision
    assert await notes.get("a") == Row("a", Note(text="second"), later)
    await notes.put("a", Note(text="third"))
    found = await notes.get("a")
    assert found is not None
    assert found.value.text == "third"


async def test_what_exists_is_not_created(notes: Table[Note]) -> None:
    await notes.create("a", Note())
    with pytest.raises(KeyExistsError, match="'a'"):
        await notes.create("a", Note(text="again"))


async def test_of_two_changes_from_one_revision_one_wins(notes: Table[Note]) -> None:
    revision = await notes.create("a", Note())
    results = await asyncio.gather(
        *(notes.update("a", Note(text=str(each)), revision) for each in range(20)), return_exceptions=True
    )
    won = [each for each in results if isinstance(each, int)]
    lost = [each for each in results if isinstance(each, RevisionConflictError)]
    assert (len(won), len(lost)) == (1, 19)
    found = await notes.get("a")
    assert found is not None
    assert found.revision == won[0]
    assert "'a'" in str(lost[0])


async def test_of_two_creations_one_wins(notes: Table[Note]) -> None:
    for round_ in range(3):  # the second and third of a key that was deleted
        results = await asyncio.gather(
            *(notes.create("a", Note(text=f"{round_}.{each}")) for each in range(10)), return_exceptions=True
        )
        assert sum(isinstance(each, int) for each in results) == 1
        assert sum(isinstance(each, KeyExistsError) for each in results) == 9, results
        await notes.delete("a")


async def test_deleting(notes: Table[Note]) -> None:
    revision = await notes.create("a", Note())
    with pytest.raises(RevisionConflictError):
        await notes.delete("a", revision=revision + 1)
    await notes.delete("a", revision=revision)
    assert await notes.get("a") is None
    assert await notes.rows() == []
    with pytest.raises(RevisionConflictError):
        await notes.update("a", Note(), revision)
    again = await notes.create("a", Note(text="again"))
    assert again > revision
    assert await notes.get("a") == Row("a", Note(text="again"), again)
    await notes.delete("never-there")


async def test_the_mark_of_a_deletion_can_be_forgotten(bus: Bus, notes: Table[Note]) -> None:
    await notes.create("a", Note())
    await notes.create("b", Note())
    await notes.delete("a")
    async with aclosing(notes.watch()) as watch:
        first = await _next(watch)
        second = await _next(watch)
    assert isinstance(first, Row)
    assert first.key == "b"
    assert isinstance(second, Deleted)
    await notes.forget_deleted(second)
    async with aclosing(notes.watch()) as watch:
        assert isinstance(await _next(watch), Row)
        assert isinstance(await _next(watch), CaughtUp)
    await notes.create("a", Note(text="again"))


async def test_no_bucket(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_STREAM_PATIENCE_S", 0.2)
    nowhere = _notes(bus, "nowhere")
    for wrong in (nowhere.get("a"), nowhere.create("a", Note()), nowhere.delete("a"), _next(nowhere.watch())):
        with pytest.raises(StreamNotFoundError):
            await wrong
    with pytest.raises(BusError):
        await nowhere.rows()


async def test_rows_by_key(notes: Table[Note]) -> None:
    for key in ("a", "a.0", "a.1", "b", "b.0"):
        await notes.create(key, Note(text=key))
    assert [row.key for row in await notes.rows("a.*")] == ["a.0", "a.1"]
    assert [row.key for row in await notes.rows("b")] == ["b"]
    assert [row.key for row in await notes.rows("*")] == ["a", "b"]
    assert len(await notes.rows()) == 5


@pytest.mark.parametrize("count", [255, 256, 257, 1_100])
async def test_more_rows_than_one_answer_holds(bus: Bus, notes: Table[Note], count: int) -> None:
    await asyncio.gather(*(notes.create(f"job{each}.0", Note(text=str(each))) for each in range(count)))
    await notes.delete("job7.0")
    rows = await notes.rows()
    assert {row.key for row in rows} == {f"job{each}.0" for each in range(count) if each != 7}
    assert [row.revision for row in rows] == sorted(row.revision for row in rows)
    assert len(await notes.rows("job1.*")) == 1
    assert await notes.rows("none.*") == []


async def test_large_rows(notes: Table[Note]) -> None:
    text = "x" * (3 << 20)
    for each in range(6):
        await notes.create(f"a{each}", Note(text=text))
    assert [row.value.text == text for row in await notes.rows()] == [True] * 6


async def test_a_row_that_cannot_be_read_does_not_hide_the_others(
    bus: Bus, namespace: Namespace, notes: Table[Note], caplog: pytest.LogCaptureFixture
) -> None:
    """A client that may write one key of a bucket must not be able to stop all who read it."""
    bucket = buckets.jobs_bucket(namespace)
    await notes.create("a", Note())
    await bus.request(buckets.bucket_key(bucket, "bad"), b"nonsense")
    await notes.create("c", Note())
    assert [row.key for row in await notes.rows()] == ["a", "c"]
    assert "bad in bucket" in caplog.text
    async with aclosing(notes.watch()) as watch:
        assert [type(await _next(watch)) for _ in range(3)] == [Row, Row, CaughtUp]
        await bus.request(buckets.bucket_key(bucket, "a"), b"nonsense")
        await notes.put("c", Note(text="on"))
        change = await _next(watch)
        assert isinstance(change, Row)
        assert change.key == "c"


# ---- watches --------------------------------------------------------------------------------------------


async def test_a_watch_tells_what_is_there_then_what_changes(notes: Table[Note]) -> None:
    revision = await notes.create("a", Note(text="1"))
    await notes.create("b", Note(text="1"))
    async with aclosing(notes.watch()) as watch:
        assert [await _next(watch) for _ in range(3)] == [
            Row("a", Note(text="1"), revision),
            Row("b", Note(text="1"), revision + 1),
            CaughtUp(),
        ]
        await notes.update("a", Note(text="2"), revision)
        await notes.delete("b")
        await notes.create("b", Note(text="3"))
        assert [await _next(watch) for _ in range(3)] == [
            Row("a", Note(text="2"), revision + 2),
            Deleted("b", revision + 3),
            Row("b", Note(text="3"), revision + 4),
        ]


async def test_a_watch_of_some_keys(notes: Table[Note]) -> None:
    await notes.create("a.0", Note())
    async with aclosing(notes.watch("a.*")) as watch:
        await _next(watch)
        assert await _next(watch) == CaughtUp()
        await notes.create("b.0", Note())
        await notes.create("a.1", Note())
        change = await _next(watch)
        assert isinstance(change, Row)
        assert change.key == "a.1"


async def test_an_empty_bucket_is_caught_up_at_once(notes: Table[Note]) -> None:
    async with aclosing(notes.watch()) as watch:
        assert await _next(watch) == CaughtUp()


async def test_changes_while_the_watch_begins(notes: Table[Note]) -> None:
    """Whatever is written while a watch reads what is there comes once, and in order."""
    for _ in range(10):
        seen: list[Row[Note]] = []
        writing = asyncio.create_task(_write(notes, 300))
        async with aclosing(notes.watch()) as watch:
            while len(seen) == 0 or seen[-1].value.text != "last":
                change = await _next(watch)
                if isinstance(change, Row):
                    seen.append(change)
        await writing
        _check_order(seen)
        await notes.put("end", Note())


async def _write(notes: Table[Note], count: int) -> None:
    for start in range(0, count, 30):
        await asyncio.gather(*(notes.put(f"k{each % 7}", Note(text=str(each))) for each in range(start, start + 30)))
    await notes.put("end", Note(text="last"))


def _check_order(seen: list[Row[Note]]) -> None:
    revisions = [row.revision for row in seen]
    assert revisions == sorted(set(revisions)), "once each, in order"


async def test_a_slow_reader_reads_on_from_the_stream(notes: Table[Note], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_MAX_WAITING", 10)
    async with aclosing(notes.watch()) as watch:
        assert await _next(watch) == CaughtUp()
        await _write(notes, 300)
        latest: dict[str, Row[Note]] = {}
        seen: list[Row[Note]] = []
        while not seen or seen[-1].value.text != "last":
            change = await _next(watch)
            if isinstance(change, Row):
                seen.append(change)
                latest[change.key] = change
        _check_order(seen)
        assert latest == {row.key: row for row in await notes.rows()}


def _callbacks(bus: Bus) -> int:
    return len(bus._on_reconnect)  # noqa: SLF001 - what is left behind does nothing that shows


async def test_a_watch_that_is_left_leaves_nothing(bus: Bus, namespace: Namespace, notes: Table[Note]) -> None:
    before = nats_client_of(bus).stats["in_msgs"]
    async with aclosing(notes.watch()) as watch:
        assert await _next(watch) == CaughtUp()
        callbacks = _callbacks(bus)
    assert _callbacks(bus) == callbacks - 1
    assert subjects.watch_jobs(namespace) not in subscriptions_of(bus)
    assert nats_client_of(bus).stats["in_msgs"] > before


@pytest.mark.parametrize("stopped", ["SIGTERM", "SIGKILL"])
async def test_watches_go_on_when_the_server_is_started_again(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stopped: str
) -> None:
    """Changes all around the restart, by a connection that comes back sooner or later than the watcher's."""
    watcher, writer = await connect_bus(own_server), await connect_bus(own_server)
    await provisioning.ensure_namespace(watcher, "default")
    notes = _notes(watcher, "default")
    seen: list[Row[Note] | Deleted] = []
    caught_up = 0

    async def watching() -> None:
        nonlocal caught_up
        async with aclosing(notes.watch()) as watch:
            async for change in watch:
                if isinstance(change, CaughtUp):
                    caught_up += 1
                else:
                    seen.append(change)

    task = asyncio.create_task(watching())
    await wait_until_async(lambda: caught_up == 1)
    table = _notes(writer, "default")
    dice = random.Random(1)
    for round_ in range(3):
        for each in range(50):
            await table.put(f"k{dice.randint(0, 9)}", Note(text=f"{round_}.{each}"))
        assert own_server.pid is not None
        os.kill(own_server.pid, getattr(signal, stopped))
        own_server.wait(10)
        own_server.start()
        await _until_writable(table, Note(text=f"the end of {round_}"))
    await wait_until_async(
        lambda: seen and isinstance(seen[-1], Row) and seen[-1].value.text == "the end of 2", describe=lambda: seen[-3:]
    )
    await wait_until_async(lambda: caught_up == 4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    revisions = [change.revision for change in seen]
    assert revisions == sorted(set(revisions)), "once each, in order"
    assert {change.key: change for change in seen} == {row.key: row for row in await table.rows()}


async def _until_writable(table: Table[Note], note: Note) -> None:
    """The server's streams are back a moment after its connections."""

    async def write() -> bool:
        try:
            await table.put("end", note)
        except BusError:
            return False
        return True

    await wait_until_async(write)


async def test_a_watch_that_begins_while_there_is_no_server(
    own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(own_server)
    await provisioning.ensure_namespace(bus, "default")
    notes = _notes(bus, "default")
    await notes.put("a", Note())
    own_server.stop()
    await wait_until_async(lambda: not bus.connected)
    async with aclosing(notes.watch()) as watch:
        first = asyncio.create_task(_next(watch))
        await asyncio.sleep(0)
        own_server.start()
        change = await first
        assert isinstance(change, Row)
        assert await _next(watch) == CaughtUp()


# ---- streams --------------------------------------------------------------------------------------------


def _event(number: int) -> Event:
    transition = Transition(number=number, state=JobStatus.PENDING, time=0)
    return Event(job_id=JobId("a"), transition=transition)


async def test_what_has_one_id_is_stored_once(bus: Bus, namespace: Namespace) -> None:
    subject = subjects.events(namespace, "a")
    first = await append(bus, subject, _event(1), message_id="a.1")
    assert await append(bus, subject, _event(1), message_id="a.1") == first
    assert await append(bus, subject, _event(2), message_id="a.2") == first + 1
    feed = Feed(
        bus,
        buckets.events_stream(namespace),
        subject=subjects.events_of_all(namespace),
        watch=subjects.watch_events(namespace),
    )
    stored = [Event.from_json(entry.data).transition.number async for entry in feed.stored()]
    assert stored == [1, 2]
    last = await feed.last()
    assert last is not None
    assert last.sequence == first + 1
    assert last.subject == subject
    assert [entry.sequence async for entry in feed.stored(since=last.time)] == [last.sequence]
    assert [entry.sequence async for entry in feed.stored(start=first + 1)] == [last.sequence]


async def test_an_empty_stream_has_no_last(bus: Bus, namespace: Namespace) -> None:
    feed = Feed(
        bus,
        buckets.logs_stream(namespace),
        subject=subjects.logs_of_all(namespace),
        watch=subjects.watch_logs(namespace),
    )
    assert await feed.last() is None
    assert [entry async for entry in feed.stored()] == []


async def test_large_messages_are_read_some_at_a_time(bus: Bus, namespace: Namespace) -> None:
    stream, subject = buckets.logs_stream(namespace), subjects.logs(namespace, "a", "0", "1", "stdout")
    for number in range(12):
        await bus.request(subject, bytes([number]) * (1 << 20))
    asked: list[Delivery] = []
    subscription = await bus.subscribe(server_subjects.direct_get(stream), asked.append)
    feed = Feed(bus, stream, subject=subject, watch=subjects.watch_logs(namespace))
    assert [entry.data[0] async for entry in feed.stored()] == list(range(12))
    await bus.flush()
    await subscription.unsubscribe()
    assert 3 <= len(asked) <= 4


async def test_no_stream_takes_it(bus: Bus) -> None:
    with pytest.raises(StorageError, match="no stream takes"):
        await append(bus, subjects.events("nowhere", "a"), _event(1), message_id="a.1")


async def test_making_what_is_there_changes_nothing(bus: Bus, namespace: Namespace, notes: Table[Note]) -> None:
    await notes.create("a", Note(text="stays"))
    await asyncio.gather(*(provisioning.ensure_namespace(bus, namespace) for _ in range(3)))
    await asyncio.gather(*(provisioning.ensure_system(bus) for _ in range(3)))
    assert len(await notes.rows()) == 1


async def test_calls_secrets_and_objects_are_bounded_as_is_given(bus: Bus, namespace: Namespace) -> None:
    day = 86_400
    given = stream_bounds.NamespaceBounds(
        max_calls_of_actor=2,
        max_call_bytes=2 << 20,
        secrets_kept_s=day,
        max_secrets=3,
        payloads_kept_s=day,
        workspaces_kept_s=9 * day,
    )
    await provisioning.ensure_namespace(bus, namespace, given)
    names = (
        buckets.secrets_stream,
        partial(buckets.objects_stream, "payloads"),
        partial(buckets.objects_stream, "bundles"),
    )
    infos = [(await bus.jetstream.stream_info(each(namespace))).config for each in names]
    assert [(info.max_age, info.max_msgs) for info in infos] == [(day, 3), (day, 8_192), (9 * day, 8_192)]
    store = partial(store_call, bus, namespace, "ledger", reply="")
    for number in range(2):
        assert await store(bytes(3 << 19), call_id=str(number))
    with pytest.raises(StorageError, match="maximum messages per subject"):
        await store(b"", call_id="third")
    with pytest.raises(MessageTooLargeError, match="pass its name"):
        await store(bytes(2 << 20), call_id="large")


async def test_no_call_that_waits_is_dropped_for_a_lower_bound(bus: Bus, namespace: Namespace) -> None:
    stream = buckets.calls_stream(namespace)
    for number in range(3):
        await store_call(bus, namespace, "ledger", b"", call_id=str(number), reply="")
    for most, kept in ((2, 100_000), (3, 3)):
        await provisioning.ensure_namespace(bus, namespace, stream_bounds.NamespaceBounds(max_calls_of_actor=most))
        info = await bus.jetstream.stream_info(stream)
        assert (info.state.messages, info.config.max_msgs_per_subject) == (3, kept)


async def test_a_stream_that_cannot_be_made_is_named_and_keeps_no_other_back(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provisioning, "_CREATE_TIMEOUT_S", 4.0)
    await bus.jetstream.add_stream(name="IN_THE_WAY", subjects=[subjects.logs_of_all("crowded")])
    try:
        with pytest.raises(StorageError, match=f"stream {buckets.logs_stream('crowded')} could not be made"):
            await provisioning.ensure_namespace(bus, "crowded")
    finally:
        await bus.jetstream.delete_stream("IN_THE_WAY")
    for name in (f"KV_{buckets.jobs_bucket('crowded')}", buckets.events_stream("crowded")):
        assert (await bus.jetstream.stream_info(name)).config.name == name


async def test_one_row_cannot_wipe_the_others(bus: Bus, namespace: Namespace, notes: Table[Note]) -> None:
    """The roll-up of one who may write a single key."""
    await notes.create("a", Note())
    key = buckets.bucket_key(buckets.jobs_bucket(namespace), "b")
    answer = await bus.request(key, b"{}", headers={"Nats-Rollup": "all"})
    assert b"error" in answer.data
    assert [row.key for row in await notes.rows()] == ["a"]


async def test_messages_with_fields_of_another_version_stay_whole(bus: Bus, namespace: Namespace) -> None:
    table = Table(
        bus,
        buckets.jobs_bucket(namespace),
        lambda _key, data: Capacity.from_json(data),
        watch=lambda key: subjects.watch_jobs(namespace, key),
    )
    await bus.request(buckets.bucket_key(buckets.jobs_bucket(namespace), "a"), b'{"cpu": 1, "colour": "green"}')
    row = await table.get("a")
    assert row is not None
    await table.update("a", row.value.model_copy(update={"cpu": 2}), row.revision)
    raw = Table(bus, buckets.jobs_bucket(namespace), lambda _key, data: Done.from_json(data), watch=lambda key: key)
    stored = await raw.get("a")
    assert stored is not None
    assert stored.value.model_extra == {"cpu": 2, "colour": "green"}
