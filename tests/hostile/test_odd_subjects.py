"""Subjects and reply subjects with bytes that some take for white space: those who hear them stay connected, and read on."""

from __future__ import annotations

import asyncio

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.roles import Role
from fluster_bus.direct import wire
from fluster_bus.direct.lane import Lane
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.streams import endpoint_key
from fluster_bus.storage.tables import Row
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController, job_request
from tests.hostile.test_stored_headers import endpoint, send_raw

pytestmark = pytest.mark.anyio

# What Python takes for white space, and NATS for a part of a subject.
ODD = [b"a\x0bb", b"a\x0c7", b"\x0b", b"a\x1cb", b"a\xc2\x85", b"\xa0", b"\xe2\x80\xa8", b"a\x00b", b"'"]
NOT_BYTES = ["vertical-tab", "form-feed", "only", "separator", "next-line", "no-text", "line", "nul", "quote"]


@pytest.mark.parametrize("odd", ODD, ids=NOT_BYTES)
async def test_who_hears_an_odd_subject_stays_connected(
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    controller: RunningController,
    cluster: AsyncCluster,
    odd: bytes,
) -> None:
    lost: list[str] = []
    reader = await connect_bus(own_server, Role.CLIENT, NS)
    for who, bus in (("controller", controller.bus), ("watcher", reader), ("client", cluster.bus)):
        bus.on_disconnect(lambda who=who: lost.append(who))  # type: ignore[misc]
    registry = Registry(reader, NS)
    watched = registry.table.watch()
    job = own_server.credentials(Role.JOB, NS)
    bucket = buckets.bucket_key(buckets.endpoints_bucket(NS), "").encode()
    try:
        await anext(watched)
        await send_raw(job, subjects.jobs_verb(NS, "list").encode(), b"{}", reply=b"_INBOX.default.x." + odd)
        for key in (odd, endpoint_key(endpoint("misled")).encode() + odd):
            await send_raw(job, bucket + key, endpoint("misled").to_json(), reply=b"_INBOX.default.x." + odd)
        await reader.flush()
        writer = await connect_bus(own_server, Role.JOB, NS)
        await Registry(writer, NS).register(endpoint("last"))
        seen: object = None
        while not isinstance(seen, Row):  # the removal of the others is shown, too
            seen = await asyncio.wait_for(anext(watched), 30)
        assert seen.value.name == "last"  # the others are under keys that are not theirs
    finally:
        await watched.aclose()
    assert await cluster.launch(job_request("after"))
    assert lost == []


@pytest.mark.parametrize("odd", ODD, ids=NOT_BYTES)
async def test_a_direct_connection_hears_an_odd_reply_subject(own_server: EmbeddedServer, odd: bytes) -> None:
    heard: asyncio.Queue[Delivery] = asyncio.Queue()
    loop, lost = asyncio.get_running_loop(), asyncio.Event()
    lane = Lane(own_server.credentials(Role.JOB, NS), "test", on_disconnect=lambda: loop.call_soon_threadsafe(lost.set))
    subject = subjects.actor_any(NS, "ledger", "add")
    lane.subscribe(subject, lambda delivery: loop.call_soon_threadsafe(heard.put_nowait, delivery))
    lane.start()
    try:
        await asyncio.to_thread(lane.wait_connected, 30)
        seen = asyncio.Event()
        lane.when_seen(lambda: loop.call_soon_threadsafe(seen.set))
        await asyncio.wait_for(seen.wait(), 30)
        client = own_server.credentials(Role.CLIENT, NS)
        for block in (b"", b"NATS/1.0\r\nA: b\r\n\r\n"):
            await send_raw(client, subject.encode(), b"body", block=block, reply=b"_INBOX.default.x." + odd)
            delivery = await asyncio.wait_for(heard.get(), 30)
            assert (delivery.subject, delivery.data) == (subject, b"body")
            assert delivery.reply == (b"_INBOX.default.x." + odd).decode("utf-8", "replace")
    finally:
        await asyncio.to_thread(lane.close)
    assert not lost.is_set()


def test_a_headers_value_keeps_what_is_no_blank() -> None:
    assert wire.parse_headers("Nats-Subject:  $KV.b.key\x0b\x85 \r\n".encode())["Nats-Subject"] == "$KV.b.key\x0b\x85"
