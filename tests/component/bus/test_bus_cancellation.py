"""Users of a connection can be cancelled at any moment: the cancellation is never lost, and nothing waits on."""

from __future__ import annotations

import asyncio
import gc

import psutil
import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets
from fluster_bus.core.roles import Role
from fluster_bus.messages import Namespace
from fluster_bus.server import EmbeddedServer
from tests.insides import nats_client_of
from tests.waiting import wait_until, wait_until_async

pytestmark = pytest.mark.anyio


async def test_in_the_very_moment_of_the_answer(bus: Bus, namespace: Namespace) -> None:
    asking = asyncio.create_task(bus.jetstream.stream_info(buckets.events_stream(namespace)))
    await asyncio.sleep(0)  # it is asked, and the answer cannot be there
    (answer,) = nats_client_of(bus)._resp_map.values()  # noqa: SLF001 - nats-py's own, which ours must agree with
    answer.set_result(None)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()


async def test_at_any_turn_of_connecting(shared_server: EmbeddedServer) -> None:
    address = shared_server.credentials(Role.OPERATOR)
    turns, is_connected = 0, False
    while not is_connected:
        connecting = asyncio.create_task(Bus.connect(address, name="cancelled"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if is_connected := connecting.done():
            await connecting.result().close()
        else:
            connecting.cancel()
            await asyncio.wait({connecting})
            assert connecting.cancelled(), f"after {turns} turns of the loop"
        turns += 1


def _writer(bus: Bus) -> asyncio.StreamWriter | None:
    writer: asyncio.StreamWriter | None = nats_client_of(bus).stream._writer  # noqa: SLF001 - nats-py's own, which ours must agree with
    return writer


def _local_port(bus: Bus) -> int:
    writer = _writer(bus)
    assert writer is not None
    port: int = writer.get_extra_info("sockname")[1]
    return port


def _is_closing(bus: Bus) -> bool:
    writer = _writer(bus)
    return writer is not None and writer.is_closing()


def _ports_of_clients(server: EmbeddedServer) -> set[int]:
    """Those from which connections to the server come that it has not let go."""
    connections = psutil.Process(server.pid).net_connections("tcp")
    return {each.raddr.port for each in connections if each.raddr and each.laddr.port == server.port}


async def _check_nothing_is_left(
    bus: Bus, server: EmbeddedServer, port: int, before: set[asyncio.Task[object]]
) -> None:
    await wait_until_async(lambda: asyncio.all_tasks() <= before, describe=lambda: asyncio.all_tasks() - before)
    assert _is_closing(bus)
    await wait_until_async(lambda: port not in _ports_of_clients(server))


async def test_at_any_turn_of_closing(shared_server: EmbeddedServer) -> None:
    address = shared_server.credentials(Role.OPERATOR)
    turns, is_closed = 1, False  # before its first turn a coroutine has not been called
    while not is_closed:
        before = asyncio.all_tasks()
        bus = await Bus.connect(address, name="cancelled")
        port = _local_port(bus)
        assert port in _ports_of_clients(shared_server)
        closing = asyncio.create_task(bus.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        if not (is_closed := closing.done()):
            closing.cancel()
            await asyncio.wait({closing})
            assert closing.cancelled(), f"after {turns} turns of the loop"
        await _check_nothing_is_left(bus, shared_server, port, before)
        turns += 1


async def test_the_next_to_close_returns_when_it_is_closed(shared_server: EmbeddedServer) -> None:
    before = asyncio.all_tasks()
    bus = await Bus.connect(shared_server.credentials(Role.OPERATOR), name="cancelled")
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0)
    closing.cancel()
    await bus.close()
    assert _is_closing(bus)
    assert asyncio.all_tasks() - before <= {closing}


def test_the_end_of_the_loop_at_any_turn_of_closing_leaves_no_socket(
    shared_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def close_for(turns: int) -> tuple[Bus, int, bool]:
        """Returns the connection, its port, and whether it was closed before the loop ended."""
        bus = await Bus.connect(shared_server.credentials(Role.OPERATOR), name="cancelled")
        closing = asyncio.create_task(bus.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        return bus, _local_port(bus), closing.done()

    turns, is_closed, ports = 1, False, set[int]()
    while not is_closed:
        bus, port, is_closed = asyncio.run(close_for(turns))
        assert _is_closing(bus), f"after {turns} turns of the loop"
        ports.add(port)
        turns += 1
        del bus
        gc.collect()  # an exception that nothing took is logged when the future that holds it goes
        assert [record.getMessage() for record in caplog.records] == [], f"after {turns - 1} turns of the loop"
    wait_until(lambda: not ports & _ports_of_clients(shared_server))
