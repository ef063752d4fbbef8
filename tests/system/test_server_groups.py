"""Several nats-servers as one: a machine of theirs that is lost costs no task its life."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fluster.cluster import Cluster
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobStatus
from fluster_services.config import Timing
from tests.server_group import group_of_servers
from tests.system.daemons import DEFAULT, Daemons
from tests.system.job_requests import command, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

# The group takes some 10 s to agree on who leads a stream; six minutes, as it once took to notice, are far more than this.
TIMING = Timing(heartbeat_s=0.5, fence_after_s=40, worker_timeout_s=60, kill_grace_s=1)
PINGS = {"FLUSTER_PING_INTERVAL_S": "0.5", "FLUSTER_PINGS_UNANSWERED": "2"}


@pytest.mark.anyio
async def test_a_server_that_falls_silent_costs_no_task(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PINGS.items():
        monkeypatch.setenv(name, value)
    with Daemons(tmp_path, family, timing=TIMING) as daemons, group_of_servers(tmp_path) as group:
        daemons.start_controller(address=group.address(1, Role.SERVICE))
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
