"""Headers of stored messages, and subjects that a sender chose, are that sender's word: they mislead and stop no reader."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluster.cluster.client import AsyncCluster
from fluster_bus.access.address import BusAddress
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.roles import Role
from fluster_bus.direct import wire
from fluster_bus.messages import Endpoint, EndpointId, JobId
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.stored_messages import calls_feed
from fluster_bus.storage.streams import endpoint_key
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, StartController, job_request

pytestmark = pytest.mark.anyio

BLOCKS = [
    b"NATS/1.0\r\nNats-Service-Error: x\r\nNats-Service-Error-Code: 500\r\n\r\n",
    b"NATS/1.0\r\nStatus: 500\r\n\r\n",
    b"NATS/1.0\r\nStatus: 404\r\n\r\n",
    b"NATS/1.0\r\nStatus: 503\r\nStatus: 204\r\n\r\n",
    b"NATS/1.0 404 Message Not Found\r\n\r\n",
    b"NATS/1.0 \xff\xff\xff \xff\r\n\r\n",
    b"NATS/1.0\r\nNats-Sequence: many\r\nNats-Subject: $KV.other\r\nNats-Time-Stamp: never\r\n\r\n",
    b"NATS/1.0\r\n\xff\xfe: \x00\r\nno colon\r\n: \r\n\r\n",
    b"NATS/1.0\r\n\r\n",
]


async def send_raw(address: BusAddress, subject: bytes, body: bytes, *, block: bytes = b"", reply: bytes = b"") -> None:
    """Publish what no client library would send; returns when the server has taken it."""
    reader, writer = await asyncio.open_connection(*address.servers[0].removeprefix("nats://").split(":"))
    writer.write(wire.connect(user=address.user, **{"pass": address.password}, verbose=False, headers=True))
    head = (
        (b"HPUB %b %b %d %d\r\n%b" % (subject, reply, len(block), len(block) + len(body), block))
        if block
        else (b"PUB %b %b %d\r\n" % (subject, reply, len(body)))
    )
    writer.write(head + body + b"\r\nPING\r\n")
    said = await asyncio.wait_for(reader.readuntil(b"PONG"), 30)
    assert b"-ERR" not in said, said
    writer.close()
    await writer.wait_closed()


def endpoint(name: str) -> Endpoint:
    return Endpoint(endpoint_id=EndpointId("e"), name=name, address="host:1", namespace=NS, lease_s=None)


async def test_records_with_any_headers_are_read_as_records(
    own_server: EmbeddedServer, connect_bus: ConnectBus, start_controller: StartController
) -> None:
    first = await start_controller()
    job = own_server.credentials(Role.JOB, NS)
    names = [f"odd{number}" for number in range(len(BLOCKS))]
    for name, block in zip(names, BLOCKS, strict=True):
        key = buckets.bucket_key(buckets.endpoints_bucket(NS), endpoint_key(endpoint(name)))
        await send_raw(job, key.encode(), endpoint(name).to_json(), block=block)
        await send_raw(job, subjects.durable_calls(NS, "ledger").encode(), b"call", block=block)
    reader = await connect_bus(own_server, Role.JOB, NS)
    registry = Registry(reader, NS)
    await registry.register(endpoint("last"))
    for name in (*names, "last"):
        row = await registry.table.get(endpoint_key(endpoint(name)))
        assert row is not None and row.value.name == name  # noqa: PT018
    assert [each.name for each in await registry.list()] == [*names, "last"]
    calls = [entry.data async for entry in calls_feed(reader, NS, "ledger").stored()]
    assert calls == [b"call"] * len(BLOCKS)
    await first.stop()
    await start_controller()  # reads them all
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        assert await cluster.launch(job_request("after"))


@pytest.mark.parametrize("reply", [b"\xff\xfe", b"_INBOX_client_default.\xff"])
async def test_a_reply_subject_that_is_no_text_ends_no_connection(
    own_server: EmbeddedServer, cluster: AsyncCluster, reply: bytes
) -> None:
    client = own_server.credentials(Role.CLIENT, NS)
    for block in (b"", b"NATS/1.0 \xff\r\n\r\n"):
        await send_raw(client, subjects.jobs_verb(NS, "list").encode(), b"{}", block=block, reply=reply)
    assert JobId(await cluster.launch(job_request("after")))


@given(st.binary(max_size=80), st.booleans())
@example(b" \xff", False)
@example(b"\r\nStatus: 404\r\nNats-Sequence: 1", True)
def test_any_block_of_headers_is_read(raw: bytes, is_stored: bool) -> None:
    own = b"\r\nNats-Sequence: 7\r\nNats-Subject: s\r\n\r\n" if is_stored else b"\r\n\r\n"
    headers = wire.header_block(b"NATS/1.0" + raw + own)
    delivery = Delivery("inbox", b"", "", headers)
    json.dumps(headers).encode()
    if is_stored:
        assert headers["Nats-Sequence"] == "7"
        assert (delivery.status, delivery.error) == (None, None)


def test_headers_larger_than_any_that_are_stored_are_not_read() -> None:
    """Some megabytes of them took the controller seconds, in which it answered no heartbeat."""
    stored = b"A:b\r\n" * (0xFFFF // 5)
    added = b"Nats-Sequence: 7\r\nNats-Subject: %b\r\n\r\n" % (b"x" * 4_096)
    assert wire.header_block(b"NATS/1.0\r\n" + stored + added)["Nats-Sequence"] == "7"
    delivery = wire.delivery(b"subject", b"reply", b"data", b"NATS/1.0\r\n" + b"A:b\r\n" * 1_600_000 + b"\r\n")
    assert delivery == ("subject", b"data", "reply", {})
