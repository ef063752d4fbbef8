"""What processes of a cluster are to each other: no connections of their own, and no walls between tasks of one user."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import psutil

from fluster import ActorPool, Cluster, LocalCluster, actor, deploy
from fluster_bus.access.address import CREDENTIALS_VARIABLE
from tests.system.job_requests import call, command
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60


@actor
class Echo:
    def pid(self) -> int:
        return os.getpid()


def _ask(pool: ActorPool[Echo]) -> int:
    return pool.call().pid()


def _tree(family: Family) -> dict[int, psutil.Process]:
    """All of the family and what they started, by their ids: tasks inherit no mark."""
    found = {each.pid: each for each in family.members()}
    for each in list(found.values()):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {child.pid: child for child in each.children(recursive=True)}
    return found


def _sockets(process: psutil.Process) -> list[Any]:
    """Those of the Internet protocols; none of a process that ends just now."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.net_connections("inet")
    return []


def test_clients_workers_and_actors_connect_to_the_server_alone(family: Family) -> None:
    with LocalCluster(workers=1) as cluster:
        pool = deploy(cluster, Echo, name="echo")
        actor_pid = pool.call().pid()
        assert cluster.result(cluster.launch(call(_ask, pool)), timeout=PATIENCE_S) == actor_pid
        processes = _tree(family)
        (server,) = [each for each in family.named("nats-server") if each.name() == "nats-server"]
        sockets = {each.pid: _sockets(each) for each in processes.values() if each != server}
        assert sockets[actor_pid], "it has a connection to the server"
        everything = [each for found in sockets.values() for each in found]
        assert [each for each in everything if each.status == psutil.CONN_LISTEN] == []
        (port,) = {each.laddr.port for each in _sockets(server) if each.status == psutil.CONN_LISTEN}
        assert {each.raddr.port for each in everything if each.raddr} == {port}
        pool.shutdown()
    family.wait_gone()


def _read_credentials(pid: int) -> str:
    """What another task of the worker's user proves itself with."""
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    environment = dict(word.split("=", 1) for word in words if word)
    return Path(environment[CREDENTIALS_VARIABLE]).read_text()


def test_a_task_that_is_a_process_reads_the_credentials_of_another_namespaces_task(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """As docs/security.md says: processes keep no tenants apart."""
    file = tmp_path / "pid"
    with Cluster(cluster.address, namespace="other") as others:
        job = others.launch(command("sh", "-c", f"echo $$ > {file}.new; mv {file}.new {file}; exec sleep 1000"))
        wait_until(file.exists, PATIENCE_S)
        read = cluster.result(cluster.launch(call(_read_credentials, int(file.read_text()))), timeout=PATIENCE_S)
        assert "job_other" in read
        others.terminate(job)
        others.wait(job, timeout=PATIENCE_S, raise_on_failure=False)
