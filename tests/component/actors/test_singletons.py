"""Actors of which there is one live instance behind a name."""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from fluster.actors import ActorPool, ActorServer, actor, deploy
from fluster.cluster import Cluster
from fluster.errors import ActorDiedError, ActorNameTakenError, SupersededError
from fluster.testing import LocalActors
from fluster.testing.memory_bus import MemoryRegistry
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets
from fluster_bus.core.errors import CredentialsError
from fluster_bus.core.roles import Role
from fluster_bus.messages import ActorSeat, EndpointId
from fluster_bus.storage.streams import seats_table
from tests.component.actor_env import NAMESPACE, TIMEOUT_S, Env, Gate, MemoryEnv
from tests.insides import served_by
from tests.waiting import wait_until

LEASE_S = 3.0  # a busy machine holds a process up for part of it


@actor(singleton=True)
class Only:
    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate
        self.said = 0

    def on_start(self) -> None:
        if self.gate is None:
            raise ValueError("no gate")

    def say(self) -> str:
        self.said += 1
        return "here"

    def wait(self) -> str:
        assert self.gate is not None
        return self.gate.wait()


@pytest.fixture(autouse=True)
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Env, "seat_lease_s", LEASE_S)
    monkeypatch.setattr(MemoryRegistry, "told_seat_lease_s", LEASE_S)


def server_of(on: Env | MemoryEnv, name: str) -> ActorServer:
    server = ActorServer(on.cluster())
    server.register(name, Only(Gate()))
    return server


def test_a_second_one_is_refused_and_told_who_is_the_first(either: Env | MemoryEnv) -> None:
    first, second = server_of(either, "only"), server_of(either, "only")
    first.serve_background()
    with pytest.raises(ActorNameTakenError, match="'only' has one live instance only, and that is process"):
        second.serve_background()
    pool = either.pool("only")
    assert (pool.call().say(), pool.size) == ("here", 1)
    first.shutdown()
    second.shutdown()
    third = server_of(either, "only")
    third.serve_background()
    assert either.pool("only").call().say() == "here"
    third.shutdown()


def test_of_several_at_once_one_serves(shared: Env) -> None:
    servers = [server_of(shared, "rivals") for _ in range(4)]
    outcomes: list[object] = []

    def serve(server: ActorServer) -> None:
        try:
            server.serve_background()
            outcomes.append(server)
        except ActorNameTakenError as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=serve, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(outcomes, key=str).count(ActorNameTakenError) == 3
    assert shared.pool("rivals").size == 1
    for server in servers:
        server.shutdown()


def test_the_seat_of_one_that_did_not_start_is_free_again(shared: Env) -> None:
    server = ActorServer(shared.cluster())
    server.register("unstarted", Only())
    with pytest.raises(ValueError, match="no gate"):
        server.serve_background()
    server.shutdown()
    again = server_of(shared, "unstarted")
    again.serve_background()
    again.shutdown()


def _on_seats(on: Env, use: Callable[[Any], Awaitable[None]]) -> None:
    async def run() -> None:
        bus = await Bus.connect(on.server.credentials(Role.SERVICE), name="test")
        try:
            await use(seats_table(bus, NAMESPACE))
        finally:
            await bus.close()

    on.portal.run(run)


def take_seat(on: Env, name: str, who: str = "somebody") -> None:
    async def take(table: Any) -> None:
        await table.put(buckets.seat_key(name), ActorSeat(instance="other", who=who, lease_s=LEASE_S))

    _on_seats(on, take)


def test_one_whose_seat_was_taken_ends_and_tells(shared: Env) -> None:
    server = server_of(shared, "taken")
    server.serve_background()
    pool = shared.pool("taken")
    take_seat(shared, "taken")
    with pytest.raises(SupersededError, match="somebody has taken its place"):
        server.serve()
    wait_until(lambda: pool.size == 0)


def test_the_seat_of_one_that_is_silent_is_taken_after_its_lease(shared: Env) -> None:
    take_seat(shared, "silent")
    server = server_of(shared, "silent")
    server.serve_background()
    assert shared.pool("silent").call().say() == "here"
    server.shutdown()


def test_a_seat_says_for_how_long_its_holder_counts_on_it(shared: Env) -> None:
    server = server_of(shared, "telling")
    server.serve_background()

    async def is_told(table: Any) -> None:
        assert (await table.get(buckets.seat_key("telling"))).value.lease_s == LEASE_S

    _on_seats(shared, is_told)
    server.shutdown()


def test_who_waits_for_one_that_is_silent_is_told_when_its_seat_is_taken(shared: Env) -> None:
    take_seat(shared, "waited-for")
    gone = shared.cluster()
    endpoint = gone.asynchronous.new_endpoint("waited-for", "fluster.default.actors.waited-for.one.other")
    endpoint = endpoint.model_copy(update={"endpoint_id": EndpointId("other")})
    gone.portal.run(gone.asynchronous.registry.register, endpoint)
    pool = shared.pool("waited-for")
    server = server_of(shared, "waited-for")
    server.serve_background()
    wait_until(lambda: [member.endpoint_id != "other" for member in pool.members()] == [True])
    assert pool.call().say() == "here"
    server.shutdown()


