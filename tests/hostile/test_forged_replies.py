"""Who knows where a caller hears its answers has none of its bytes read there, but as an answer to a call that is out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster.actors import ActorPool, ActorServer, actor
from fluster.cluster import Cluster
from fluster.cluster.portal import Portal
from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.roles import Role
from fluster_bus.direct import wire
from fluster_bus.messages import Done, NamespaceReply
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.provisioning import ensure_namespace
from tests.component.actor_env import TIMEOUT_S, Gate
from tests.component.conftest import ConnectBus
from tests.insides import caller_of

OURS, THEIRS = "default", "other"
NUMBERS = [*range(-40, 41), 10**6, -(10**6)]  # those of messages are counted from one, both ways
TOKENS = [*map(str, NUMBERS), "x", "9" * 500, "1e3", "-"]


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


@actor(codec="json")
class JsonGate(Gate):
    pass


class Site:
    """A server of two namespaces, and in the one of them what an operator calls."""

    def __init__(self, server: EmbeddedServer, portal: Portal, cluster: Cluster) -> None:
        self.server, self.portal, self.cluster = server, portal, cluster

    def forge(self, role: Role, namespace: str, inbox: str, body: bytes, *, but: str = "") -> bytes:
        """Answer with `body` whatever may be out; returns what the server says to that."""
        return self.portal.run(_forge, self.server.credentials(role, namespace), inbox, body, but)

    def hears(self, pool: str, call: Callable[[], object]) -> str:
        """Where a call is answered, as any job of the namespace may see it."""
        return self.portal.run(self._hears, pool, call)

    async def _hears(self, pool: str, call: Callable[[], object]) -> str:
        bus = await Bus.connect(self.server.credentials(Role.JOB, OURS), name="eavesdropper")
        heard: asyncio.Queue[Delivery] = asyncio.Queue()
        try:
            await bus.subscribe(f"{subjects.actors_of(OURS).removesuffix('>')}{pool}.>", heard.put_nowait)
            await bus.flush()
            await asyncio.to_thread(call)
            return (await asyncio.wait_for(heard.get(), TIMEOUT_S)).reply
        finally:
            await bus.close()


async def _forge(address: BusAddress, inbox: str, body: bytes, but: str) -> bytes:
    reader, writer = await asyncio.open_connection(*address.servers[0].removeprefix("nats://").split(":"))
    writer.write(wire.connect(user=address.user, **{"pass": address.password}, verbose=False, headers=True))
    for token in TOKENS:
        if token != but:
            writer.write(wire.publish(f"{inbox}.{token}", body))
            writer.write(wire.publish(f"{inbox}.{token}", body, "_INBOX.default.x.y"))
    writer.write(wire.PING)
    said = await asyncio.wait_for(reader.readuntil(b"PONG"), TIMEOUT_S)
    writer.close()
    await writer.wait_closed()
    return said


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with (
        EmbeddedServer(tmp_path_factory.mktemp("store"), namespaces=(OURS, THEIRS)) as server,
        contextlib.closing(Portal("controller")) as portal,
    ):
        bus = portal.run(_furnish, server)
        with (
            Cluster(server.credentials(Role.OPERATOR)) as operator,
            Cluster(server.credentials(Role.JOB, OURS)) as job,
        ):
            actors = ActorServer(job)
            for name, instance in (("friend", Gate()), ("json", JsonGate()), ("other", Gate())):
                actors.register(name, instance)
                instance.opened.set()
            actors.serve_background()
            yield Site(server, portal, operator)
            actors.shutdown(1.0)
        portal.run(bus.close)


async def _furnish(server: EmbeddedServer) -> Bus:
    bus = await Bus.connect(server.credentials(Role.SERVICE), name="controller")
    for namespace in (OURS, THEIRS):
        await ensure_namespace(bus, namespace)

    async def done(_request: Done, _subject: str) -> NamespaceReply:
        return NamespaceReply()

    await bus.serve(subjects.ensure_namespace(OURS), Done, done)
    return bus


def forged(marker: Path) -> list[bytes]:
    """What would be read as an answer, of all kinds."""
    bomb = Bomb(marker)
    return [
        pickle.dumps(bomb),
        pickle.dumps(("x", [(0, True, bomb)])),
        pickle.dumps(("x", [(0, 3, (0, [bomb]))])),
        pickle.dumps(("x", [(0, True, pickle.dumps(bomb))])),
    ]


@pytest.fixture
def pool(site: Site) -> ActorPool[Any]:
    pool: ActorPool[Any] = ActorPool(site.cluster, "friend")
    pool.wait_for_size(1, timeout=TIMEOUT_S)
    return pool


WAYS = ["submitted", "waited-for"]


def _call(pool: ActorPool[Any], way: str) -> object:
    return pool.submit().wait().result(TIMEOUT_S) if way == "submitted" else pool.call().wait()


def read_all(pool: ActorPool[Any]) -> None:
    """Return when the caller has read what the server has for it by now, on both of its connections."""
    caller = caller_of(pool)
    read = threading.Event()
    caller.carried.when_seen(read.set)
    assert read.wait(TIMEOUT_S)
    pool.portal.run(caller.bus.flush)


@pytest.mark.parametrize("way", WAYS)
def test_what_no_call_waits_for_is_not_unpickled(site: Site, pool: ActorPool[Any], tmp_path: Path, way: str) -> None:
    inbox = site.hears("friend", lambda: _call(pool, way)).rpartition(".")[0]
    assert inbox.startswith(f"_INBOX.{OURS}.operator.")
    for body in forged(tmp_path / "marker"):
        assert b"-ERR" not in site.forge(Role.JOB, OURS, inbox, body)
    read_all(pool)  # else one may be read as the answer of the call that is given its number next
    assert _call(pool, way) == "went through"
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("way", WAYS)
def test_another_namespace_answers_no_call(site: Site, pool: ActorPool[Any], tmp_path: Path, way: str) -> None:
    inbox = site.hears("friend", lambda: _call(pool, way)).rpartition(".")[0]
    gate = Gate()
    with Cluster(site.server.credentials(Role.JOB, OURS)) as job:
        actors = ActorServer(job)
        actors.register(f"gate-{way}", gate)
        actors.serve_background()
        waiting: ActorPool[Any] = ActorPool(site.cluster, f"gate-{way}")
        waiting.wait_for_size(1, timeout=TIMEOUT_S)
        out = waiting.submit().wait()
        gate.is_entered()
        for body in forged(tmp_path / "marker"):
            for role in (Role.JOB, Role.CLIENT):
                said = site.forge(role, THEIRS, inbox, body)
                assert said.count(b"-ERR 'Permissions Violation") == 2 * len(TOKENS)
        gate.opened.set()
        assert out.result(TIMEOUT_S) == "went through"
        actors.shutdown(1.0)
    assert _call(pool, way) == "went through"
    assert not (tmp_path / "marker").exists()


def test_a_pickle_is_no_answer_to_a_call_in_json(site: Site, pool: ActorPool[Any], tmp_path: Path) -> None:
    gate = JsonGate()
    plain = site.hears("friend", lambda: _call(pool, "submitted")).rpartition(".")[0]
    with Cluster(site.server.credentials(Role.JOB, OURS)) as job:
        actors = ActorServer(job)
        actors.register("json-gate", gate)
        actors.serve_background()
        waiting: ActorPool[Any] = ActorPool(site.cluster, "json-gate")
        waiting.wait_for_size(1, timeout=TIMEOUT_S)
        out = waiting.submit().wait()
        gate.is_entered()
        for body in forged(tmp_path / "marker"):
            site.forge(Role.JOB, OURS, plain, body)
        gate.opened.set()
        assert out.result(TIMEOUT_S) == "went through"
        actors.shutdown(1.0)
    assert not (tmp_path / "marker").exists()


@pytest.mark.anyio
async def test_who_is_asked_at_one_inbox_answers_nothing_that_is_asked_at_another(
    tmp_path: Path, connect_bus: ConnectBus
) -> None:
    """An operator asks an actor of a tenant's, who sees there which request that was; the controller is asked next."""
    with EmbeddedServer(tmp_path, namespaces=(OURS, THEIRS)) as server:
        operator = await connect_bus(server, Role.OPERATOR, name="operator")
        tenant = await connect_bus(server, Role.JOB, THEIRS, name="tenant")
        controller = await connect_bus(server, Role.SERVICE, name="controller")
        asked = subjects.actor_one(THEIRS, "x", "e", "m")
        seen: asyncio.Queue[str] = asyncio.Queue()

        async def answer(delivery: Delivery) -> None:
            seen.put_nowait(delivery.reply)
            await tenant.publish(delivery.reply, b"theirs")

        async def forge(delivery: Delivery) -> None:
            for token in range(100):
                await tenant.publish(f"{inbox}.{token:x}", b"forged")
            await tenant.flush()
            await controller.publish(delivery.reply, b"true")

        await tenant.subscribe(asked, answer)
        await controller.subscribe(subjects.ensure_namespace(OURS), forge)
        await tenant.flush()
        await controller.flush()
        assert (await operator.request(asked)).data == b"theirs"
        inbox = (await seen.get()).rpartition(".")[0]
        assert (await operator.request(subjects.ensure_namespace(OURS))).data == b"true"
