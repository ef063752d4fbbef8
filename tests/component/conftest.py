"""A real server for all, connections that are closed again, and namespaces that no other test uses."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core.names import unique_name
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, Namespace, WorkerId
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.provisioning import ensure_namespace
from fluster_services.config import LOCAL_TIMING, Timing
from tests.component.actor_env import either, env, in_memory, no_arenas, shared  # noqa: F401 - fixtures for all
from tests.component.controllers import NS, RunningController, StartController, StartWorker
from tests.component.toy_worker import GIB, SUCCEED, Plan, ToyWorker

_THREADS_END_S = 30.0  # those that only have to notice that they are over

ConnectBus = Callable[..., Awaitable[Bus]]


def kill_server(server: EmbeddedServer) -> None:
    """Return when it is gone, as a crash takes it."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    server.wait(10)


def freeze_server(server: EmbeddedServer) -> None:
    """Return when it does not answer any more, though its connections stand."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)


def thaw_server(server: EmbeddedServer) -> None:
    """Have it go on."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGCONT)


@pytest.fixture(scope="module", autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """What a module's tests began has ended with the last of them, but for what a process keeps for all."""
    before = set(threading.enumerate())
    yield
    kept = ("fluster-arenas", "fluster-owner-helper")
    begun = [each for each in threading.enumerate() if each not in before and each.name not in kept]
    deadline = time.monotonic() + _THREADS_END_S
    for thread in begun:
        thread.join(max(deadline - time.monotonic(), 0))
    assert not [thread.name for thread in begun if thread.is_alive()]


@pytest.fixture(scope="session")
def shared_server() -> Iterator[EmbeddedServer]:
    """For tests that leave it alone. Each namespace reserves what its histories may grow to, so the limit is high."""
    with EmbeddedServer(store_limit_bytes=1 << 50) as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """For tests that stop it, or need streams that are the whole cluster's."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
async def connect_bus() -> AsyncIterator[ConnectBus]:
    """Makes connections, by default with all rights, and closes them."""
    async with AsyncExitStack() as stack:

        async def make(
            server: EmbeddedServer, role: Role = Role.OPERATOR, namespace: str | None = None, *, name: str = "test"
        ) -> Bus:
            bus = await Bus.connect(server.credentials(role, namespace), name=name)
            stack.push_async_callback(bus.close)
            return bus

        yield make


@pytest.fixture
async def bus(shared_server: EmbeddedServer, connect_bus: ConnectBus) -> Bus:
    """A connection to the server that all tests share."""
    return await connect_bus(shared_server)


@pytest.fixture
async def namespace(bus: Bus) -> Namespace:
    """A namespace with its buckets and streams, of this test alone."""
    name = Namespace(unique_name("t"))
    await ensure_namespace(bus, name)
    return name


@pytest.fixture
async def start_controller(own_server: EmbeddedServer) -> AsyncIterator[StartController]:
    async with AsyncExitStack() as stack:

        async def start(timing: Timing = LOCAL_TIMING) -> RunningController:
            running = await RunningController(own_server, timing).start()
            stack.push_async_callback(running.stop)
            return running

        yield start


@pytest.fixture
async def controller(start_controller: StartController) -> RunningController:
    return await start_controller()


@pytest.fixture
async def start_worker(own_server: EmbeddedServer, connect_bus: ConnectBus) -> StartWorker:
    async def start(
        worker_id: str = "w1",
        plan: Callable[..., Plan] | Plan = SUCCEED,
        *,
        cpu: float = 4,
        memory: int = 8 * GIB,
        heartbeat_s: float = 1.0,
        namespaces: tuple[Namespace, ...] = (NS,),
    ) -> ToyWorker:
        bus = await connect_bus(own_server, Role.SERVICE, name=worker_id)
        planned = plan if callable(plan) else lambda _record: plan
        worker = ToyWorker(
            bus, WorkerId(worker_id), Capacity(cpu=cpu, memory=memory), planned, heartbeat_s, namespaces=namespaces
        )
        return await worker.start()

    return start


@pytest.fixture
async def cluster(own_server: EmbeddedServer, controller: RunningController) -> AsyncIterator[AsyncCluster]:
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        yield cluster
