"""An archive is sent to a server that has said where it takes it, and may not be heard there yet, or not any more."""

from __future__ import annotations

import asyncio
import re

import pytest

from fluster_bus.backups.archive import ArchiveSender
from fluster_bus.connection.bus import Bus
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BackupError, NoRespondersError
from fluster_bus.core.names import unique_name

pytestmark = pytest.mark.anyio


class Watched:
    """Sends requests, and tells when one of them has reached nothing that listens."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.requests = 0
        self.unheard = asyncio.Event()

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> Delivery:
        self.requests += 1
        try:
            return await self._bus.request(subject, data, timeout_s=timeout_s)
        except NoRespondersError:
            self.unheard.set()
            raise


async def test_the_first_chunk_is_sent_until_the_server_that_takes_it_is_heard_of(bus: Bus) -> None:
    where, watched, taken = unique_name("restore"), Watched(bus), list[bytes]()

    async def take(delivery: Delivery) -> None:
        taken.append(delivery.data)
        await bus.publish(delivery.reply, b"taken")

    sending = asyncio.create_task(ArchiveSender(watched, "S", where, heard_within_s=60).send(b"first", 60))
    await watched.unheard.wait()
    assert not sending.done()
    subscription = await bus.subscribe(where, take)
    assert (await sending, taken) == (b"taken", [b"first"])
    await subscription.drain()


async def test_servers_that_take_no_archive_at_all_are_of_an_older_release(bus: Bus) -> None:
    watched = Watched(bus)
    with pytest.raises(
        BackupError, match="the servers take no archive: their configuration, or the accounts that they know"
    ):
        await ArchiveSender(watched, "S", unique_name("restore"), heard_within_s=0.5).send(b"first", 60)
    assert watched.requests > 1


async def test_a_server_that_ends_in_the_middle_is_named_as_the_reason(bus: Bus) -> None:
    where, watched = unique_name("restore"), Watched(bus)
    sender = ArchiveSender(watched, "KV_fluster_jobs", where)
    subscription = await bus.subscribe(where, lambda delivery: bus.publish(delivery.reply))
    assert await sender.send(b"first", 60) == b""
    await subscription.drain()
    said = "takes no more of it: it has ended, or lost its connection to the others"
    with pytest.raises(BackupError, match=re.escape(f"stream KV_fluster_jobs from its archive {said}")):
        await sender.send(b"second", 60)
    assert watched.requests == 2
