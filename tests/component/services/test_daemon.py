"""Daemons as processes: ready, gone when asked or left alone, one line when they cannot go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fluster_bus.access.address import ADDRESS_VARIABLE, BusAddress
from fluster_bus.core.roles import Role
from fluster_bus.server import EmbeddedServer
from tests.component.conftest import kill_server, thaw_server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

_RUN = """
import sys
from fluster_bus.access.address import BusAddress
from fluster_services.controller.__main__ import run_controller
from fluster_services.controller.controller import ControllerConfig
ready, owner = (int(number) for number in sys.argv[1:])
run_controller(ControllerConfig(address=BusAddress.from_environment()), ready_fd=ready, owner_fd=owner)
"""

_FAILING = """
import asyncio
from fluster_bus.access.address import BusAddress
from fluster_bus.core.errors import StorageError
from fluster_services.daemon import run_daemon

async def fail():
    raise StorageError("the disk is full")

async def serve(bus, ready):
    async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
        inner.create_task(fail())

run_daemon(serve, address=BusAddress.from_environment(), name="failing")
"""

# In the middle of its start it learns that the server is gone.
_CUT_OFF = """
import asyncio, sys
from fluster_bus.access.address import BusAddress
from fluster_services.daemon import run_daemon

starts = []

async def begin(bus):
    gone = asyncio.Event()
    bus.on_disconnect(gone.set)
    print("begins", file=sys.stderr, flush=True)
    await gone.wait()
    await bus.publish("fluster.test", b"")

async def serve(bus, ready):
    starts.append(bus)
    if len(starts) == 1:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(begin(bus))
    await bus.flush()
    ready()

run_daemon(serve, address=BusAddress.from_environment(), name="begun-twice", ready_fd=int(sys.argv[1]))
"""

# As while a group of servers elects one that leads the stream.
_UNHEARD = """
import asyncio, sys
from fluster_bus.core import server_subjects
from fluster_bus.core import subjects
from fluster_bus.access.address import BusAddress
from fluster_bus.storage.streams import leaders_table
from fluster_services.daemon import run_daemon

starts = []

async def serve(bus, ready):
    starts.append(bus)
    if len(starts) == 1:
        await bus.request(server_subjects.direct_get("none"), b"{}")
    if len(starts) == 2:
        await leaders_table(bus).get("leader")
    ready()

run_daemon(serve, address=BusAddress.from_environment(), name="unheard", ready_fd=int(sys.argv[1]))
"""

# In the middle of a controller's start the server answers nothing any more.
_SLOW_STORE = """
import os, signal, sys
from fluster_bus.access.address import BusAddress
from fluster_services.controller.controller import Controller, ControllerConfig
from fluster_services.daemon import run_daemon

address, starts = BusAddress.from_environment(), []

async def serve(bus, ready):
    starts.append(bus)
    if len(starts) == 1:
        os.kill(int(os.environ["SERVER_PID"]), signal.SIGSTOP)
    await Controller(bus, ControllerConfig(address=address)).run(ready)

run_daemon(serve, address=address, name="controller", ready_fd=int(sys.argv[1]))
"""


@contextmanager
def _controller(
    address: BusAddress, program: str = _RUN, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """A controller's process, the pipe on which it tells that it is ready, and the one that ties it to its owner."""
    ready, ready_end = os.pipe()
    owner_end, owner = os.pipe()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(ready_end), str(owner_end)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, ADDRESS_VARIABLE: address.to_url(), **variables},
        pass_fds=(ready_end, owner_end),
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(ready_end)
    os.close(owner_end)
    try:
        yield process, ready, owner
    finally:
        process.kill()
        process.communicate()
        for descriptor in (ready, owner):
            os.close(descriptor)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_tells_when_it_is_ready_and_leaves_when_asked(own_server: EmbeddedServer, number: signal.Signals) -> None:
    with _controller(own_server.credentials(Role.SERVICE)) as (process, ready, _owner):
        assert os.read(ready, 10) == b"\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert "Traceback" not in said


def test_it_leaves_when_its_owner_is_gone(own_server: EmbeddedServer) -> None:
    with _controller(own_server.credentials(Role.SERVICE)) as (process, ready, owner):
        assert os.read(ready, 10) == b"\n"
        os.dup2(ready, owner)  # closes the owner's end
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said


def test_wrong_credentials_are_one_line(own_server: EmbeddedServer) -> None:
    address = own_server.credentials(Role.SERVICE)
    with _controller(BusAddress(address.url, address.user, "wrong")) as (process, ready, _owner):
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert os.read(ready, 10) == b""
        assert said.count("\n") == 1, said
        assert "refused the credentials" in said


def test_what_ends_it_is_named(own_server: EmbeddedServer) -> None:
    """Also when it comes out of tasks in tasks."""
    with _controller(own_server.credentials(Role.SERVICE), _FAILING) as (process, _ready, _owner):
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "Traceback" not in said
        assert "sub-exception" not in said
        assert "the disk is full" in said


