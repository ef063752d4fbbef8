"""Calls in JSON by those who unpickle nothing: to which member they go, and what tells them of its end."""

from __future__ import annotations

import asyncio

import pytest

from fluster.actors.client.json_calls import call_in_json
from fluster.cluster import Cluster
from fluster.errors import ActorDiedError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import NoRespondersError, RequestTimeoutError
from fluster_bus.core.roles import Role
from fluster_bus.messages import Endpoint, EndpointId
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Calculator, Env


def _add(cluster: Cluster, name: str) -> object:
    return cluster.portal.run(lambda: call_in_json(cluster.asynchronous, name, "add", b"[5, 2]", timeout_s=TIMEOUT_S))


async def _register(cluster: Cluster, name: str, endpoint_id: str, address: str = "") -> Endpoint:
    address = address or subjects.actor_member(NAMESPACE, name, endpoint_id)
    registry = cluster.asynchronous.registry
    return await registry.register(registry.endpoint(name, address, endpoint_id=EndpointId(endpoint_id)))


async def _answer_by_hand(bus: Bus, subject: str, answer: bytes) -> list[str]:
    heard: list[str] = []

    async def on_call(delivery: Delivery) -> None:
        heard.append(delivery.subject)
        await bus.publish(delivery.reply, answer)

    await bus.subscribe(subject, on_call)
    await bus.flush()
    return heard


def test_a_member_at_which_nobody_listens_is_passed_over(shared: Env) -> None:
    cluster = shared.cluster()
    shared.serve("some", Calculator())
    cluster.portal.run(_register, cluster, "some", "silent")
    assert [_add(cluster, "some") for _ in range(10)] == [7] * 10


def test_only_the_addresses_of_actors_are_called(shared: Env) -> None:
    cluster = shared.cluster()
    shared.serve("mixed", Calculator())
    elsewhere = "fluster.sys.elsewhere"
    heard = cluster.portal.run(_answer_by_hand, cluster.asynchronous.bus, f"{elsewhere}.>", b'{"result": 0}')
    cluster.portal.run(_register, cluster, "mixed", "page", elsewhere)
    assert [_add(cluster, "mixed") for _ in range(10)] == [7] * 10
    assert heard == []


def test_a_call_ends_with_the_registration_of_the_member_that_has_it(shared: Env) -> None:
    cluster = shared.cluster()

    async def ended() -> None:
        bus, registry = cluster.asynchronous.bus, cluster.asynchronous.registry
        entered = asyncio.Event()
        await bus.subscribe(subjects.actor_one(NAMESPACE, "mortal", "e1"), lambda _delivery: entered.set())
        endpoint = await _register(cluster, "mortal", "e1")
        call = asyncio.create_task(call_in_json(cluster.asynchronous, "mortal", "add", b"", timeout_s=600))
        await asyncio.wait_for(entered.wait(), TIMEOUT_S)
        await registry.register(endpoint)  # its lease goes on: nothing has changed
        await registry.unregister(endpoint)
        with pytest.raises(ActorDiedError, match=r"mortal\.add: the actor e1 ended while the call was out"):
            await asyncio.wait_for(call, TIMEOUT_S)

    cluster.portal.run(ended)


def test_a_call_ends_at_its_time_out_while_the_member_lives(shared: Env) -> None:
    cluster = shared.cluster()

    async def waits() -> None:
        bus = cluster.asynchronous.bus
        # By whichever subject the call comes: so short a time may be too short for the registry to be read.
        for subject in (subjects.actor_one(NAMESPACE, "idle", "e1"), subjects.actor_any(NAMESPACE, "idle")):
            await bus.subscribe(subject, lambda _delivery: None)
        await _register(cluster, "idle", "e1")
        with pytest.raises(RequestTimeoutError):
            await call_in_json(cluster.asynchronous, "idle", "add", b"", timeout_s=0.2)

    cluster.portal.run(waits)


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.CLIENT, Role.JOB])
def test_who_is_not_in_the_registry_is_called_all_the_same(shared: Env, role: Role) -> None:
    name, cluster, caller = f"unlisted-{role}", shared.cluster(), shared.cluster(role)
    with pytest.raises(NoRespondersError):
        _add(caller, name)
    subject = subjects.actor_any(NAMESPACE, name)
    cluster.portal.run(_answer_by_hand, cluster.asynchronous.bus, subject, b'{"result": "by hand"}')
    assert _add(caller, name) == "by hand"


def test_where_the_registry_cannot_be_read_the_bus_chooses_a_member(env: Env) -> None:
    cluster = env.cluster()
    env.serve("served", Calculator())
    bus = cluster.asynchronous.bus
    stream = buckets.bucket_stream(buckets.endpoints_bucket(NAMESPACE))
    cluster.portal.run(bus.request, f"$JS.API.STREAM.DELETE.{stream}")
    assert _add(cluster, "served") == 7
