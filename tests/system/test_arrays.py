"""Arrays as a user submits them."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from fluster.cli.app import app
from fluster.cluster import LocalCluster
from fluster_bus.messages import JobStatus
from tests.system.job_requests import command, texts
from tests.waiting import wait_until

_FLUSTER = [sys.executable, "-c", "from fluster.cli import main; main()"]
_STEP = {"+": 1, "-": -1}


def test_tasks_of_an_array_are_independent_and_so_many_at_once(cluster: LocalCluster, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    script = f"echo + >>{journal}; echo $FLUSTER_ARRAY_ID; sleep 0.5; echo - >>{journal}; test $FLUSTER_ARRAY_ID != 3"
    job_id = cluster.launch(command("sh", "-c", script, array="1-15:2%2"))
    info = cluster.wait(job_id, timeout=60)
    assert info.status is JobStatus.FAILED
    failed = [task.task for task in info.tasks if task.status is JobStatus.FAILED]
    assert failed == [1]
    assert sum(task.status is JobStatus.SUCCEEDED for task in info.tasks) == 7
    assert sorted(map(int, texts(cluster, job_id))) == list(range(1, 16, 2))
    running = list(itertools.accumulate(_STEP[line] for line in journal.read_text().split()))
    assert max(running) == 2
    assert running[-1] == 0


def test_an_array_says_why_its_tasks_wait(cluster: LocalCluster) -> None:
    job_id = cluster.launch(command("sh", "-c", "echo ready; exec sleep 600", array="0-2%1"))
    lines = cluster.logs(job_id, follow=True)
    next(iter(lines))
    lines.close()  # type: ignore[attr-defined]  # it is a generator
    assert cluster.explain(job_id) == "2 of 3 tasks wait, since at most 1 may run at once (0-2%1)"
    cluster.terminate(job_id)
    info = cluster.wait(job_id, timeout=60)
    assert {task.status for task in info.tasks} == {JobStatus.KILLED}


def test_a_task_of_an_array_is_shown_and_named_by_its_number(cluster: LocalCluster) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*_FLUSTER, "--address", cluster.address, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    script = "echo I am $FLUSTER_ARRAY_ID; test $FLUSTER_ARRAY_ID != 20"
    submitted = run("submit", "--array", "10-30:10", "--follow", "--", "sh", "-c", script)
    job_id = submitted.stderr.split()[2]
    assert sorted(submitted.stdout.splitlines()) == [f"{number}| I am {number}" for number in (10, 20, 30)]
    assert f"job {job_id} ended as FAILED: task 20: " in submitted.stderr
    tasks = run("status", job_id).stdout.rpartition("\n\n")[2].splitlines()[1:]
    assert [line.split()[:2] for line in tasks] == [["10", "SUCCEEDED"], ["20", "FAILED"], ["30", "SUCCEEDED"]]
    assert [task["array_id"] for task in json.loads(run("--output", "json", "status", job_id).stdout)["tasks"]] == [
        10,
        20,
        30,
    ]
    assert run("logs", job_id, "--task", "20").stdout == "I am 20\n"
    line = json.loads(run("--output", "json", "logs", job_id, "--task", "30").stdout)
    assert (line["array_id"], line["task"]) == (30, 2)
    refused = run("logs", job_id, "--task", "1")
    assert refused.returncode == 2
    assert f"--task=1: job {job_id} has no task 1: its array is 10-30:10" in refused.stderr


def test_a_worker_shows_and_names_a_task_of_an_array_by_its_number(cluster: LocalCluster) -> None:
    def worker(verb: str, *words: str, output: str = "table") -> str:
        where = ["--address", cluster.address, "--output", output]
        done = CliRunner().invoke(app, [*where, "worker", verb, worker_id, *words])
        assert done.exit_code == 0, done.output
        return done.output

    job_id = cluster.launch(command("sh", "-c", "echo I am $FLUSTER_ARRAY_ID; exec sleep 600", array="10-20:10"))
    wait_until(lambda: [line.text for line in cluster.logs(job_id, task=1)] == ["I am 20"])
    worker_id = str(cluster.poll(job_id).tasks[1].worker_id)
    listed = [line.split()[1:4] for line in worker("list").splitlines()]
    assert [job_id, "20", "1"] in listed
    assert [job_id, "1", "1"] not in listed
    assert worker("status", job_id, "--task", "20").splitlines()[1].split()[1:4] == [job_id, "20", "1"]
    assert worker("logs", job_id, "--task", "20") == "I am 20\n"
    line = json.loads(worker("logs", job_id, "--task", "20", output="json"))
    assert (line["array_id"], line["task"], line["text"]) == (20, 1, "I am 20")
    assert worker("kill", job_id, "--task", "20") == f"{job_id}.20.1\n"
    wait_until(lambda: cluster.poll(job_id).tasks[1].status is JobStatus.KILLED)
    assert cluster.poll(job_id).tasks[0].status is JobStatus.RUNNING
    cluster.terminate(job_id)
