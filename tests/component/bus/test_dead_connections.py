"""Connections that break in silence are made anew; those of a process that was held up stand."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.tcp_stream import TcpStream
from fluster_bus.core.errors import DisconnectedError
from fluster_bus.core.roles import Role
from fluster_bus.direct.lane import Lane
from fluster_bus.server import EmbeddedServer
from tests.cable import Cable, laid
from tests.component.nats_servers import configured

TIMEOUT_S = 60
HELD_S = 2.0  # as 20 s are to the settings that users have
PINGS = {"FLUSTER_PING_INTERVAL_S": "0.5", "FLUSTER_PINGS_UNANSWERED": "2"}
SERVER_PINGS = 'ping_interval: "2s"\nping_max: 3\n'


@pytest.fixture(autouse=True)
def quick_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PINGS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def cable(shared_server: EmbeddedServer) -> Iterator[Cable]:
    with laid(shared_server.port) as cable:
        yield cable


@pytest.fixture
def address(shared_server: EmbeddedServer, cable: Cable) -> BusAddress:
    there = shared_server.credentials(Role.OPERATOR)
    return BusAddress(f"nats://127.0.0.1:{cable.port}", there.user, there.password)


@pytest.fixture
async def bus(address: BusAddress) -> AsyncIterator[Bus]:
    bus = await Bus.connect(address, name="test")
    yield bus
    await bus.close()


@pytest.mark.anyio
async def test_a_request_over_a_broken_cable_fails_and_the_next_is_answered(bus: Bus, cable: Cable) -> None:
    await bus.subscribe("cable.ask", lambda asked: bus.publish(asked.reply, b"yes"))
    await bus.flush()
    cable.cut()
    with pytest.raises(DisconnectedError):
        await bus.request("cable.ask", timeout_s=TIMEOUT_S)
    await bus.wait_connected(TIMEOUT_S)
    assert (await bus.request("cable.ask", timeout_s=TIMEOUT_S)).data == b"yes"


@pytest.mark.anyio
async def test_a_connection_with_much_that_is_unsent_is_let_go_as_soon(bus: Bus, cable: Cable) -> None:
    cable.cut()

    for _ in range(32):
        await bus.publish("cable.much", bytes(1 << 20))
        await asyncio.sleep(0)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(DisconnectedError):
            await bus.flush()
        await bus.wait_connected()
        await bus.flush()


@pytest.mark.anyio
async def test_closing_a_connection_that_is_dead_does_not_take_long(bus: Bus, cable: Cable) -> None:
    cable.cut()
    async with asyncio.timeout(TIMEOUT_S):
        await bus.close()


@pytest.mark.anyio
async def test_a_connection_on_which_no_server_greets_is_not_left_open_when_another_is_tried() -> None:
    stream = TcpStream()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        server = urlparse(f"nats://127.0.0.1:{listener.getsockname()[1]}")
        await stream.connect(server, 1 << 15, TIMEOUT_S)
        first, _ = listener.accept()
        await stream.connect(server, 1 << 15, TIMEOUT_S)
        with first:
            first.settimeout(TIMEOUT_S)
            assert await asyncio.to_thread(first.recv, 1) == b"", "its other end was closed"
    stream.close()
    await stream.wait_closed()


def test_a_lane_over_a_broken_cable_is_made_anew(address: BusAddress, cable: Cable) -> None:
    lost, stands = threading.Event(), threading.Semaphore(0)
    lane = Lane(address, "test", on_connect=stands.release, on_disconnect=lost.set)
    lane.start()
    try:
        assert stands.acquire(timeout=TIMEOUT_S)
        cable.cut()
        assert lost.wait(TIMEOUT_S)
        assert stands.acquire(timeout=TIMEOUT_S)
    finally:
        lane.close()


@pytest.mark.anyio
async def test_who_holds_the_interpreter_is_not_cut_off(tmp_path: Path) -> None:
    with configured(tmp_path, SERVER_PINGS) as port:
        address, losses = BusAddress(f"nats://127.0.0.1:{port}"), []
        bus = await Bus.connect(address, name="test")
        bus.on_disconnect(lambda: losses.append("bus"))
        lane = Lane(address, "test", on_disconnect=lambda: losses.append("lane"))
        lane.start()
        lane.wait_connected(TIMEOUT_S)
        for _ in range(3):
            ctypes.PyDLL(None).usleep(int(HELD_S * 1e6))  # unlike time.sleep it keeps the lock
            await bus.flush()
            seen = threading.Event()
            lane.when_seen(seen.set)
            assert await asyncio.to_thread(seen.wait, TIMEOUT_S)
        assert losses == []
        lane.close()
        await bus.close()


CLIENT = """
import asyncio, os, sys
from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.direct.lane import Lane

def say(word):
    os.write(1, word.encode() + b"\\n")  # at once, as threads speak beside each other

async def main():
    address = BusAddress(sys.argv[1])
    lane = Lane(address, "lane", on_connect=lambda: say("lane"), on_disconnect=lambda: say("lost"))
    lane.start()
    bus = await Bus.connect(address, name="bus")
    bus.on_disconnect(lambda: say("lost"))
    say("bus")
    while await asyncio.to_thread(sys.stdin.readline):
        await bus.flush()
        lane.when_seen(lambda: say("seen"))
    lane.close()
    await bus.close()
asyncio.run(main())
"""


def test_who_was_stopped_is_not_cut_off(tmp_path: Path) -> None:
    with configured(tmp_path, SERVER_PINGS) as port:
        command = [sys.executable, "-c", CLIENT, f"nats://127.0.0.1:{port}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            assert {client.stdout.readline(), client.stdout.readline()} == {"lane\n", "bus\n"}
            client.send_signal(signal.SIGSTOP)
            time.sleep(HELD_S)  # how long it is stopped is what is tested
            client.send_signal(signal.SIGCONT)
            client.stdin.write("\n")
            client.stdin.flush()
            assert client.stdout.readline() == "seen\n"
            client.stdin.close()
            assert client.stdout.read() == ""
