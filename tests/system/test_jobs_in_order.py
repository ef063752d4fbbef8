"""Jobs that wait for each other or take each other's place, on a LocalCluster and by the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fluster.cluster import LocalCluster
from fluster_bus.messages import JobStatus
from tests.system.job_requests import command, wait_ready
from tests.system.test_cli import Cli
from tests.waiting import wait_until

PATIENCE_S = 30


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
