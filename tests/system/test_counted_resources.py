"""What is counted by names of the users' own, such as licences: no more is given away at once than there is."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster import actor, deploy
from fluster.cluster import LocalCluster
from fluster_bus.messages import JobId, JobStatus, ResourceConfig
from tests.system.job_requests import command
from tests.system.processes import Family
from tests.waiting import wait_until

_COMMAND = [sys.executable, "-c", "from fluster.cli import main; main()"]
ONE = ResourceConfig(cpu=0.1, memory=64 << 20, resources={"license": 1})


@pytest.fixture(scope="module")
def licensed() -> Iterator[LocalCluster]:
    family = Family()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in family.variables.items():
            patch.setenv(name, value)
        patch.setenv("FLUSTER_RESOURCES", "license=2,slot=0.5")
        started = LocalCluster()
    with started:
        yield started
    family.wait_gone()


def _cli(cluster: LocalCluster, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_COMMAND, "--address", cluster.address, *words], capture_output=True, text=True, timeout=120, check=False
    )


def _most_at_once(folder: Path, tasks: int) -> int:
    """By the +1 and -1 that each task wrote when it began and ended."""
    running = list(itertools.accumulate(map(int, (folder / "events").read_text().split())))
    assert (len(running), running[-1]) == (2 * tasks, 0)
    return max(running)


def _work(folder: Path) -> tuple[str, ...]:
    return ("sh", "-c", f"echo 1 >>{folder}/events; sleep 0.3; echo -1 >>{folder}/events")


@pytest.mark.parametrize("array", [False, True])
def test_never_more_run_at_once_than_there_are(licensed: LocalCluster, tmp_path: Path, array: bool) -> None:
    how: dict[str, Any] = {"array": "0-4"} if array else {"replicas": 5}
    job_id = licensed.launch(command(*_work(tmp_path), resources=ONE, **how))
    assert licensed.wait(job_id, timeout=60).status is JobStatus.SUCCEEDED
    assert _most_at_once(tmp_path, 5) <= 2
    wait_until(lambda: dict(licensed.list_workers()[0].free.resources) == {"license": 2, "slot": 0.5})


def test_a_gang_that_needs_more_than_there_is_says_so(licensed: LocalCluster, tmp_path: Path) -> None:
    job_id = licensed.launch(command("sleep", "600", resources=ONE, gang=True, replicas=3))
    wait_until(lambda: "all workers together, empty, fit 2" in licensed.explain(job_id))
    licensed.terminate(job_id)
    pair = licensed.launch(command(*_work(tmp_path), resources=ONE, gang=True, replicas=2))
    assert licensed.wait(pair, timeout=60).status is JobStatus.SUCCEEDED


def test_an_actor_has_its_own(licensed: LocalCluster) -> None:
    @actor(resources=ONE)
    class Licensed:
        def hello(self) -> str:
            return "hello"

    with deploy(licensed, Licensed, name="licensed", replicas=2) as pool:
        assert pool.broadcast().hello().results() == ["hello", "hello"]
        waiting = licensed.launch(command("true", resources=ONE))
        wait_until(lambda: "2 of 2 license are busy" in licensed.explain(waiting))
        # Shown as its worker said last, at its newest beat.
        wait_until(lambda: not dict(licensed.list_workers()[0].free.resources).get("license"))
        assert "license 0/2, slot 0.5/0.5" in _cli(licensed, "workers").stdout
    assert licensed.wait(waiting, timeout=60).status is JobStatus.SUCCEEDED


def test_the_command_line_asks_and_shows(licensed: LocalCluster) -> None:
    words = ("submit", "--resource", "license=1", "--resource", "slot=0.5", "--wait", "--", "true")
    submitted = _cli(licensed, *words)
    assert submitted.returncode == 0, submitted.stderr
    status = _cli(licensed, "status", submitted.stdout.split()[0])
    assert "1 license, 0.5 slot" in status.stdout
    (worker,) = json.loads(_cli(licensed, "--output", "json", "workers").stdout)
    assert worker["info"]["total"]["resources"] == {"license": 2.0, "slot": 0.5}

    too_much = _cli(licensed, "submit", "--resource", "license=3", "--", "true")
    told = _cli(licensed, "explain", too_much.stdout.strip()).stdout
    assert "no worker has license: 3 (the most any has is 2)" in told
    licensed.terminate(JobId(too_much.stdout.strip()))


@pytest.mark.parametrize(
    "words",
    [
        ("submit", "--resource", "license=0", "--", "true"),
        ("up", "--resource", "license"),
        ("worker", "start", "--resource", "license=-1"),
    ],
)
def test_what_cannot_be_counted_is_refused_at_the_command_line(words: tuple[str, ...]) -> None:
    refused = subprocess.run([*_COMMAND, *words], capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert re.search(r"--resources?(='.*')?: invalid", refused.stderr)
    assert "license" in refused.stderr