@pytest.mark.parametrize(
    ("error", "noted"),
    [('KeyError("worker-7")', "Traceback"), ('StorageError("the disk is full")', "the disk is full")],
)
def test_its_log_says_what_ends_it_and_is_its_owners_alone(
    own_server: EmbeddedServer, tmp_path: Path, error: str, noted: str
) -> None:
    log_file = tmp_path / "daemon.log"
    script = _FAILING.replace('StorageError("the disk is full")', error).replace(
        'name="failing"', f'name="failing", log_file=Path({str(log_file)!r})'
    )
    environment = {**os.environ, ADDRESS_VARIABLE: own_server.credentials(Role.SERVICE).to_url()}
    script = f"import os\nfrom pathlib import Path\nos.umask(0)\n{script}"
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert noted in log_file.read_text()
    assert log_file.stat().st_mode & 0o777 == 0o600


def test_its_log_gets_no_larger_than_it_may_and_the_one_before_is_its_owners_alone_too(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    log_file, max_bytes = tmp_path / "daemon.log", 64 << 10
    script = _FAILING.replace(
        'name="failing"', f'name="failing", log_file=Path({str(log_file)!r}), log_bytes={max_bytes}'
    )
    script = script.replace(
        "raise Stor", "import logging; [logging.warning('x' * 1_000) for _ in range(200)]; raise Stor"
    )
    environment = {**os.environ, ADDRESS_VARIABLE: own_server.credentials(Role.SERVICE).to_url()}
    command = [sys.executable, "-c", f"import os\nfrom pathlib import Path\nos.umask(0)\n{script}"]
    assert subprocess.run(command, env=environment, check=False, capture_output=True, timeout=60).returncode == 1
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert sizes.keys() == {"daemon.log", "daemon.log.1"}
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    assert max_bytes // 2 < sizes["daemon.log.1"] <= max_bytes
    assert sizes["daemon.log"] <= max_bytes
    assert "the disk is full" in log_file.read_text()


@pytest.mark.parametrize(
    ("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True)]
)  # one that is not called loopback
def test_a_daemon_warns_of_connections_that_leave_the_machine_as_they_are(
    own_server: EmbeddedServer, host: str, warns: bool
) -> None:
    url = own_server.credentials(Role.SERVICE).to_url().replace("127.0.0.1", host)
    command, environment = [sys.executable, "-c", _FAILING], {**os.environ, ADDRESS_VARIABLE: url}
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert (f"connections to nats://{host}:{own_server.port} are not encrypted" in ended.stderr) is warns
    assert "the disk is full" in ended.stderr


def test_it_starts_over_when_the_connection_is_lost_while_it_starts(own_server: EmbeddedServer) -> None:
    with _controller(own_server.credentials(Role.SERVICE), _CUT_OFF) as (process, ready, _owner):
        assert process.stderr is not None
        assert process.stderr.readline() == "begins\n"
        kill_server(own_server)
        own_server.start()
        assert os.read(ready, 10) == b"\n", process.communicate(timeout=60)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert "starting over: the connection to" in said


def test_it_starts_over_while_nothing_answers_for_a_stream(own_server: EmbeddedServer) -> None:
    with _controller(own_server.credentials(Role.SERVICE), _UNHEARD) as (process, ready, _owner):
        assert os.read(ready, 10) == b"\n", process.communicate(timeout=60)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert "starting over: no program listens on $JS.API.DIRECT.GET.none" in said
        assert "starting over: bucket fluster_controllers does not exist" in said


def test_it_waits_for_a_server_that_is_down_and_says_so(own_server: EmbeddedServer) -> None:
    address = own_server.credentials(Role.SERVICE)
    kill_server(own_server)
    with _controller(address) as (process, ready, _owner):
        assert process.stderr is not None
        assert (
            "controller waits for the bus, and tries again each few seconds: no nats-server"
            in process.stderr.readline()
        )
        own_server.start()
        assert os.read(ready, 10) == b"\n"
        assert "controller has reached the bus" in process.stderr.readline()


def test_it_leaves_when_asked_while_it_waits_for_the_server(own_server: EmbeddedServer) -> None:
    address = own_server.credentials(Role.SERVICE)
    kill_server(own_server)
    with _controller(address) as (process, _ready, _owner):
        assert process.stderr is not None
        assert "waits for the bus" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said


def test_a_controller_goes_on_when_the_store_was_slow(own_server: EmbeddedServer) -> None:
    pid = own_server.pid
    with _controller(own_server.credentials(Role.SERVICE), _SLOW_STORE, SERVER_PID=str(pid)) as (process, ready, _):
        assert process.stderr is not None
        said = ""
        while "starting over" not in said:
            said = process.stderr.readline()
            assert said, "it has ended"
        # The server stops a moment after the signal: at what the controller reads first, or at what it looks at next.
        legal = ("no answer on $JS.API.DIRECT.GET.", "the server's store did not answer in time")
        assert any(text in said for text in legal), said
        thaw_server(own_server)
        assert os.read(ready, 10) == b"\n"


def test_it_shows_life_once_it_is_ready(own_server: EmbeddedServer, tmp_path: Path) -> None:
    file = tmp_path / "alive"
    with _controller(own_server.credentials(Role.SERVICE), FLUSTER_ALIVE_FILE=str(file)) as (_, ready, _owner):
        assert os.read(ready, 10) == b"\n"
        wait_until(file.exists)
