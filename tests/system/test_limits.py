"""Limits as the kernel enforces them. Where it does not let us, these tests are skipped, and say so."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fluster.actors import actor, deploy
from fluster.cluster import Cluster, LocalCluster
from fluster.errors import ActorDiedError, ClusterStartError
from fluster_bus.messages import Capacity, JobStatus, ResourceConfig, WorkerId
from fluster_services.worker.contract.attempt_directory import KEEPER_FILE, read_json_lines
from fluster_services.worker.linux.limits import group_name
from tests import optional
from tests.system.daemons import PATIENT, Daemons
from tests.system.job_requests import call, command, texts, wait_ready
from tests.system.processes import Family, wait_ended
from tests.waiting import wait_until

PATIENCE_S = 60
MIB = 1 << 20

# In a process of its own: where there is only version 2, it moves into a group below the one it was started in.
_MISSING = (
    "from fluster_services.worker.linux.cgroups import find_enforcer; print(*find_enforcer('auto').missing.items())"
)


@pytest.fixture(scope="module")
def enforced() -> None:
    found = subprocess.run([sys.executable, "-c", _MISSING], capture_output=True, text=True, check=True).stdout.strip()
    if found:
        optional.skip("cgroups", f"LIMITS ARE NOT TESTED: this system does not let us enforce them: {found}")


@pytest.fixture
def limited(enforced: None, family: Family) -> Iterator[LocalCluster]:
    with LocalCluster(enforce_limits=True) as cluster:
        yield cluster
    family.wait_gone()


@pytest.mark.usefixtures("enforced")
def test_a_task_has_no_more_processes_than_its_worker_lets_it(family: Family) -> None:
    script = "for n in $(seq 40); do sleep 60 & done; echo all"
    with LocalCluster(enforce_limits=True, limits={"max_processes": 20}) as cluster:
        job_id = cluster.launch(command("sh", "-c", script))
        assert cluster.wait(job_id, timeout=60).status is JobStatus.FAILED
        assert "all" not in texts(cluster, job_id)
        assert any("fork" in text for text in texts(cluster, job_id, "stderr"))
    family.wait_gone()


def groups(name: str) -> list[Path]:
    """The groups of that name, in all trees."""
    return list(Path("/sys/fs/cgroup").rglob(name))


def hog(size: int) -> None:
    kept = bytearray(size)
    for place in range(0, size, 4096):
        kept[place] = 1
    print("all of it")


def test_what_goes_over_its_memory_is_killed_and_told_so(limited: LocalCluster) -> None:
    small = ResourceConfig.with_cpu(1, memory="64MiB")
    killed, fine = limited.launch_many(
        [call(hog, 200 * MIB, resources=small), call(hog, 200 * MIB, resources=ResourceConfig.with_cpu(memory="1GiB"))]
    )
    info = limited.wait(killed, timeout=PATIENCE_S)
    assert (info.status, info.error_message) == (JobStatus.FAILED, "killed: over its memory limit of 64 MiB")
    assert limited.wait(fine, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED


class Hog:
    def take(self, count: int) -> int:
        return len(bytearray(count))


def test_a_call_that_an_actors_memory_limit_ended_names_it(limited: LocalCluster) -> None:
    small = actor(resources=ResourceConfig.with_cpu(1, memory="64MiB"))(Hog)
    pool = deploy(limited, small)
    with pytest.raises(ActorDiedError, match=r"killed: over its memory limit of 64 MiB"):
        pool.call().take(200 * MIB)
    pool.shutdown()


def test_a_child_that_is_killed_for_memory_is_told_apart(limited: LocalCluster) -> None:
    program = f"{sys.executable} -c 'x = bytearray({200 * MIB})'; exit 5"
    small = ResourceConfig.with_cpu(1, memory="64MiB")
    info = limited.wait(limited.launch(command("sh", "-c", program, resources=small)), timeout=PATIENCE_S)
    assert info.status is JobStatus.FAILED
    expected = ("killed: over its memory limit", "exit code 5, after a process of it was killed: over its memory limit")
    assert info.error_message.startswith(expected)  # version 2 kills the whole group


def test_a_task_gets_no_more_than_its_cpus(limited: LocalCluster) -> None:
    def spin() -> None:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            pass
        used = time.process_time()
        if used > 1.2:  # a quarter of 2 s is 0.5 s
            raise AssertionError(f"{used:.2f} s of CPU time in 2 s")

    quarter = ResourceConfig.with_cpu(0.25)
    info = limited.wait(limited.launch(call(spin, resources=quarter)), timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED, info.error_message


def test_what_is_not_asked_for_is_not_enforced(cluster: Cluster) -> None:
    small = ResourceConfig.with_cpu(0.1, memory="64MiB")
    info = cluster.wait(cluster.launch(call(hog, 200 * MIB, resources=small)), timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED, info.error_message


def test_with_worker_and_keeper_dead_a_process_that_hides_is_found_by_its_group(
    enforced: None, tmp_path: Path, family: Family
) -> None:
    """It has left the task's session, and has nothing of its environment."""
    pid_file = tmp_path / "pid"
    hidden = f"env -i {shutil.which('setsid')} sh -c 'echo $$ > {pid_file}; echo ready; exec sleep 1000'"
    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        daemons.start_worker(enforce_limits="auto")
        with daemons.connect() as cluster:
            job_id = cluster.launch(command("sh", "-c", f"{hidden} & wait", max_retries_preemption=0))
            wait_ready(cluster, job_id)
            hiding = psutil.Process(int(pid_file.read_text()))
            (keeper,) = daemons.family.named("fluster-keeper")
            daemons.kill("w1")
            keeper.kill()
            wait_ended(hiding)
            daemons.start_worker(enforce_limits="auto")
            assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.WORKER_FAILED


