"""A worker listens on just the classes that it has room for, whatever happens while that changes."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import DisconnectedError, NoRespondersError
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, JobId, Namespace, Offer, OfferReply, WorkerId
from fluster_bus.server import EmbeddedServer
from fluster_services.capacity import CapacityClass, classes_covered
from fluster_services.worker.attempts.offers import ClassOffers
from tests.component.conftest import ConnectBus, freeze_server, kill_server
from tests.insides import subscriptions_of
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

GIB = 1 << 30
A, B = Namespace("a"), Namespace("b")
FULL = Capacity(cpu=4, memory=4 * GIB, namespaces=(A, B))
HALF, NONE = Capacity(cpu=2, memory=2 * GIB, namespaces=(A, B)), Capacity(namespaces=(A, B))
OFFER = Offer(namespace=Namespace("default"), job_id=JobId("a"), task=0, attempt=1, revision=1)


async def _accept(_offer: Offer, _subject: str) -> OfferReply:
    return OfferReply(worker_id=WorkerId("w1"), accepted=True)


def _listened(bus: Bus) -> Counter[str]:
    prefixes = tuple(subjects.dispatch_any(namespace).removesuffix(subjects.ANY_TAIL) for namespace in (A, B))
    return Counter(each for each in subscriptions_of(bus) if each.startswith(prefixes))


def _covered(free: Capacity) -> Counter[str]:
    return Counter(each.subject for each in classes_covered(free))


async def _listens(bus: Bus, offered: CapacityClass) -> bool:
    try:
        await bus.request(offered.subject, OFFER.to_json())
    except NoRespondersError:
        return False
    return True


async def test_the_classes_follow_the_free_capacity(own_server: EmbeddedServer, connect_bus: ConnectBus) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    asker = await connect_bus(own_server, Role.SERVICE)
    offers = ClassOffers(bus, _accept)
    for free in (FULL, HALF, FULL, NONE, HALF):
        await offers.cover(lambda: free)  # noqa: B023
        assert _listened(bus) == _covered(free)
        for each in sorted(classes_covered(FULL))[::7]:
            assert await _listens(asker, each) == (each in classes_covered(free))


async def test_changes_that_overlap_end_as_the_last_one_wanted(
    own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    offers = ClassOffers(bus, _accept)
    free = FULL
    changes = []
    for each in (FULL, HALF, NONE, HALF, FULL, HALF):
        free = each
        changes.append(asyncio.create_task(offers.cover(lambda: free)))  # noqa: B023 - the last one counts
        await asyncio.sleep(0)
    await asyncio.gather(*changes)
    assert _listened(bus) == _covered(HALF)


async def test_no_offer_is_lost_while_a_class_is_left(own_server: EmbeddedServer, connect_bus: ConnectBus) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    asker = await connect_bus(own_server, Role.SERVICE)
    offers = ClassOffers(bus, _accept)
    largest = max(classes_covered(FULL))
    for _ in range(20):
        await offers.cover(lambda: FULL)
        asking = [asyncio.create_task(_listens(asker, largest)) for _ in range(20)]
        await asyncio.sleep(0)
        await offers.cover(lambda: NONE)
        await asyncio.gather(*asking)  # a lost one would run into its timeout
        assert not await _listens(asker, largest)


@pytest.mark.parametrize(
    ("before", "after"), [(HALF, FULL), (FULL, HALF), (FULL, Capacity(cpu=8, memory=GIB, namespaces=(A,)))]
)
async def test_a_change_that_the_loss_of_the_server_interrupts(
    own_server: EmbeddedServer, connect_bus: ConnectBus, before: Capacity, after: Capacity
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    offers = ClassOffers(bus, _accept)
    await offers.cover(lambda: before)
    freeze_server(own_server)
    changing = asyncio.create_task(offers.cover(lambda: after))
    for _ in range(10):
        await asyncio.sleep(0)  # it has sent what it can, and waits for an answer that a frozen server does not give
    assert not changing.done()
    kill_server(own_server)
    results = await asyncio.gather(changing, return_exceptions=True)
    assert isinstance(results[0], DisconnectedError | None)
    await wait_until_async(lambda: not bus.connected)
    own_server.start()
    await bus.wait_connected(60)
    await offers.cover(lambda: after)
    assert _listened(bus) == _covered(after)
    asker = await connect_bus(own_server, Role.SERVICE)
    for each in sorted(classes_covered(before) | classes_covered(after))[::5]:
        assert await _listens(asker, each) == (each in classes_covered(after))


async def test_room_that_is_given_away_is_told_of_once_in_a_moment(
    own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    offers = ClassOffers(await connect_bus(own_server, Role.SERVICE), _accept)
    told: list[int] = []
    for expected in (1, 2):
        for _ in range(3):
            offers.soon(lambda: told.append(1))
        await wait_until_async(lambda: len(told) == expected)  # noqa: B023
    offers.soon(lambda: told.append(1))
    offers.close()
    assert told == [1, 1]
