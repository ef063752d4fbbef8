"""Programs of the release before work with those of this tree, and a cluster is updated while its jobs run."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluster import actor, deploy
from fluster_bus.messages import JobId, JobStatus, ResourceConfig
from fluster_bus.messages.parts.resources import WORKER_LABEL
from tests.compat.mixed_cluster import MixedCluster
from tests.compat.releases import NEW, Release
from tests.system.job_requests import command, texts
from tests.system.processes import Family
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def mixed(tmp_path: Path, family: Family) -> Iterator[MixedCluster]:
    with MixedCluster(tmp_path, family) as mixed:
        yield mixed


@pytest.mark.parametrize("older", ["client", "worker", "controller", "server"])
def test_each_kind_of_work_is_done_where_one_part_is_old(
    mixed: MixedCluster,
    old: Release,
    older: str,
) -> None:
    parts = ("client", "worker", "controller", "server")
    client, worker, controller, server = (old if each == older else NEW for each in parts)
    mixed.start_server(server)
    mixed.start_controller(controller, "c1")
    mixed.start_worker(worker, "w1")
    said = mixed.run_client(client)
    assert Path(said.pop("release")).is_relative_to(client.root / "fluster")
    assert Path(said.pop("task_release")).is_relative_to(worker.root / "fluster")
    assert said == {
        "status": "SUCCEEDED",
        "large": "SUCCEEDED",
        "output": ["said"],
        "counted": [101, 102, 112],
        "squares": sum(number * number for number in range(200)),
        "one": 144,
        "failed": ["ZeroDivisionError"],
        "quotients": sum(840 // number for number in range(1, 1_000)),
        "bundled": sum(number * number for number in range(200)),
    }


def test_controllers_and_workers_are_replaced_one_by_one_while_jobs_run(
    mixed: MixedCluster,
    old: Release,
    tmp_path: Path,
) -> None:
    @actor
    class Tally:
        def __init__(self) -> None:
            self.value = 0

        def add(self) -> int:
            self.value += 1
            return self.value

    begun, may_end = tmp_path / "begun", tmp_path / "may_end"
    begun.touch()
    says = f"echo $FLUSTER_JOB_ID $FLUSTER_ATTEMPT >> {begun}"
    on_first = ResourceConfig(cpu=0.5, memory=128 << 20, labels={WORKER_LABEL: "w1"})
    mixed.start_server(old)
    for name in ("c1", "c2"):
        mixed.start_controller(old, name)
    for name in ("w1", "w2"):
        mixed.start_worker(old, name)
    with mixed.connect() as cluster:
        waits = f"{says}; until [ -e {may_end} ]; do sleep 0.05; done"
        jobs: list[JobId] = [cluster.launch(command("sh", "-c", waits, name="long", resources=on_first))]
        tally = deploy(cluster, Tally, resources=on_first)
        assert tally.call().add() == 1

        def launch_more() -> None:
            small = ResourceConfig.with_cpu(1, memory="128MiB")
            more = [command("sh", "-c", f"{says}; sleep 0.2", name="short", resources=small) for _ in range(10)]
            jobs.extend(cluster.launch_many(more))

        launch_more()
        wait_until(lambda: any(line.startswith("long") for line in begun.read_text().splitlines()))
        for name in ("c1", "c2"):
            mixed.end(name)
            launch_more()
            mixed.start_controller(NEW, name)
        mixed.end("w1", signal.SIGKILL)  # what it ran goes on, and its successor takes it up
        mixed.start_worker(NEW, "w1")
        launch_more()
        assert tally.call().add() == 2
        mixed.end("w2")  # it waits for what it runs
        mixed.start_worker(NEW, "w3")
        launch_more()
        may_end.touch()
        ended = cluster.wait(jobs, timeout=120)
        assert tally.call().add() == 3
    assert Counter(info.status for info in ended) == {JobStatus.SUCCEEDED: len(jobs)}
    assert {info.tasks[0].attempt for info in ended} == {1}
    assert sorted(begun.read_text().split("\n")[:-1]) == sorted(f"{job} 1" for job in jobs)


def test_a_backup_of_the_old_release_is_restored_by_the_new(
    mixed: MixedCluster, old: Release, tmp_path: Path, family: Family
) -> None:
    mixed.start_server(old)
    mixed.start_controller(old, "c1")
    mixed.start_worker(old, "w1")
    folder = tmp_path / "backup"
    with mixed.connect() as cluster:
        ended = cluster.launch(command("sh", "-c", "echo said", name="ended"))
        cluster.wait(ended, timeout=60)
        mixed.end("w1")
        waits = cluster.launch(command("sh", "-c", "echo ran", name="waits"))
        mixed.run_command(old, "backup", "create", str(folder))
    (tmp_path / "new").mkdir()
    with MixedCluster(tmp_path / "new", family) as restored:
        restored.start_server(NEW)
        restored.run_command(NEW, "backup", "restore", str(folder))
        restored.start_controller(NEW, "c2")
        restored.start_worker(NEW, "w2")
        with restored.connect() as cluster:
            info = cluster.wait(waits, timeout=60)
            assert (info.status, info.tasks[0].attempt) == (JobStatus.SUCCEEDED, 1)
            assert [texts(cluster, job) for job in (ended, waits)] == [["said"], ["ran"]]
