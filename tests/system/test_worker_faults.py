"""A worker that cannot run tasks by a fault of its own: it takes itself out, and no task pays for it."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluster.cluster import Cluster
from fluster.errors import JobResultError
from fluster_bus.messages import EnvironmentConfig, JobStatus, WorkerId, WorkerStatus
from fluster_services.config import DiskLimits, WorkerLimits
from tests.system.crowds import crowd
from tests.system.daemons import Daemons
from tests.system.job_requests import call, command
from tests.system.processes import Family
from tests.system.small_disks import fill, mounted
from tests.system.wheels import make_wheel
from tests.waiting import wait_until

PATIENCE_S = 60
W1 = WorkerId("w1")


@pytest.fixture
def daemons(tmp_path: Path, family: Family) -> Iterator[Daemons]:
    with mounted(tmp_path / "w1", megabytes=128), Daemons(tmp_path, family) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1", working_dir=None)
        yield daemons


def worker(cluster: Cluster, name: str) -> WorkerStatus:
    return next(each for each in cluster.list_workers() if each.info.worker_id == name)


def test_a_worker_with_a_full_disk_eats_no_tasks_and_returns_when_there_is_room(daemons: Daemons) -> None:
    with daemons.connect() as cluster:
        fill(daemons.folder / "w1" / "ballast")
        alone = cluster.launch(command("true"))
        wait_until(lambda: "worker w1 takes no work: its disk" in cluster.explain(alone))
        assert worker(cluster, "w1").info.trouble
        assert "no room" in cluster.worker_health(W1).problems[0]
        daemons.start_worker("w2")
        jobs = [alone, *cluster.launch_many([command("true")] * 40)]
        infos = [cluster.wait(job, timeout=PATIENCE_S) for job in jobs]
        assert {info.status for info in infos} == {JobStatus.SUCCEEDED}
        assert {info.worker_id for info in infos} == {"w2"}
        assert {(task.failures, task.preemptions) for info in infos for task in info.tasks} == {(0, 0)}
        daemons.kill("w2")
        (daemons.folder / "w1" / "ballast").unlink()
        info = cluster.wait(cluster.launch(command("true")), timeout=PATIENCE_S)
        assert (info.status, info.worker_id) == (JobStatus.SUCCEEDED, "w1")
        assert cluster.worker_health(W1).takes_work


def test_the_task_that_fills_the_disk_pays_for_it_and_its_neighbour_does_not(daemons: Daemons) -> None:
    with daemons.connect() as cluster:
        own = 'cd "$FLUSTER_ATTEMPT_DIRECTORY"'
        writes = f"{own}; until ! dd if=/dev/zero of=mine bs=4k count=1 2>err; do sleep 0.05; done; cat err >&2; exit 1"
        neighbour = cluster.launch(command("sh", "-c", writes))
        fills = cluster.launch(
            command(
                "sh", "-c", f"{own}; dd if=/dev/zero of=fill bs=1M count=200; exec sleep 600", max_retries_preemption=1
            )
        )
        info = cluster.wait(fills, timeout=PATIENCE_S)
        assert info.status is JobStatus.WORKER_FAILED
        assert "it filled the disk of worker w1: its own folders grew by" in info.error_message
        (task,) = info.tasks
        assert (task.attempt, task.failures, task.preemptions) == (2, 0, 2)
        (task,) = cluster.poll(neighbour).tasks
        assert (task.failures, task.preemptions, task.status.finished()) == (0, 0, False)
        cluster.terminate(neighbour)
        cluster.wait(neighbour, timeout=PATIENCE_S)


def test_finished_work_has_succeeded_also_where_there_is_no_room_to_say_so(daemons: Daemons) -> None:
    def work(ballast: Path) -> bytes:
        fill(ballast)
        return bytes(1 << 20)

    with daemons.connect() as cluster:
        job = cluster.launch(call(work, daemons.folder / "w1" / "ballast", must_return=True))
        info = cluster.wait(job, timeout=PATIENCE_S)
        assert (info.status, info.error_message) == (JobStatus.SUCCEEDED, "")
        with pytest.raises(JobResultError, match=r"could not be written down: .* No space left on device"):
            cluster.result(job)


def test_a_worker_that_starts_on_a_full_disk_says_so_and_works_once_there_is_room(
    tmp_path: Path, family: Family
) -> None:
    with mounted(tmp_path / "w1", megabytes=64) as disk, Daemons(tmp_path, family) as daemons:
        fill(disk / "ballast")
        daemons.start_controller()
        daemons.start_worker("w1")
        with daemons.connect() as cluster:
            job = cluster.launch(command("true"))
            wait_until(lambda: "worker w1 takes no work: its disk has no room" in cluster.explain(job))
            (disk / "ballast").unlink()
            assert cluster.wait(job, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED


def test_a_worker_whose_state_cannot_be_anywhere_says_so_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "file" / "state"
    folder.parent.write_text("no folder")
    environment = {
        **os.environ,
        "FLUSTER_CLUSTER_ADDRESS": "nats://worker:x@127.0.0.1:1",
        "FLUSTER_JOB_DEFAULT_PASSWORD": "x",
        "FLUSTER_STATE_DIR": str(folder),
    }
    program = [sys.executable, "-m", "fluster_services.worker"]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"the state folder {folder} cannot be used: ")
    assert "are free there). Make room, or set FLUSTER_STATE_DIR" in line


def test_a_worker_whose_package_cache_cannot_be_used_charges_nobody(
    tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "uv"
    cache.write_text("no folder")
    monkeypatch.setenv("UV_CACHE_DIR", str(cache))
    environment = EnvironmentConfig(requirements="# nothing, but an environment of its own")
    with Daemons(tmp_path, family) as daemons, daemons.connect() as cluster:
        daemons.start_controller()
        daemons.start_worker("w1")
        job = cluster.launch(call(print, "works", environment=environment))
        wait_until(lambda: f"worker w1 takes no work: its package cache {cache} cannot" in cluster.explain(job))
        cache.unlink()
        (task,) = cluster.wait(job, timeout=PATIENCE_S).tasks
        assert (task.status, task.failures, task.preemptions) == (JobStatus.SUCCEEDED, 0, 0)


def test_a_worker_whose_environments_have_no_room_charges_nobody(tmp_path: Path, family: Family) -> None:
    environment = EnvironmentConfig(requirements="# nothing, but an environment of its own")
    (tmp_path / "w1").mkdir()
    with mounted(tmp_path / "w1" / "environments", megabytes=64) as disk, Daemons(tmp_path, family) as daemons:
        fill(disk / "ballast")
        daemons.start_controller()
        daemons.start_worker("w1")
        with daemons.connect() as cluster:
            assert cluster.wait(cluster.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
            job = cluster.launch(call(print, "works", environment=environment))
            wait_until(lambda: f"worker w1 takes no work: its cache {disk} cannot be used" in cluster.explain(job))
            (disk / "ballast").unlink()
            (task,) = cluster.wait(job, timeout=PATIENCE_S).tasks
            assert (task.status, task.failures, task.preemptions) == (JobStatus.SUCCEEDED, 0, 0)


def _large_wheel(folder: Path, megabytes: int) -> EnvironmentConfig:
    wheel = make_wheel(folder, "large")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("large.bin", os.urandom(megabytes << 20))
    return EnvironmentConfig(workspace=folder, pip_packages=(f"./{wheel.name}",))


@pytest.mark.parametrize("left_mib", [5, 20], ids=["nearly-full", "roomy"])
def test_packages_without_room_are_the_faults_of_a_disk_that_is_nearly_full_and_of_no_other(
    tmp_path: Path, family: Family, monkeypatch: pytest.MonkeyPatch, left_mib: int
) -> None:
    """There is some room on it, so that nothing is wrong with it but that these do not fit."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    environment = _large_wheel(tmp_path / "workspace", left_mib * 3 // 4)  # it is copied, and installed from there
    (tmp_path / "w1").mkdir()
    with mounted(tmp_path / "w1" / "environments", megabytes=64) as disk, Daemons(tmp_path, family) as daemons:
        fill(disk / "ballast", left_bytes=left_mib << 20)
        daemons.start_controller()
        daemons.start_worker("w1", limits=WorkerLimits(disk=DiskLimits(least_free_bytes=1 << 20)))
        with daemons.connect() as cluster:
            job = cluster.launch(call(print, "works", environment=environment))
            if left_mib > 6:
                wait_until(lambda: cluster.poll(job).tasks[0].preemptions > 0)
                assert worker(cluster, "w1").info.trouble == ""
                cluster.terminate(job)
                return
            wait_until(lambda: f"w1 takes no work: only 5 MiB of 64 MiB are left at {disk}" in cluster.explain(job))
            (disk / "ballast").unlink()
            (task,) = cluster.wait(job, timeout=PATIENCE_S).tasks
            assert (task.status, task.failures, task.preemptions) == (JobStatus.SUCCEEDED, 0, 0)
            assert task.attempt > 1


def test_a_worker_that_cannot_fork_charges_nobody_and_returns_when_it_can(tmp_path: Path, family: Family) -> None:
    with crowd() as processes, Daemons(tmp_path, family) as daemons, daemons.connect() as cluster:
        daemons.start_controller()
        daemons.start_worker("w1")
        cluster.wait(cluster.launch(command("true")), timeout=PATIENCE_S)  # leaves a keeper, which is the first to fork
        processes.take(daemons.running["w1"].pid)
        processes.close()
        job = cluster.launch(command("true"))
        wait_until(lambda: "worker w1 takes no work" in cluster.explain(job))
        assert "Resource temporarily unavailable" in (worker(cluster, "w1").info.trouble or "")
        assert "Resource temporarily unavailable" in cluster.worker_health(W1).problems[0]
        processes.open()
        info = cluster.wait(job, timeout=PATIENCE_S)
        (task,) = info.tasks
        assert (info.status, task.failures, task.preemptions) == (JobStatus.SUCCEEDED, 0, 0)
        assert task.attempt > 1
        assert cluster.worker_health(W1).takes_work
