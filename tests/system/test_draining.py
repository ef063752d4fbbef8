"""A worker that is to leave: it takes nothing new, waits for what it has, and is gone for good."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluster.cluster import Cluster, LocalCluster
from fluster.errors import WorkerNotFoundError
from fluster_bus.core.errors import CredentialsError
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobStatus, WorkerId, WorkerStatus
from fluster_services.vm import LocalBackend
from tests.system.daemons import DEFAULT, PATIENT, Daemons
from tests.system.job_requests import command, sleeper, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60
W1, W2 = WorkerId("w1"), WorkerId("w2")


@pytest.fixture
def daemons(tmp_path: Path, family: Family) -> Iterator[Daemons]:
    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        yield daemons


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def open_gate(gate: Path) -> None:
    gate.write_text("go\n")


def workers(cluster: Cluster) -> dict[str, WorkerStatus]:
    return {worker.info.worker_id: worker for worker in cluster.list_workers()}


def exit_status(process: subprocess.Popen[bytes]) -> int:
    return process.wait(PATIENCE_S)


def test_a_drained_worker_waits_for_what_runs_and_takes_nothing_new(daemons: Daemons, gate: Path) -> None:
    daemons.start_worker("w1")
    with daemons.connect() as cluster:
        running = cluster.launch(command("sh", "-c", f"echo ready; cat {gate}"))
        wait_ready(cluster, running)
        assert cluster.drain_worker(W1).running == 1
        wait_until(lambda: workers(cluster)["w1"].info.draining)
        waiting = cluster.launch(command("true"))
        wait_until(lambda: "there is no worker now that takes work" in cluster.explain(waiting))
        assert cluster.drain_worker(W1).running == 1  # told twice
        daemons.start_worker("w2")
        assert cluster.wait(waiting, timeout=PATIENCE_S).worker_id == "w2"
        assert cluster.poll(running).status is JobStatus.RUNNING
        open_gate(gate)
        done = cluster.wait(running, timeout=PATIENCE_S)
        assert (done.status, done.worker_id, done.tasks[0].attempt) == (JobStatus.SUCCEEDED, "w1", 1)
        assert exit_status(daemons.running["w1"]) == 0
        wait_until(lambda: set(workers(cluster)) == {"w2"})
        with pytest.raises(WorkerNotFoundError, match="'w1'"):
            cluster.drain_worker(W1)
    assert "w1 has left" in daemons.log("w1")
    assert "is lost" not in daemons.log("controller")


def test_what_runs_too_long_is_handed_back_and_costs_no_failure(daemons: Daemons) -> None:
    daemons.start_worker("w1", drain_timeout_s=0.2)
    with daemons.connect() as cluster:
        job_id = cluster.launch(sleeper())
        wait_ready(cluster, job_id)
        daemons.start_worker("w2")
        daemons.kill("w1", signal.SIGTERM)
        assert exit_status(daemons.running["w1"]) == 0
        wait_ready(cluster, job_id, lines=2)
        (task,) = cluster.poll(job_id).tasks
        assert (task.worker_id, task.attempt, task.failures, task.preemptions) == ("w2", 2, 0, 1)
        assert set(workers(cluster)) == {"w2"}
        cluster.terminate(job_id)
        assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED


def test_who_is_in_a_hurry_bounds_a_drain_that_has_begun(daemons: Daemons) -> None:
    daemons.start_worker("w1")
    with daemons.connect() as cluster:
        job_id = cluster.launch(sleeper(max_retries_preemption=0))
        wait_ready(cluster, job_id)
        cluster.drain_worker(W1)
        cluster.drain_worker(W1, timeout=0, wait=True)
        info = cluster.wait(job_id, timeout=PATIENCE_S)
        assert (info.status, info.error_message) == (JobStatus.WORKER_FAILED, "worker w1 left before it was over")
        assert exit_status(daemons.running["w1"]) == 0


def test_a_second_signal_ends_it_at_once_and_its_successor_adopts(daemons: Daemons, gate: Path) -> None:
    daemons.start_worker("w1")
    with daemons.connect() as cluster:
        job_id = cluster.launch(command("sh", "-c", f"echo ready; cat {gate}"))
        wait_ready(cluster, job_id)
        daemons.kill("w1", signal.SIGTERM)
        wait_until(lambda: workers(cluster)["w1"].info.draining)
        daemons.kill("w1", signal.SIGTERM)
        assert exit_status(daemons.running["w1"]) == 128 + signal.SIGTERM
        daemons.start_worker("w1")
        open_gate(gate)
        info = cluster.wait(job_id, timeout=PATIENCE_S)
        assert (info.status, info.tasks[0].attempt) == (JobStatus.SUCCEEDED, 1)
        assert cluster.wait(cluster.launch(command("true")), timeout=PATIENCE_S).worker_id == "w1"


def test_only_an_operator_may_send_a_worker_away(daemons: Daemons) -> None:
    daemons.start_worker("w1")
    with (
        Cluster(daemons.server.credentials(Role.CLIENT, DEFAULT)) as client,
        pytest.raises(CredentialsError, match="other credentials"),
    ):
        client.drain_worker(W1)


def test_nobody_starts_a_drained_worker_again_and_the_end_is_quick(family: Family) -> None:
    with LocalCluster(workers=2, cpu=4) as cluster:
        job_id = cluster.launch(sleeper())
        wait_ready(cluster, job_id)
        holder = cluster.poll(job_id).worker_id
        (idle,) = {worker for worker in workers(cluster) if worker != holder}
        pid = workers(cluster)[idle].info.pid
        cluster.drain_worker(WorkerId(idle), wait=True)
        wait_until(lambda: pid not in {process.pid for process in family.members()})
        # The supervisor takes deaths in in their order, so with this worker up again it has seen to the other one, too.
        os.kill(workers(cluster)[str(holder)].info.pid, signal.SIGKILL)
        before = workers(cluster)[str(holder)].info.started_at
        wait_until(lambda: workers(cluster)[str(holder)].info.started_at > before, PATIENCE_S)
        assert set(workers(cluster)) == {holder}
        started = time.monotonic()
    assert time.monotonic() - started < 50  # and not the time that a drain may take
    family.wait_gone()


@pytest.mark.parametrize("backend", [None, LocalBackend()])
def test_a_local_worker_waits_as_long_as_its_cluster_says(family: Family, backend: LocalBackend | None) -> None:
    with LocalCluster(workers=2, cpu=4, drain_timeout=0.1, backend=backend) as cluster:
        job_id = cluster.launch(sleeper())
        wait_ready(cluster, job_id)
        holder = str(cluster.poll(job_id).worker_id)
        os.kill(workers(cluster)[holder].info.pid, signal.SIGTERM)
        wait_until(lambda: cluster.poll(job_id).tasks[0].preemptions == 1, 30)  # half of the usual time
    family.wait_gone()
