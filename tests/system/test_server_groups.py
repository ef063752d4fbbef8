"""Several nats-servers as one: a machine of theirs that is lost costs no task its life."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import nats
import pytest

from fluster.cluster import Cluster
from fluster_bus.address import BusAddress
from fluster_bus.messages import JobStatus
from fluster_bus.pulse import SERVER_PINGS
from fluster_bus.roles import DEFAULT_NAMESPACE, Role, User
from fluster_bus.server import find_binary
from fluster_bus.server_configuration import accounts_configuration
from fluster_services.config import Timing
from tests.system.daemons import DEFAULT, Daemons
from tests.system.job_requests import command, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until, wait_until_async

SERVERS = 3
PASSWORD = "secret"
# The group takes some 10 s to agree on who leads a stream; six minutes, as it once took to notice, are far more than this.
TIMING = Timing(heartbeat_s=0.5, fence_after_s=40, worker_timeout_s=60, kill_grace_s=1)
PINGS = {"FLUSTER_PING_INTERVAL_S": "0.5", "FLUSTER_PINGS_UNANSWERED": "2"}


class Group:
    """nats-servers that know each other."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.ports, routes = _free_ports(SERVERS), _free_ports(SERVERS)
        known = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        accounts = accounts_configuration((DEFAULT_NAMESPACE,), lambda _user: f'"{PASSWORD}"')
        self.servers = []
        for number, (port, route) in enumerate(zip(self.ports, routes, strict=True)):
            file = folder / f"server-{number}.conf"
            file.write_text(
                f'server_name: "s{number}"\nlisten: "127.0.0.1:{port}"\nmax_payload: 8388608\n{SERVER_PINGS}'
                f'jetstream {{ store_dir: "{folder}/store-{number}" }}\n'
                f'cluster {{ name: "group", listen: "127.0.0.1:{route}", routes: [{known}] }}\n{accounts}'
            )
            server = subprocess.Popen([find_binary(), "--config", file], stderr=subprocess.DEVNULL)
            stack.callback(server.wait)
            stack.callback(server.kill)
            self.servers.append(server)

    def address(self, number: int, role: Role, namespace: str | None = None) -> BusAddress:
        """Of one of them, which tells of the others."""
        return BusAddress(f"nats://127.0.0.1:{self.ports[number]}", User(role, namespace).name, PASSWORD)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def group_of_servers(folder: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(folder, stack)


async def _replicate_all(address: BusAddress) -> None:
    """Have each stream on all servers."""
    client = await nats.connect(address.to_url(), connect_timeout=30, max_reconnect_attempts=-1)
    streams = client.jetstream(timeout=30)
    for info in await streams.streams_info():
        await streams.update_stream(info.config.evolve(num_replicas=SERVERS))

    async def all_follow() -> bool:
        found = [info.cluster for info in await streams.streams_info()]
        return all(each and each.leader and all(peer.current for peer in each.replicas or ()) for each in found)

    await wait_until_async(all_follow, 60)
    await client.close()


@pytest.mark.anyio
async def test_a_server_that_falls_silent_costs_no_task(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PINGS.items():
        monkeypatch.setenv(name, value)
    with Daemons(tmp_path, family, timing=TIMING) as daemons, group_of_servers(tmp_path) as group:
        daemons.start_controller(address=group.address(1, Role.SERVICE))
        await _replicate_all(group.address(1, Role.OPERATOR))
        jobs = {DEFAULT: group.address(1, Role.JOB, DEFAULT)}
        daemons.start_worker("w1", address=group.address(0, Role.SERVICE), job_credentials=jobs)
        gate = tmp_path / "gate"
        with Cluster(group.address(1, Role.OPERATOR)) as client:
            job_id = client.launch(command("sh", "-c", f"echo ready; until [ -e {gate} ]; do sleep 0.1; done"))
            wait_ready(client, job_id)
            group.servers[0].send_signal(signal.SIGSTOP)
            wait_until(lambda: "made anew" in daemons.log("w1"))
            gate.touch()
            info = client.wait(job_id, timeout=90)
            assert (info.status, info.tasks[0].attempt, info.tasks[0].preemptions) == (JobStatus.SUCCEEDED, 1, 0)
            assert [status.alive for status in client.list_workers()] == [True]