def test_a_seat_that_nobody_else_took_is_kept_after_an_interruption(env: Env) -> None:
    proxy = env.proxy()
    cluster = env.cluster()
    address = replace(cluster.asynchronous.bus.address, url=f"nats://127.0.0.1:{proxy.port}")
    with Cluster(address) as served:
        server = ActorServer(served)
        server.register("interrupted", Only(Gate()))
        server.serve_background()
        (instance,) = served_by(server)
        seat = instance.actor.seat
        assert seat is not None
        env.portal.run(proxy.hold)
        wait_until(lambda: not seat.is_sure)
        env.portal.run(proxy.release)
        wait_until(lambda: seat.is_sure)
        assert env.pool("interrupted").call().say() == "here"
        server.shutdown()


def test_one_that_cannot_tell_that_it_lives_runs_and_answers_nothing(env: Env) -> None:
    """Its calls come over a lane, which stands; only the connection that renews its seat is held up."""
    proxy, gate = env.proxy(), Gate()
    cluster = env.cluster()
    address = cluster.asynchronous.bus.address
    with Cluster(replace(address, url=f"nats://127.0.0.1:{proxy.port}")) as served:
        served.asynchronous.bus.address = address  # of the lanes
        server = ActorServer(served)
        only = Only(gate)
        server.register("cut-off", only)
        server.serve_background()
        (instance,) = served_by(server)
        assert instance.lane is not None
        seat = instance.actor.seat
        assert seat is not None
        pool = env.pool("cut-off")
        running, waiting = pool.submit().wait(), pool.submit().say()
        gate.is_entered()
        env.portal.run(proxy.hold)
        wait_until(lambda: not seat.is_sure)
        gate.opened.set()
        late = pool.submit().say()
        successor = server_of(env, "cut-off")
        successor.serve_background()
        for future in (running, waiting, late):
            with pytest.raises(ActorDiedError, match="ended while the call was out"):
                future.result(TIMEOUT_S)
        assert pool.call().say() == "here"
        env.portal.run(proxy.release)
        with pytest.raises(SupersededError):
            server.serve()
        assert only.said == 0
        successor.shutdown()


def test_a_call_that_comes_to_one_that_is_cut_off_is_not_run(env: Env) -> None:
    """It has nothing to do as it is cut off: what comes then must not begin, as another may have its seat."""
    proxy = env.proxy()
    address = env.cluster().asynchronous.bus.address
    with Cluster(replace(address, url=f"nats://127.0.0.1:{proxy.port}")) as served:
        served.asynchronous.bus.address = address  # of the lanes, by which the call comes
        server = ActorServer(served)
        only = Only(Gate())
        server.register("idle", only)
        server.serve_background()
        (instance,) = served_by(server)
        seat = instance.actor.seat
        assert seat is not None
        pool = env.pool("idle")
        env.portal.run(proxy.hold)
        wait_until(lambda: not seat.is_sure)
        late = pool.submit().say()
        successor = server_of(env, "idle")
        successor.serve_background()
        with pytest.raises(ActorDiedError, match="ended while the call was out"):
            late.result(TIMEOUT_S)
        env.portal.run(proxy.release)
        with pytest.raises(SupersededError):
            server.serve()
        assert only.said == 0
        successor.shutdown()


def test_deploy_refuses_several(shared: Env) -> None:
    with pytest.raises(ValueError, match="of which there is one"):
        deploy(shared.cluster(), Only, Gate(), replicas=2)
    with LocalActors() as actors, pytest.raises(ValueError, match="of which there is one"):
        actors.deploy(Only, Gate(), replicas=2)


def test_one_in_memory_is_deployed() -> None:
    with LocalActors() as actors:
        pool: ActorPool[Only] = actors.deploy(Only, Gate())
        assert pool.call().say() == "here"
        with pytest.raises(ActorNameTakenError):
            actors.deploy(Only, Gate())


def test_an_instance_that_is_made_anew_keeps_the_seat(shared: Env) -> None:
    class BrokenError(Exception):
        pass

    @actor(singleton=True, max_restarts=1, fatal_exceptions=(BrokenError,))
    class Fragile:
        def fail(self) -> None:
            raise BrokenError

        def say(self) -> str:
            return "again"

    server = ActorServer(shared.cluster())
    server.register("anew", Fragile(), factory=functools.partial(Fragile))
    server.serve_background()
    pool = shared.pool("anew")
    with pytest.raises(BrokenError):
        pool.call().fail()
    assert pool.call().say() == "again"
    server.shutdown()


def test_who_may_not_take_seats_is_told(shared: Env) -> None:
    server = ActorServer(shared.cluster(Role.CLIENT))
    server.register("forbidden", Only(Gate()))
    with pytest.raises(CredentialsError, match="client_default"):
        server.serve_background()
