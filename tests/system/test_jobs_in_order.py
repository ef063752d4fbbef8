"""Jobs that wait for each other or take each other's place, on a LocalCluster and by the command line."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from pathlib import Path

import pytest

from fluster.cluster import LocalCluster
from fluster_bus.core.names import unique_name
from fluster_bus.messages import JobId, JobRequest, JobStatus, ResourceConfig
from tests.system.job_requests import call, command, sleeper, wait_ready
from tests.system.processes import Family
from tests.system.test_cli import Cli
from tests.waiting import wait_until

PATIENCE_S = 60


@pytest.fixture
def cli(cluster: LocalCluster) -> Cli:
    return Cli(cluster)


# ---- after other jobs -------------------------------------------------------------------------------------


def test_jobs_run_after_each_other(cluster: LocalCluster, tmp_path: Path) -> None:
    ledger, gate = tmp_path / "ledger", tmp_path / "gate"
    os.mkfifo(gate)

    def writes(word: str) -> str:
        return f"echo {word} >> {ledger}"

    prepare = cluster.launch(command("sh", "-c", f"echo ready; read line <{gate}; {writes('prepare')}", name="prepare"))
    shards = cluster.launch_many([command("sh", "-c", writes("shard"), after=(prepare,)) for _ in range(2)])
    merge = cluster.launch(command("sh", "-c", writes("merge"), name="merge", after=tuple(shards)))
    wait_ready(cluster, prepare)
    wait_until(lambda: cluster.explain(shards[0]) == f"waits for job {prepare}, which is RUNNING")
    assert cluster.explain(merge) == f"waits for 2 jobs: {shards[0]} (PENDING) and {shards[1]} (PENDING)"
    assert cluster.poll(merge).tasks == ()
    gate.write_text("go\n")
    assert cluster.wait(merge, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    assert ledger.read_text().split() == ["prepare", "shard", "shard", "merge"]


def test_the_command_line_says_after_which_jobs(cli: Cli) -> None:
    bad = cli.ok("submit", "--name", "bad", "--", "sh", "-c", "exit 3").strip()
    late = cli.run("submit", "--after", bad[:-2], "--wait", "--", "true")
    assert late.returncode == 1
    assert f"it was to run after job {bad}, which ended as FAILED: exit code 3" in late.stderr
    assert cli.run("submit", "--after", bad, "--after-failure", "run", "--wait", "--", "true").returncode == 0
    assert cli.json("status", late.stdout.strip())["after"] == [bad]
    unknown = cli.run("submit", "--after", "no-such-job", "--", "true")
    assert (unknown.returncode, "no-such-job" in unknown.stderr) == (4, True)


# ---- an id that exists --------------------------------------------------------------------------------------


def test_a_job_is_replaced_when_its_processes_are_gone(cluster: LocalCluster, tmp_path: Path) -> None:
    """The new one finds no process that still writes to the ledger."""
    ledger = tmp_path / "ledger"
    job_id = JobId(unique_name("service"))

    def version(number: int, end: str) -> JobRequest:
        # It takes a moment to leave, during which the next version must not have started.
        script = f"trap 'sleep 0.3; echo {number} ends >> {ledger}; exit' TERM; echo ready; echo {number} starts >> {ledger}; "
        return command("sh", "-c", script + end, name="service", job_id=job_id, on_conflict="replace")

    def has_started(number: int) -> bool:
        return ledger.exists() and f"{number} starts" in ledger.read_text()

    for number in range(3):
        assert cluster.launch(version(number, "while :; do sleep 0.05; done")) == job_id
        wait_until(functools.partial(has_started, number))
    cluster.launch(version(3, "exit 0"))
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert (info.status, info.first_attempt, info.tasks[0].attempt) == (JobStatus.SUCCEEDED, 4, 4)
    expected = [f"{number} {what}" for number in range(3) for what in ("starts", "ends")]
    assert ledger.read_text().splitlines() == [*expected, "3 starts"]
    assert [line.attempt for line in cluster.logs(job_id)] == [4], "those of the others are asked for by attempt"
    assert next(iter(cluster.logs(job_id, attempt=2))).text == "ready"


def test_what_was_launched_by_the_job_that_is_replaced_ends_before_it_is(cluster: LocalCluster) -> None:
    job_id = JobId(unique_name("parent"))

    def launch_children() -> None:
        from fluster.cluster import current_cluster

        inner = current_cluster()
        inner.launch_many([sleeper(name="child") for _ in range(2)])
        print("launched", flush=True)
        time.sleep(600)

    cluster.launch(call(launch_children, job_id=job_id))
    wait_ready(cluster, job_id)
    children = [info.job_id for info in cluster.list_jobs() if info.parent == job_id]
    assert len(children) == 2
    cluster.launch(command("true", job_id=job_id, on_conflict="replace"))
    assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    assert {info.status for info in cluster.wait(children, timeout=PATIENCE_S)} == {JobStatus.KILLED}


def test_the_command_line_says_what_an_id_that_exists_means(cli: Cli) -> None:
    job_id = unique_name("nightly")

    def submit(*words: str) -> subprocess.CompletedProcess[str]:
        return cli.run("submit", "--job-id", job_id, *words)

    first = submit("--wait", "--", "true")
    assert (first.returncode, first.stdout.strip()) == (0, job_id)
    taken = submit("--", "false")
    assert taken.returncode == 1
    assert f"job '{job_id}' exists already" in taken.stderr
    assert submit("--on-conflict", "keep", "--wait", "--", "false").returncode == 0, "it is the first, which succeeded"
    assert submit("--on-conflict", "replace", "--wait", "--", "false").returncode == 1
    assert submit("--on-conflict", "keep", "--wait", "--", "true").returncode == 0, "one that failed is not kept"
    assert cli.json("status", job_id)["tasks"][0]["attempt"] == 3
    without_id = cli.run("submit", "--on-conflict", "keep", "--", "true")
    assert without_id.returncode == 2
    assert "needs job_id" in without_id.stderr


# ---- priorities, and those that are overtaken ---------------------------------------------------------------


def test_a_big_job_gets_its_turn_while_small_ones_keep_being_submitted(family: Family) -> None:
    with LocalCluster(workers=1, cpu=4) as cluster:
        small: list[JobId] = []
        big: JobId | None = None
        deadline = time.monotonic() + 2 * PATIENCE_S
        while True:
            assert time.monotonic() < deadline, (
                f"{len(small)} others were submitted: {cluster.explain(big) if big else None}"
            )
            waiting = [info for info in cluster.list_jobs() if info.name == "small" and not info.status.finished()]
            small += cluster.launch_many([command("sleep", "0.3", name="small") for _ in range(12 - len(waiting))])
            if big is None:
                big = cluster.launch(command("true", name="big", resources=ResourceConfig.with_cpu(4)))
            elif (info := cluster.poll(big)).status.finished():
                assert info.status is JobStatus.SUCCEEDED
                break
        cluster.wait(small, timeout=PATIENCE_S)
    family.wait_gone()


def test_a_higher_priority_goes_first(cli: Cli, cluster: LocalCluster, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    whole = ResourceConfig.with_cpu(8)
    holders = cluster.launch_many([sleeper(resources=whole) for _ in range(2)])
    for holder in holders:
        wait_ready(cluster, holder)

    def writes(word: str) -> tuple[str, ...]:
        return ("sh", "-c", f"echo {word} >> {ledger}")

    waiting = [
        cluster.launch(command(*writes(word), resources=whole, priority=priority))
        for word, priority in (("low", -5), ("first", 0), ("second", 0), ("high", 7))
    ]
    waiting.append(JobId(cli.ok("submit", "--cpu", "8", "--priority", "9", "--", *writes("highest")).strip()))
    assert cluster.poll(waiting[-1]).priority == 9
    cluster.terminate(holders[0])
    cluster.wait(waiting, timeout=PATIENCE_S)
    assert ledger.read_text().split() == ["highest", "high", "first", "second", "low"]
    cluster.terminate(holders[1])
    cluster.wait(holders, timeout=PATIENCE_S)
