"""Where actors live in a test: on a server, or in memory, and some actors to be called there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster.actors import (
    ActorContext,
    ActorPool,
    ActorServer,
)
from fluster.cluster import Cluster
from fluster.cluster.portal import Portal
from fluster.testing import LocalActors
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import Done, Namespace, NamespaceReply
from fluster_bus.payloads import arenas
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.provisioning import ensure_namespace

NAMESPACE = Namespace("default")
TIMEOUT_S = 60.0


class Proxy:
    """A way to the server that can be cut, or held up, while others stay."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._near: set[asyncio.StreamWriter] = set()  # those of them that lead to the client
        self._ways: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._flows = asyncio.Event()
        self._flows.set()
        self.held = b""  # all that has come while nothing was let through, both ways

    @classmethod
    async def open(cls, server_port: int) -> Proxy:
        proxy = cls(server_port)
        proxy._listener = await asyncio.start_server(proxy._connect, "127.0.0.1")
        return proxy

    @property
    def port(self) -> int:
        assert self._listener is not None
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._go(self._lead_on(reader, writer))

    def _go(self, way: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(way)
        self._ways.add(task)
        task.add_done_callback(self._ways.discard)

    async def _lead_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._near.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:  # the server is down
            writer.close()
            return
        if self._is_closed or writer.is_closing():  # it was cut meanwhile
            writer.close()
            far_writer.close()
            return
        self._writers.add(far_writer)
        self._go(self._pass_on(reader, far_writer))
        self._go(self._pass_on(far_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                if not self._flows.is_set():
                    self.held += data
                await self._flows.wait()
                if writer.is_closing():  # it was cut meanwhile
                    break
                writer.write(data)
        writer.close()

    async def hold(self) -> None:
        """Let nothing through until `release`; the connections stand."""
        self._flows.clear()

    async def release(self) -> None:
        self._flows.set()

    async def cut(self) -> None:
        """End all connections; new ones are let through."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()
        self._near.clear()

    async def cut_near(self) -> None:
        """End the connections as their client sees it; what it has sent reaches the server yet, after `release`."""
        for writer in self._near:
            writer.close()
        self._near.clear()

    async def close(self) -> None:
        assert self._listener is not None
        self._is_closed = True
        self._flows.set()
        self._listener.close()
        while self._ways:
            await self.cut()
            await asyncio.gather(*self._ways, return_exceptions=True)


class Env:
    """A server, a stand-in for the controller that makes the namespace, and clusters that are closed at the end."""

    seat_lease_s: float | None = None  # of actors that have one instance

    def __init__(self, store_dir: Path) -> None:
        self._stack = contextlib.ExitStack()
        self.server = self._stack.enter_context(EmbeddedServer(store_dir))
        self.portal = Portal("controller")
        self._stack.callback(self.portal.close)
        bus = self.portal.run(self._controller)
        self._stack.callback(self.portal.run, bus.close)

    async def _controller(self) -> Bus:
        bus = await Bus.connect(self.server.credentials(Role.SERVICE), name="controller")
        await ensure_namespace(bus, NAMESPACE)

        async def done(_request: Done, _subject: str) -> NamespaceReply:
            return NamespaceReply(seat_lease_s=self.seat_lease_s)

        await bus.serve(subjects.ensure_namespace(NAMESPACE), Done, done)
        return bus

    def cluster(self, role: Role = Role.OPERATOR) -> Cluster:
        namespace = None if role is Role.OPERATOR else NAMESPACE
        return self._stack.enter_context(Cluster(self.server.credentials(role, namespace)))

    def proxy(self) -> Proxy:
        proxy = self.portal.run(Proxy.open, self.server.port)
        self._stack.callback(self.portal.run, proxy.close)
        return proxy

    def serve(self, name: str, *instances: object, cluster: Cluster | None = None) -> ActorServer:
        server = ActorServer(cluster or self.cluster())
        for instance in instances:
            server.register(name, instance)
        server.serve_background()
        self._stack.callback(server.shutdown, 1.0)
        return server

    def pool(self, name: str, *, size: int = 1) -> ActorPool[Any]:
        pool: ActorPool[Any] = ActorPool(self.cluster(), name)
        pool.wait_for_size(size, timeout=TIMEOUT_S)
        return pool

    def pass_time(self, seconds: float) -> None:
        """Let deadlines come, where time does not pass by itself."""

    def close(self) -> None:
        self._stack.close()


class MemoryEnv:
    """The same in memory."""

    def __init__(self) -> None:
        self.actors = LocalActors()

    def cluster(self) -> Cluster:
        return self.actors.cluster

    def serve(self, name: str, *instances: object) -> ActorServer:
        server = ActorServer(self.actors.cluster, clock=self.actors.clock)
        for instance in instances:
            server.register(name, instance)
        server.serve_background()
        return server

    def pool(self, name: str, *, size: int = 1) -> ActorPool[Any]:
        pool = self.actors.pool(name)
        pool.wait_for_size(size, timeout=TIMEOUT_S)
        return pool

    def pass_time(self, seconds: float) -> None:
        self.actors.clock.advance(seconds, wait=False)

    def close(self) -> None:
        self.actors.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    """For tests that leave the server alone; each uses names of its own."""
    env = Env(tmp_path_factory.mktemp("store"))
    yield env
    env.close()


@pytest.fixture(scope="module")
def in_memory() -> Iterator[MemoryEnv]:
    env = MemoryEnv()
    yield env
    env.close()


@pytest.fixture(params=["shared", "in_memory"])
def either(request: pytest.FixtureRequest) -> Env | MemoryEnv:
    """For what holds for both."""
    env: Env | MemoryEnv = request.getfixturevalue(request.param)
    return env


@pytest.fixture
def env(tmp_path: Path) -> Iterator[Env]:
    """For tests that stop the server."""
    env = Env(tmp_path / "store")
    yield env
    env.close()


class Calculator:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    async def add_later(self, a: int, b: int) -> int:
        await asyncio.sleep(0.001)
        return a + b

    def note(self, what: Any) -> None:
        self.seen.append(what)

    async def note_later(self, what: Any) -> None:
        await asyncio.sleep(0)
        self.seen.append(what)

    def notes(self) -> list[Any]:
        return self.seen

    def where(self, ctx: ActorContext, what: str) -> tuple[str | None, str | None, float | None, str]:
        return ctx.actor_name, ctx.method, ctx.deadline, what

    def fail(self, error: BaseException) -> None:
        raise error

    def complain(self, text: Any) -> None:
        raise ValueError(text)

    def echo(self, data: Any) -> Any:
        return data

    def make(self, size: int) -> bytes:
        return bytes(size)

    def _hidden(self) -> None: ...


class Gate:
    """Its calls wait until the test lets them go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def wait(self) -> str:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.entered.release()
        assert self.opened.wait(TIMEOUT_S)
        with self._lock:
            self.at_once -= 1
        return "went through"

    def is_entered(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT_S)


@contextlib.contextmanager
def sharing_nothing() -> Iterator[None]:
    """As on another machine: what is made meanwhile can share no memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(arenas.SIZE_VARIABLE, "0")
        patch.setattr(arenas, "_here", arenas.ProcessMemory())
        yield


@pytest.fixture
def no_arenas() -> Iterator[None]:
    with sharing_nothing():
        yield
