"""Retries, timeouts and explanations, with real processes. Pauses are short here; their arithmetic is tested apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fluster import Cluster, JobStatus, LocalCluster, ResourceConfig
from tests.system.job_requests import call, command, sleeper, wait_ready

TIMEOUT_S = 60


def _fail_twice(ledger: str) -> None:
    with Path(ledger).open("a") as file:
        file.write("tried\n")
    tried = len(Path(ledger).read_text().splitlines())
    if tried <= 2:
        raise RuntimeError(f"try {tried} fails")


def test_a_failure_is_tried_again_as_often_as_asked(cluster: Cluster, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    job = cluster.launch(call(_fail_twice, str(ledger), max_retries_failure=2, retry_backoff_s=0.05))
    info = cluster.wait(job, timeout=TIMEOUT_S)
    assert info.status is JobStatus.SUCCEEDED
    assert (info.tasks[0].attempt, info.tasks[0].failures, info.tasks[0].preemptions) == (3, 2, 0)
    assert len(ledger.read_text().splitlines()) == 3


def test_when_the_budget_is_spent_the_last_failure_is_told(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.launch(call(_fail_twice, str(tmp_path / "ledger"), max_retries_failure=1, retry_backoff_s=0.05))
    info = cluster.wait(job, timeout=TIMEOUT_S)
    assert info.status is JobStatus.FAILED
    assert info.error_message.splitlines()[0] == "RuntimeError: try 2 fails; its last words:"
    assert info.error_message.splitlines()[-1] == "RuntimeError: try 2 fails"


def test_an_attempt_that_runs_over_its_time_is_stopped_and_fails(cluster: Cluster) -> None:
    job = cluster.launch(sleeper(timeout_s=3))
    info = cluster.wait(job, timeout=TIMEOUT_S)
    assert info.status is JobStatus.FAILED
    assert info.error_message == "stopped: it ran for 3 s, its timeout; its last words:\nready"


def test_a_job_that_finds_no_room_in_its_time_is_given_up(cluster: Cluster) -> None:
    filling = [cluster.launch(sleeper(resources=ResourceConfig.with_cpu(8))) for _ in range(2)]
    try:
        for job in filling:
            wait_ready(cluster, job)
        late = cluster.launch(command("true", scheduling_timeout_s=0.3))
        info = cluster.wait(late, timeout=TIMEOUT_S)
    finally:
        for job in filling:
            cluster.terminate(job)
        cluster.wait(filling, timeout=TIMEOUT_S)
    assert info.status is JobStatus.UNSCHEDULABLE
    assert info.error_message == "no worker had room for it within 0.3 s"


@pytest.mark.parametrize(("allowed", "others"), [(0, JobStatus.KILLED), (1, JobStatus.SUCCEEDED)])
def test_tasks_that_fail_for_good_stop_the_others_beyond_what_is_allowed(
    cluster: Cluster, tmp_path: Path, allowed: int, others: JobStatus
) -> None:
    go_on = tmp_path / "go-on"
    script = '[ "$FLUSTER_TASK_INDEX" = 1 ] && exit 2; until [ -e "$GO_ON" ]; do sleep 0.05; done'
    request = command("sh", "-c", script, env={"GO_ON": str(go_on)}, replicas=3, max_task_failures=allowed)
    job = cluster.launch(request)
    if allowed:
        go_on.touch()
    info = cluster.wait(job, timeout=TIMEOUT_S)
    assert info.status is JobStatus.FAILED
    assert info.error_message == "task 1: exit code 2"
    assert [task.status for task in info.tasks] == [others, JobStatus.FAILED, others]


def test_why_a_job_waits_is_explained() -> None:
    with LocalCluster(cpu=2) as small:
        running = small.launch(sleeper(resources=ResourceConfig.with_cpu(2)))
        wait_ready(small, running)
        waiting = small.launch(command("true"))
        too_large = small.launch(command("true", resources=ResourceConfig.with_cpu(64, memory="32MiB")))
        assert small.explain(running) == "it is not waiting: 1 of 1 tasks run on worker-0"
        assert small.explain(waiting) == f"fits worker-0; 2 of 2 CPUs are busy with {running}; next in line"
        assert small.explain(too_large).startswith(
            "needs 64 CPUs, 32 MiB memory; the largest worker, worker-0, has 2 CPUs"
        )
        small.terminate(running)
        assert small.wait(waiting, timeout=TIMEOUT_S).status is JobStatus.SUCCEEDED
        assert small.explain(waiting) == "it ended as SUCCEEDED"


def test_the_command_line_explains_too(cluster: LocalCluster) -> None:
    job = cluster.launch(command("true"))
    cluster.wait(job, timeout=TIMEOUT_S)
    words = [sys.executable, "-c", "from fluster.cli import main; main()", "--address", cluster.address, "explain", job]
    told = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert told.stdout == "it ended as SUCCEEDED\n"