@pytest.mark.parametrize("victims", ["worker", "worker and keeper"])
def test_no_group_is_left_when_the_worker_was_killed(
    enforced: None, tmp_path: Path, family: Family, victims: str
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        daemons.start_worker(enforce_limits="auto")
        assert "limits of tasks are enforced: " in daemons.log("w1")
        with daemons.connect() as cluster:
            job_id = cluster.launch(command("sh", "-c", f"echo ready $$; cat {gate}", max_retries_preemption=0))
            wait_ready(cluster, job_id)
            (attempt,) = [path for path in (tmp_path / "w1/attempts").iterdir() if path.is_dir()]
            name = group_name(attempt)
            assert groups(name)
            keeper_pid = read_json_lines(attempt / KEEPER_FILE)["started"]["keeper_pid"]
            daemons.kill("w1")
            if victims == "worker":
                gate.write_text("go\n")
            else:
                os.kill(keeper_pid, signal.SIGKILL)
            daemons.start_worker(enforce_limits="auto")
            cluster.wait(job_id, timeout=PATIENCE_S)
            wait_until(lambda: groups(name) == [])


def test_a_group_that_is_in_use_for_a_moment_is_not_left(enforced: None, tmp_path: Path, family: Family) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        daemons.start_worker(enforce_limits="auto")
        with daemons.connect() as cluster:
            job_id = cluster.launch(command("sh", "-c", f"echo ready $$; cat {gate}"))
            wait_ready(cluster, job_id)
            (attempt,) = [path for path in (tmp_path / "w1/attempts").iterdir() if path.is_dir()]
            name = group_name(attempt)
            users = [group / "user" for group in groups(name)]
            for user in users:
                user.mkdir()
            gate.write_text("go\n")
            assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
            wait_until(lambda: not attempt.exists(), PATIENCE_S)
            for user in users:
                user.rmdir()
            wait_until(lambda: groups(name) == [], PATIENCE_S)


def test_asked_for_in_vain_it_does_not_start(monkeypatch: pytest.MonkeyPatch, family: Family, tmp_path: Path) -> None:
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import fluster_services.worker.linux.cgroups as c\nc._controllers = lambda: ({}, {'cpu': 'for a test'})\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with pytest.raises(ClusterStartError, match=r"no cpu: for a test.*do not ask"):
        LocalCluster(enforce_limits=True)
    family.wait_gone()


DISK = Capacity(cpu=4, memory=4 << 30, disk=1 << 30)


@pytest.fixture
def disks(tmp_path: Path, family: Family) -> Iterator[Daemons]:
    """A cluster with a worker that enforces limits."""
    try:
        with Daemons(tmp_path, family, timing=PATIENT) as daemons:
            daemons.start_controller()
            daemons.start_worker("w1", enforce_limits="auto", total=DISK, working_dir=None)
            yield daemons
        assert mounted_in(tmp_path) == []
    finally:
        for place in mounted_in(tmp_path):
            subprocess.run(["umount", "--lazy", place], check=False)


def mounted_in(folder: Path) -> list[str]:
    return [each.mountpoint for each in psutil.disk_partitions(all=True) if each.mountpoint.startswith(f"{folder}/")]


def of_disk(size: str) -> ResourceConfig:
    return ResourceConfig.with_cpu(1, disk=size)


def test_a_task_with_more_in_its_folder_than_it_asked_for_is_stopped_also_while_its_worker_is_away(
    disks: Daemons,
) -> None:
    write = 'cd "$FLUSTER_ATTEMPT_DIRECTORY"; head -c 20M /dev/zero > data; echo ready; exec sleep 600'
    with disks.connect() as cluster:
        over, fine = cluster.launch_many(
            [command("sh", "-c", write, resources=of_disk(size)) for size in ("16MiB", "32MiB")]
        )
        for job in (over, fine):
            wait_ready(cluster, job)
        disks.kill("w1")
        attempts = disks.folder / "w1" / "attempts"
        wait_until(lambda: any("exited" in read_json_lines(each) for each in attempts.glob(f"*/{KEEPER_FILE}")), 20)
        disks.start_worker("w1", enforce_limits="auto", total=DISK, working_dir=None)
        info = cluster.wait(over, timeout=PATIENCE_S)
        assert (info.status, info.tasks[0].failures) == (JobStatus.FAILED, 1)
        assert info.error_message.startswith("stopped: over its disk limit of 16 MiB: its own folder has 20")
        assert cluster.poll(fine).status is JobStatus.RUNNING


def write_data(size: int) -> list[str]:
    with Path("data").open("wb") as file:
        file.write(bytes(size))
    return [each.name for each in Path().iterdir()]


def stay() -> None:
    print("ready", flush=True)
    time.sleep(600)


def test_a_task_cannot_write_more_than_the_disk_that_it_asked_for(disks: Daemons) -> None:
    with disks.connect() as cluster:
        limits = cluster.worker_health(WorkerId("w1")).limits
        if "disk is enforced" not in limits:
            optional.skip("mounts", f"DISK LIMITS ARE NOT TESTED: {limits}")
        assert limits in disks.log("w1")
        over, fine, lost = cluster.launch_many(
            [
                call(write_data, 40 * MIB, resources=of_disk("16MiB")),
                call(write_data, 40 * MIB, resources=of_disk("40MiB")),
                call(stay, resources=of_disk("16MiB"), max_retries_preemption=0),
            ]
        )
        info = cluster.wait(over, timeout=PATIENCE_S)
        told = "OSError: [Errno 28] No space left on device; its disk of 16 MiB was full"
        assert (info.status, info.error_message.partition("; its last words")[0]) == (JobStatus.FAILED, told)
        assert cluster.result(fine, timeout=PATIENCE_S) == ["data"]
        wait_ready(cluster, lost)
        wait_until(lambda: len(mounted_in(disks.folder)) == 1, PATIENCE_S, lambda: mounted_in(disks.folder))
        disks.kill("w1")
        disks.family.kill_named("fluster-keeper")
        disks.start_worker("w1", enforce_limits="auto", total=DISK, working_dir=None)
        assert cluster.wait(lost, timeout=PATIENCE_S).status is JobStatus.WORKER_FAILED
        wait_until(lambda: mounted_in(disks.folder) == [], PATIENCE_S, lambda: mounted_in(disks.folder))
