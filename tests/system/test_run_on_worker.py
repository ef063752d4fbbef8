"""An operator has a worker run a job now: before all that waits, recorded, and on that worker only."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster.cluster import Cluster
from fluster.cluster.workers import ask_worker
from fluster.errors import JobRefusedError, WorkerNotFoundError
from fluster_bus.core.errors import CredentialsError
from fluster_bus.core.roles import Role
from fluster_bus.messages import (
    AttemptList,
    Done,
    EnvironmentConfig,
    JobId,
    JobRequest,
    JobStatus,
    ResourceConfig,
    WorkerId,
)
from tests.system.daemons import DEFAULT, PATIENT, Daemons, operated  # noqa: F401 - a fixture
from tests.system.job_requests import command, sleeper, texts, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60
W1, W2 = WorkerId("w1"), WorkerId("w2")


@pytest.fixture
def daemons(tmp_path: Path, family: Family) -> Iterator[Daemons]:
    timing = dataclasses.replace(PATIENT, leader_lease_s=0.5, hold_s=60)
    with Daemons(tmp_path, family, timing=timing, cpu=4) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1")
        yield daemons


def cpus(count: float) -> ResourceConfig:
    return ResourceConfig(cpu=count)


def held(cluster: Cluster, worker: WorkerId = W1) -> list[tuple[str, int]]:
    found = cluster.portal.run(ask_worker, cluster.asynchronous.bus, worker, "list", Done(), AttemptList)
    return [(each.phase, each.attempt) for each in found.attempts]


def test_it_runs_at_once_before_all_that_waits_and_is_recorded(cluster: Cluster, daemons: Daemons) -> None:
    daemons.start_worker("w2")
    big = [cluster.launch(sleeper(resources=cpus(3))) for _ in range(2)]
    for job_id in big:
        wait_ready(cluster, job_id)
    waiting = [cluster.launch(sleeper(resources=cpus(2), priority=1_000)) for _ in range(3)]
    failing = "echo $FLUSTER_WORKER_ID; [ $FLUSTER_ATTEMPT = 2 ] || exit 1"
    request = command("sh", "-c", failing, resources=cpus(1), max_retries_failure=1, retry_backoff_s=0)
    job_id = cluster.run_on_worker(W2, request)
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED, "what it tried again was offered to that worker too"
    assert (info.tasks[0].worker_id, info.tasks[0].attempt) == (W2, 2)
    assert texts(cluster, job_id) == ["w2", "w2"]
    assert {cluster.poll(each).status for each in waiting} == {JobStatus.PENDING}
    assert job_id in [each.job_id for each in cluster.list_jobs()]
    with pytest.raises(
        JobRefusedError, match=r"worker w2 does not run sleeper-.* now: no room; `fluster worker list w2`"
    ):
        cluster.run_on_worker(W2, sleeper(resources=cpus(2)))
    with pytest.raises(JobRefusedError, match=r"no room for more than 1 of 2 tasks"):
        cluster.run_on_worker(W2, sleeper(replicas=2))
    assert held(cluster, W2) == [("running", 1)], "what is refused keeps no room"


def test_it_says_why_not(cluster: Cluster) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"gang": True}, "a gang is gathered from all workers"),
        ({"after": ("other",)}, "it is to run after other, so not now"),
        ({"array": "0-3%2"}, r"only 2 of its tasks may run at once \(0-3%2\)"),
        ({"on_conflict": "replace", "job_id": "known"}, "on_conflict='replace' may mean another job"),
        ({"resources": cpus(5)}, "needs 5 CPUs.*the largest worker, w1, has 4 CPUs"),
        ({"environment": EnvironmentConfig(cwd="/no/such")}, "worker w1 has no folder '/no/such'"),
    ]
    for fields, reason in refused:
        request = JobRequest.model_validate({**dict(sleeper()), **fields})
        with pytest.raises(JobRefusedError, match=reason):
            cluster.run_on_worker(W1, request)
    assert held(cluster) == []
    assert cluster.list_jobs() == []


def test_only_operators_ask_a_worker_that_is_there_and_stays(cluster: Cluster, daemons: Daemons) -> None:
    tenant = daemons.server.credentials(Role.CLIENT, DEFAULT).to_url()
    with Cluster(tenant) as client, pytest.raises(CredentialsError):
        client.run_on_worker(W1, sleeper())
    first = cluster.run_on_worker(W1, sleeper(job_id="first"))
    wait_ready(cluster, first)
    with pytest.raises(JobRefusedError, match="first"):
        cluster.run_on_worker(W1, sleeper(job_id="first"))
    assert held(cluster) == [("running", 1)]
    cluster.drain_worker(W1)
    with pytest.raises(JobRefusedError, match="it drains"):
        cluster.run_on_worker(W1, sleeper())
    with pytest.raises(WorkerNotFoundError, match="no worker 'w9'"):
        cluster.run_on_worker(WorkerId("w9"), sleeper())


def test_its_room_is_kept_while_the_controller_is_away(cluster: Cluster, daemons: Daemons) -> None:
    daemons.kill("controller")
    job_id = cluster.run_on_worker(W1, sleeper(resources=cpus(3)))
    assert cluster.poll(job_id).status is JobStatus.PENDING
    assert held(cluster) == [("reserved", 0)]
    rival = cluster.launch(sleeper(resources=cpus(3), priority=1_000))
    daemons.start_controller()
    wait_ready(cluster, job_id)
    assert held(cluster) == [("running", 1)]
    assert cluster.poll(rival).status is JobStatus.PENDING


def test_room_that_nobody_claims_is_given_back(tmp_path: Path, family: Family) -> None:
    timing = dataclasses.replace(PATIENT, leader_lease_s=0.5, hold_s=0.5)
    with Daemons(tmp_path, family, timing=timing, cpu=4) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1")
        with daemons.connect() as cluster:
            daemons.kill("controller")
            job_id = cluster.run_on_worker(W1, sleeper())
            wait_until(lambda: held(cluster) == [])
            daemons.start_worker("w2")
            daemons.start_controller()
            wait_ready(cluster, job_id)
            assert cluster.poll(job_id).tasks[0].worker_id == W1


def test_at_the_command_line(cluster: Cluster, daemons: Daemons) -> None:
    def fluster(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from fluster.cli import main; main()", *words],
            env={**os.environ, "FLUSTER_CLUSTER_ADDRESS": daemons.address},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    ran = fluster("submit", "--on", "w1", "--now", "--follow", "--", "echo", "here")
    assert (ran.returncode, ran.stdout) == (0, "here\n"), ran.stderr
    full = fluster("submit", "--on", "w1", "--now", "--cpu", "9", "--", "true")
    assert (full.returncode, full.stdout) == (1, ""), full.stderr
    assert "worker w1 does not run" in full.stderr
    assert "--on" in fluster("submit", "--now", "--", "true").stderr
    missing = fluster("submit", "--on", "w", "--now", "--", "true")
    assert (missing.returncode, "no worker 'w'" in missing.stderr) == (4, True), missing.stderr
    elsewhere = JobId(fluster("submit", "--on", "w2", "--", "true").stdout.strip())
    wait_until(
        lambda: "no worker w2 takes work now" in cluster.explain(elsewhere) or cluster.poll(elsewhere).status.finished()
    )
    assert "no worker w2 takes work now" in cluster.explain(elsewhere)
    (worker,) = json.loads(fluster("--output", "json", "workers").stdout)
    assert "fluster.worker=w1" in worker["info"]["total"]["labels"]
    assert "fluster.worker" not in fluster("workers").stdout
