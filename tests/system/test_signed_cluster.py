"""A cluster whose users all show signed credentials, set up by the commands of the page that describes it."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluster import Cluster, Entrypoint, JobRequest, JobStatus
from fluster_bus.core.errors import BusError, CredentialsError, FlusterError
from fluster_bus.server_process import find_binary
from tests.doc_pages import blocks
from tests.system.processes import Family
from tests.waiting import wait_until

PAGE = "docs/how-to/credentials.md"
SERVER = "authority/servers/127.0.0.1/nats-server.conf"


class Terminals:
    """A shell for each daemon, and one for the rest."""

    def __init__(self, family: Family, folder: Path) -> None:
        self._port = _free_port()
        programs = f"{Path(sys.executable).parent}:{find_binary().parent}"
        self._environment = family.environment(FLUSTER_RUN_DIR=str(folder / "run"))
        self._environment["PATH"] = f"{programs}:{self._environment['PATH']}"
        for name in ("FLUSTER_CLUSTER_ADDRESS", "FLUSTER_NAMESPACE", "FLUSTER_NAMESPACES", "FLUSTER_WORKER_ID"):
            self._environment.pop(name, None)
        self._folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def type(self, line: str) -> str:
        """Run a line of the page, at a port of this test's own; what it printed, if it ends by itself."""
        line = line.replace("4222", str(self._port)).replace("./", f"{self._folder}/")
        words = shlex.split(line)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self._environment[name] = value
            return ""
        if words[0] == "nats-server" or "start" in words:
            name = words[words.index("--worker-id") + 1] if "--worker-id" in words else words[2].removesuffix(".creds")
            self.daemons[name] = subprocess.Popen(
                words, cwd=self._folder, env=self._environment, stderr=subprocess.DEVNULL
            )
            return ""
        done = subprocess.run(
            words, cwd=self._folder, env=self._environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def is_served(self) -> bool:
        """Whether a server listens."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def restart_server(self) -> None:
        """With the configuration that it had, which knows of no user and of no revocation."""
        server = self.daemons[SERVER]
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        self.type(f"nats-server --config {SERVER}")
        wait_until(self.is_served)

    def close(self) -> None:
        """End the daemons, the server last."""
        for daemon in reversed(self.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                raise


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def terminals(family: Family, tmp_path: Path) -> Iterator[Terminals]:
    terminals = Terminals(family, tmp_path)
    yield terminals
    terminals.close()
    family.wait_gone()


def _workers(cluster: Cluster) -> dict[str, bool]:
    """{name: whether it takes tasks}"""
    try:
        return {each.info.worker_id: each.alive for each in cluster.list_workers()}
    except BusError:  # its daemons are starting
        return {}


def _add_namespace_and_drop_it(terminals: Terminals, lines: list[str]) -> None:
    """Nothing that ran before is restarted for it."""
    said = [terminals.type(line) for line in lines]
    assert said[-1] == "hello\n"
    listed = terminals.type("fluster --address me.creds namespace ls").splitlines()
    assert [line.split()[0] for line in listed] == ["NAME", "default", "team-a"]
    terminals.type("fluster --address me.creds namespace drop team-a --yes")
    (left,) = json.loads(terminals.type("fluster --address me.creds namespace ls --output json"))
    assert (left["name"], left["state"], left["quota"]["cpus"]) == ("default", "active", None)
    a1 = terminals.daemons.pop("a1")
    assert a1.poll() is None  # it goes on, for when the namespace is there again
    terminals.type("fluster --address me.creds namespace add team-a --waiting-jobs 5")
    assert terminals.type(lines[-1]) == "hello\n"
    a1.send_signal(signal.SIGTERM)
    assert a1.wait(60) == 0
    others = [daemon for name, daemon in terminals.daemons.items() if name != "w1"]
    assert [daemon.poll() for daemon in others] == [None] * len(others)


def test_the_page_makes_a_cluster_adds_a_worker_and_revokes_one(terminals: Terminals, tmp_path: Path) -> None:
    make, start, use, _group, renew, change, namespace, join = (source.splitlines() for _, source in blocks(PAGE))
    for line in [*make, *start]:
        terminals.type(line)
    wait_until(terminals.is_served)
    with Cluster(str(tmp_path / "me.creds")) as operator:
        wait_until(lambda: _workers(operator) == {"w1": True})
        said = [terminals.type(line) for line in use]
        assert said[-1] == "hello\n"
        certificate = (tmp_path / "authority/servers/127.0.0.1/server.pem").read_text()
        for line in renew:
            terminals.type(line)
        assert (tmp_path / "authority/servers/127.0.0.1/server.pem").read_text() != certificate
        terminals.daemons[SERVER].send_signal(signal.SIGHUP)
        add, start_second, revoke, listed = change
        for line in (add, start_second):
            terminals.type(line)
        wait_until(lambda: _workers(operator) == {"w1": True, "w2": True})
        terminals.type(revoke)
        assert terminals.daemons["w1"].wait(60) == 1  # it is cut off, and refused when it tries to come back
        table = terminals.type(listed)
        assert [line.split()[3] for line in table.splitlines() if line.startswith(("w1", "w2"))] == ["revoked", "good"]
        job = JobRequest(name="after", entrypoint=Entrypoint(command=("true",)))
        assert operator.wait(operator.launch(job), timeout=60).status is JobStatus.SUCCEEDED
        _add_namespace_and_drop_it(terminals, namespace)
        create, start_third, listed, revoke = join
        for line in (create, start_third):
            terminals.type(line)
        wait_until(lambda: _workers(operator).get("w3") is True)
        terminals.daemons["w2"].send_signal(signal.SIGTERM)
        assert terminals.daemons["w2"].wait(60) == 0
        assert operator.wait(operator.launch(job), timeout=60).status is JobStatus.SUCCEEDED  # by who has joined
        row = terminals.type(listed).splitlines()[1].split()
        assert (row[1], row[2], row[3], row[-1]) == ("default", "1/10", "good", "w3")
        terminals.daemons["w3"].kill()
        terminals.daemons["w3"].wait(60)
        terminals.type("fluster worker start --worker-id w3 --state-dir ./w3")  # with what it has kept
        wait_until(lambda: _workers(operator).get("w3") is True)
        terminals.type(revoke)
        revoked = time.monotonic()
        assert terminals.daemons["w3"].wait(60) == 1
        assert time.monotonic() - revoked < 5  # the bound that operators are promised
    terminals.restart_server()
    with pytest.raises(CredentialsError):
        Cluster(str(tmp_path / "w1.creds"))
    with pytest.raises(FlusterError), Cluster(str(tmp_path / "alice.creds"), "other") as alice:
        alice.list_jobs()
