"""Arguments and results of any size, between processes of one machine and of several."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fluster.actors import (
    ActorPool,
    AsyncActorPool,
)
from fluster_bus.core import subjects
from fluster_bus.core.errors import ObjectTooLargeError, PayloadLostError, ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.payloads import arenas, payloads
from fluster_bus.payloads.arena import Lent, Reference
from fluster_bus.storage import objects
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Calculator, Env, MemoryEnv, sharing_nothing
from tests.component.arena_peer import Block
from tests.waiting import wait_until


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
    arena = arenas.here().own()
    assert arena.lent()
    del results
    wait_until(lambda: arena.tidy(time.monotonic()) and not arena.lent(), describe=arena.lent)


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
