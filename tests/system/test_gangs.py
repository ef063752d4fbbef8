"""Gangs with real processes, which really meet each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster import Cluster, JobStatus, LocalCluster, ResourceConfig
from fluster_bus.messages import JobId, JobInfo, JobRequest
from tests.system.daemons import QUICK, Daemons
from tests.system.job_requests import call, command, sleeper, texts, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

TIMEOUT_S = 60


def _gang(replicas: int, **fields: Any) -> JobRequest:
    """A gang whose tasks meet."""

    def meet() -> None:
        """Each rank tells the first where it is, over a plain socket, and leaves when the first has heard all."""
        import os
        import socket
        import time

        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert (rank, size) == (int(os.environ["FLUSTER_TASK_INDEX"]), int(os.environ["FLUSTER_NUM_TASKS"]))
        host, _, port = os.environ["FLUSTER_GANG_ADDRESS"].rpartition(":")
        assert (host, port) == (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        if rank == 0:
            with socket.create_server((host, int(port))) as server:
                server.settimeout(30)
                peers = [server.accept()[0] for _ in range(size - 1)]
                ranks = sorted(int(peer.recv(16)) for peer in peers)
                for peer in peers:
                    peer.sendall(b"go")
            print(f"met {ranks}")
            return
        deadline = time.monotonic() + 30
        while True:
            try:
                connection = socket.create_connection((host, int(port)), timeout=60)
            except ConnectionRefusedError:  # the first may not listen yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
                continue
            connection.sendall(str(rank).encode())
            assert connection.recv(2) == b"go"
            return

    return call(meet, **{"name": "gang", "replicas": replicas, "gang": True, **fields})


def _check_met(cluster: Cluster, info: JobInfo) -> None:
    assert info.status is JobStatus.SUCCEEDED, info
    assert texts(cluster, info.job_id) == [f"met {list(range(1, len(info.tasks)))}"]


def test_the_tasks_of_a_gang_find_each_other(cluster: LocalCluster) -> None:
    job = cluster.launch(_gang(6, resources=ResourceConfig.with_cpu(2)))
    info = cluster.wait(job, timeout=TIMEOUT_S)
    _check_met(cluster, info)
    assert {task.worker_id for task in info.tasks} == {"worker-0", "worker-1"}


def test_what_the_user_sets_goes_before_what_the_gang_sets(cluster: LocalCluster) -> None:
    script = 'echo "$MASTER_PORT $RANK $FLUSTER_GANG_ADDRESS"'
    job = cluster.launch(command("sh", "-c", script, env={"MASTER_PORT": "7"}, gang=True))
    assert cluster.wait(job, timeout=TIMEOUT_S).status is JobStatus.SUCCEEDED
    (line,) = texts(cluster, job)
    port, rank, address = line.split()
    assert (port, rank, address.partition(":")[0]) == ("7", "0", "127.0.0.1")


def test_the_command_line_starts_gangs_too(cluster: LocalCluster) -> None:
    words = [sys.executable, "-c", "from fluster.cli import main; main()", "--address", cluster.address]
    words += ["submit", "--gang", "--replicas", "2", "--follow", "--", "sh", "-c", "echo $FLUSTER_GANG_ADDRESS"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    addresses = [line.split()[-1] for line in told.stdout.splitlines()]
    assert len(addresses) == 2
    assert len(set(addresses)) == 1
    assert addresses[0].startswith("127.0.0.1:")


@pytest.fixture
def small(family: Family) -> Iterator[LocalCluster]:
    """Two workers with two CPUs each."""
    with LocalCluster(workers=2, cpu=4) as cluster:
        yield cluster
    family.wait_gone()


def test_a_gang_that_is_too_big_for_now_leaves_the_rest_to_others(small: LocalCluster) -> None:
    filling = small.launch(sleeper())
    wait_ready(small, filling)
    gang = small.launch(_gang(2, resources=ResourceConfig.with_cpu(2)))
    told = "gang of 2 needs 2 x (2 CPUs, 1 GiB memory) at once; only 1 fit now; next in line"
    wait_until(lambda: small.explain(gang) == told, TIMEOUT_S, lambda: small.explain(gang))
    others = [small.launch(command("true", resources=ResourceConfig.with_cpu(cpu))) for cpu in (1, 2)]
    assert {info.status for info in small.wait(others, timeout=TIMEOUT_S)} == {JobStatus.SUCCEEDED}
    assert small.poll(gang).status is JobStatus.PENDING
    small.terminate(filling)
    _check_met(small, small.wait(gang, timeout=TIMEOUT_S))


def test_gangs_that_each_need_most_of_the_cluster_all_run(small: LocalCluster) -> None:
    jobs = small.launch_many([_gang(3, name=f"gang{number}") for number in range(5)])
    for info in small.wait(jobs, timeout=TIMEOUT_S):
        _check_met(small, info)


def test_a_cancelled_gang_leaves_nothing(small: LocalCluster) -> None:
    """At whatever moment: some are waiting then, some are gathered, some run."""
    jobs: list[JobId] = []
    for number in range(12):
        jobs.append(small.launch(command("sleep", "600", name=f"gang{number}", replicas=3, gang=True)))
        small.terminate(jobs[-1])
    infos = small.wait(jobs, timeout=TIMEOUT_S)
    assert {info.status for info in infos} == {JobStatus.KILLED}
    assert {task.status for info in infos for task in info.tasks} == {JobStatus.KILLED}
    _check_met(small, small.wait(small.launch(_gang(4)), timeout=TIMEOUT_S))  # all of the capacity is there


def _first_time_wait(folder: Path, replicas: int, **fields: Any) -> JobRequest:
    """A gang whose tasks tell their process ids, and do nothing more at their first attempt."""
    script = f"""
        echo $$ > {folder}/$FLUSTER_TASK_INDEX.$FLUSTER_ATTEMPT.part
        mv {folder}/$FLUSTER_TASK_INDEX.$FLUSTER_ATTEMPT.part {folder}/$FLUSTER_TASK_INDEX.$FLUSTER_ATTEMPT
        [ $FLUSTER_ATTEMPT = 1 ] && exec sleep 600
        echo $FLUSTER_GANG_ADDRESS
    """
    return command("sh", "-c", script, replicas=replicas, gang=True, retry_backoff_s=0.05, **fields)


def _wait_pids(folder: Path, replicas: int) -> list[int]:
    files = [folder / f"{task}.1" for task in range(replicas)]
    wait_until(lambda: all(file.exists() for file in files), TIMEOUT_S)
    return [int(file.read_text()) for file in files]


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_killed_process_restarts_its_gang(small: LocalCluster, tmp_path: Path) -> None:
    job = small.launch(_first_time_wait(tmp_path, 3, max_retries_failure=1))
    pids = _wait_pids(tmp_path, 3)
    os.kill(pids[1], signal.SIGKILL)
    info = small.wait(job, timeout=TIMEOUT_S)
    assert info.status is JobStatus.SUCCEEDED, info
    assert [(task.attempt, task.failures, task.preemptions) for task in info.tasks] == [(2, 0, 0), (2, 1, 0), (2, 0, 0)]
    assert all(_is_gone(pid) for pid in pids)
    addresses = texts(small, job)
    assert len(addresses) == 3
    assert len(set(addresses)) == 1


def test_without_budget_a_killed_process_ends_its_gang(small: LocalCluster, tmp_path: Path) -> None:
    job = small.launch(_first_time_wait(tmp_path, 3))
    pids = _wait_pids(tmp_path, 3)
    os.kill(pids[1], signal.SIGKILL)
    info = small.wait(job, timeout=TIMEOUT_S)
    assert (info.status, info.error_message) == (JobStatus.FAILED, "task 1: killed by SIGKILL")
    others = [info.tasks[0], info.tasks[2]]
    assert {task.status for task in others} == {JobStatus.KILLED}
    assert {task.error_message for task in others} == {"task 1 of its gang ended as FAILED"}


def test_a_lost_worker_restarts_the_gang_elsewhere(tmp_path: Path, family: Family) -> None:
    with Daemons(tmp_path / "cluster", family, timing=QUICK, cpu=2) as daemons:
        daemons.start_controller()
        for name in ("w1", "w2"):
            daemons.start_worker(name)
        with daemons.connect() as client:
            job = client.launch(_first_time_wait(tmp_path, 4))
            pids = _wait_pids(tmp_path, 4)
            before = client.poll(job)
            daemons.start_worker("w3")
            daemons.kill("w2")
            info = client.wait(job, timeout=TIMEOUT_S)
            assert info.status is JobStatus.SUCCEEDED, info
            assert {task.worker_id for task in before.tasks} == {"w1", "w2"}
            assert {task.worker_id for task in info.tasks} == {"w1", "w3"}
            assert {(task.attempt, task.failures) for task in info.tasks} == {(2, 0)}
            lost = [task.task for task in before.tasks if task.worker_id == "w2"]
            assert [task.task for task in info.tasks if task.preemptions] == lost
            assert all(_is_gone(pid) for pid in pids)


@pytest.mark.parametrize("victim", ["controller", "w1"])
def test_whoever_dies_while_gangs_are_gathered_is_not_missed(tmp_path: Path, family: Family, victim: str) -> None:
    with Daemons(tmp_path / "cluster", family, cpu=2) as daemons:
        daemons.start_controller()
        for name in ("w1", "w2"):
            daemons.start_worker(name)
        with daemons.connect() as client:
            jobs = client.launch_many([_gang(3, name=f"gang{number}") for number in range(6)])
            client.wait(jobs[0], timeout=TIMEOUT_S)
            daemons.kill(victim)
            daemons.start_controller() if victim == "controller" else daemons.start_worker(victim)
            for info in client.wait(jobs, timeout=TIMEOUT_S):
                assert info.status is JobStatus.SUCCEEDED, info
