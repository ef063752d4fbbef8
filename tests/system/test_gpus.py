"""GPUs as tasks find them, and those that no two tasks ever have: the GPUs are those of a stand-in for NVIDIA's library."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fluster.cluster import Cluster
from fluster_bus.messages import Capacity, JobId, JobInfo, JobStatus, ResourceConfig, WorkerId
from fluster_bus.messages.parts.resources import GIB
from tests.gpus.stand_in import FakeGpu, FakeInstance, StandIn, build
from tests.system.daemons import PATIENT, QUICK, Daemons
from tests.system.job_requests import command, texts, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 90
ONE, TWO = ResourceConfig.with_gpu(count=1), ResourceConfig.with_gpu(count=2)
_SHOW = ("sh", "-c", 'echo "<$CUDA_VISIBLE_DEVICES> $CUDA_DEVICE_ORDER <$FLUSTER_GPU_UUIDS>"')
FIRST, SECOND = FakeGpu(0), FakeGpu(1)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stand_in(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(library, tmp_path / "gpus")
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made.show(FIRST, SECOND)
    return made


@dataclass
class Site:
    """A cluster whose workers have GPUs of this machine."""

    daemons: Daemons
    locks: Path

    def start_worker(self, name: str = "w1", *gpus: FakeGpu, **fields: Any) -> None:
        ids = fields.pop("ids", tuple(gpu.uuid for gpu in gpus))
        total = Capacity(cpu=16, memory=64 * GIB, device="gpu", variant="h100", devices=len(ids))
        self.daemons.start_worker(name, total=total, device_ids=ids, gpu_locks=str(self.locks), **fields)

    def connect(self) -> Cluster:
        return self.daemons.connect()


@pytest.fixture
def site(stand_in: StandIn, tmp_path: Path, family: Family) -> Iterator[Site]:
    with Daemons(tmp_path / "a", family, timing=PATIENT) as daemons:
        daemons.start_controller()
        yield Site(daemons, tmp_path / "locks")


@pytest.fixture
def other_site(site: Site, tmp_path: Path) -> Iterator[Site]:
    """Another cluster on the same machine; its processes are waited for apart from those of the first."""
    with Daemons(tmp_path / "b", Family(), timing=PATIENT) as daemons:
        daemons.start_controller()
        yield Site(daemons, site.locks)


def holding(resources: ResourceConfig = ONE, **fields: Any) -> Any:
    return command("sh", "-c", "echo $FLUSTER_GPU_UUIDS; exec sleep 600", resources=resources, **fields)


def shown(cluster: Cluster, resources: ResourceConfig, **fields: Any) -> str:
    info = cluster.wait(cluster.launch(command(*_SHOW, resources=resources, **fields)), timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED, info.error_message
    (line,) = texts(cluster, info.job_id)
    return line


def costs(info: JobInfo) -> tuple[int, int]:
    """What its only task was charged: failures, and ends that were not its own."""
    return info.tasks[0].failures, info.tasks[0].preemptions


def explained(cluster: Cluster, job_id: JobId, text: str) -> None:
    wait_until(lambda: text in cluster.explain(job_id), PATIENCE_S, lambda: cluster.explain(job_id))


# What a task finds


def test_a_task_finds_its_gpus_by_index_and_one_without_finds_none(site: Site) -> None:
    site.start_worker("w1", FIRST, SECOND)
    with site.connect() as cluster:
        assert shown(cluster, TWO) == f"<0,1> PCI_BUS_ID <{FIRST.uuid},{SECOND.uuid}>"
        assert shown(cluster, ResourceConfig()) == "<> PCI_BUS_ID <>"
        # The way out for who wants it otherwise: the job says itself what it sees.
        assert shown(cluster, ResourceConfig(), env={"CUDA_VISIBLE_DEVICES": "1"}) == "<1>  <>"
        assert shown(cluster, TWO, env={"CUDA_VISIBLE_DEVICES": "7"}).startswith("<0,1>")


def test_the_indices_are_those_at_the_start_of_the_task(site: Site, stand_in: StandIn) -> None:
    site.start_worker("w1", SECOND)
    stand_in.show(SECOND, FIRST)  # the driver counts them otherwise by now
    with site.connect() as cluster:
        assert shown(cluster, ONE) == f"<0> PCI_BUS_ID <{SECOND.uuid}>"


def test_a_task_finds_uuids_where_its_worker_is_told_so(site: Site) -> None:
    site.start_worker("w1", FIRST, SECOND, gpu_mask="uuid")
    with site.connect() as cluster:
        assert shown(cluster, TWO) == f"<{FIRST.uuid},{SECOND.uuid}> PCI_BUS_ID <{FIRST.uuid},{SECOND.uuid}>"


def test_instances_are_found_by_uuid(site: Site, stand_in: StandIn) -> None:
    stand_in.show(FakeGpu(0, mig=1, instances=[FakeInstance("MIG-1"), FakeInstance("MIG-2")]))
    site.start_worker("w1", ids=("MIG-1", "MIG-2"))
    with site.connect() as cluster:
        assert shown(cluster, TWO) == "<MIG-1,MIG-2> PCI_BUS_ID <MIG-1,MIG-2>"


def test_gpus_that_were_given_by_index_are_locked_too(site: Site) -> None:
    site.start_worker("w1", ids=("1",))
    with site.connect() as cluster:
        assert shown(cluster, ONE) == f"<1> PCI_BUS_ID <{SECOND.uuid}>"
    assert [path.name for path in site.locks.iterdir()] == [f"fluster-gpu-{SECOND.uuid}"]


def test_the_record_of_an_attempt_says_which_gpus_it_had(site: Site) -> None:
    site.start_worker("w1", FIRST, SECOND)
    with site.connect() as cluster:
        info = cluster.wait(cluster.launch(command("true", resources=TWO)), timeout=PATIENCE_S)
        assert info.tasks[0].gpus == (FIRST.uuid, SECOND.uuid)


# Never twice


def exclusive(folder: Path) -> tuple[str, ...]:
    """A command that fails where another has the same GPU at that moment."""
    script = (
        f"set -C; cd {folder}; for gpu in $(echo $FLUSTER_GPU_UUIDS | tr , ' '); do : > $gpu || exit 9; done; "
        "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; "
        f"for gpu in $(echo $FLUSTER_GPU_UUIDS | tr , ' '); do rm $gpu; done"
    )
    return ("sh", "-c", script)


def test_two_workers_of_one_machine_never_give_a_gpu_twice(site: Site, tmp_path: Path) -> None:
    site.start_worker("w1", FIRST, SECOND)
    site.start_worker("w2", SECOND, FIRST)
    folder = tmp_path / "used"
    folder.mkdir()
    with site.connect() as cluster:
        requests = [command(*exclusive(folder), resources=TWO if number % 4 == 0 else ONE) for number in range(24)]
        infos = cluster.wait(cluster.launch_many(requests), timeout=2 * PATIENCE_S)
    assert [(info.status, info.error_message) for info in infos] == [(JobStatus.SUCCEEDED, "")] * 24
    assert [costs(info) for info in infos] == [(0, 0)] * 24


def test_another_cluster_cannot_have_a_gpu_until_it_is_free(site: Site, other_site: Site) -> None:
    site.start_worker("w1", FIRST)
    other_site.start_worker("w1", FIRST)
    with site.connect() as cluster, other_site.connect() as other:
        first = cluster.launch(holding())
        wait_ready(cluster, first)
        second = other.launch(command(*_SHOW, resources=ONE))
        explained(other, second, f"attempt default.{first}.0.1 of user {os.getuid()} holds it")
        health = other.worker_health(WorkerId("w1"))
        assert any(f"GPU 0 ({FIRST.uuid}) is given to no task" in each for each in health.problems), health.problems
        (node,) = other.list_nodes()
        assert "holds it" in node.info.gpus[0].withheld
        assert other.poll(second).status is JobStatus.PENDING
        cluster.terminate(first)
        info = other.wait(second, timeout=PATIENCE_S)
        assert (info.status, costs(info)) == (JobStatus.SUCCEEDED, (0, 0))


def test_a_process_that_the_driver_shows_after_its_keeper_died_keeps_the_gpu(site: Site, stand_in: StandIn) -> None:
    """Neither its session nor its environment nor the lock tell whose it is: the driver does, and it began after the task."""
    site.start_worker("w1", FIRST)
    with site.connect() as cluster:
        first = cluster.launch(holding(max_retries_preemption=0))
        wait_ready(cluster, first)
        escaped = subprocess.Popen(["sleep", "600"], start_new_session=True)
        try:
            stand_in.show(replace(FIRST, processes=[("c", escaped.pid, GIB)]))
            _kill(site.daemons, "keeper")
            cluster.wait(first, timeout=PATIENCE_S)
            second = cluster.launch(command(*_SHOW, resources=ONE))
            explained(cluster, second, f"process {escaped.pid} of attempt default.{first}.0.1 uses the GPU")
            assert cluster.poll(second).status is JobStatus.PENDING
        finally:
            escaped.kill()
            escaped.wait()
        stand_in.show(FIRST)
        info = cluster.wait(second, timeout=PATIENCE_S)
        assert (info.status, costs(info)) == (JobStatus.SUCCEEDED, (0, 0))


_ALONE = """
import fcntl, os, sys, time
file = open(os.path.join(sys.argv[1], os.environ["FLUSTER_GPU_UUIDS"]), "w")
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where another task has the same GPU
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
"""


def test_a_lease_lasts_whoever_dies(stand_in: StandIn, tmp_path: Path, family: Family) -> None:
    """For ten times as long as a controller waits for a worker, parts die in turn, and at no time two have the GPU."""
    folder = tmp_path / "used"
    folder.mkdir()
    with Daemons(tmp_path / "a", family, timing=QUICK) as daemons:
        daemons.start_controller()
        site = Site(daemons, tmp_path / "locks")
        site.start_worker("w1", FIRST)
        with site.connect() as cluster:
            began_at = time.monotonic()
            alone = [sys.executable, "-c", _ALONE, str(folder)]
            holder = cluster.launch(command(*alone, "600", resources=ONE))
            wait_ready(cluster, holder)
            others = cluster.launch_many([command(*alone, "0", resources=ONE) for _ in range(3)])
            while time.monotonic() - began_at < 10 * QUICK.worker_timeout_s:
                for name in ("w1", "controller", "keeper"):
                    if name == "keeper" and time.monotonic() - began_at < 5 * QUICK.worker_timeout_s:
                        continue  # the task ends with its keeper
                    _kill(daemons, name)
                    if name == "controller":
                        daemons.start_controller()
                    elif name == "w1":
                        site.start_worker("w1", FIRST)
                    # It goes on, or it was lost as its worker took too long to come back, and another has the GPU first.
                    wait_until(lambda: cluster.poll(holder).tasks[0].status is JobStatus.RUNNING, PATIENCE_S)
            assert cluster.poll(holder).tasks[0].failures == 0
            cluster.terminate(holder)
            infos = cluster.wait(others, timeout=PATIENCE_S)
            assert [(info.status, info.tasks[0].failures) for info in infos] == [(JobStatus.SUCCEEDED, 0)] * 3


def _kill(daemons: Daemons, name: str) -> None:
    if name != "keeper":
        daemons.kill(name)
        return
    for process in daemons.family.named("fluster-keeper"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# How they are


@pytest.mark.parametrize(
    ("unwell", "why"),
    [
        pytest.param(replace(FIRST, fails={"*": 15}), "fallen off the bus", id="lost"),
        pytest.param(replace(FIRST, fails={"nvmlDeviceGetTemperature": 16}), "needs a reset", id="reset"),
        pytest.param(replace(FIRST, ecc=3), "3 errors that could not be corrected", id="ecc"),
    ],
)
def test_the_task_of_a_gpu_that_fails_is_tried_elsewhere(
    site: Site, stand_in: StandIn, unwell: FakeGpu, why: str
) -> None:
    site.start_worker("w1", FIRST)
    with site.connect() as cluster:
        job_id = cluster.launch(holding())
        wait_ready(cluster, job_id)
        site.start_worker("w2", SECOND)
        stand_in.show(unwell, SECOND)
        wait_until(lambda: why in cluster.poll(job_id).tasks[0].last_failure, PATIENCE_S)
        wait_ready(cluster, job_id, lines=2)
        (task,) = cluster.poll(job_id).tasks
        assert (task.attempt, task.worker_id, task.gpus) == (2, "w2", (SECOND.uuid,))
        assert (task.failures, task.preemptions) == (0, 1)
        assert f"GPU 0 ({FIRST.uuid})" in task.last_failure
        assert any(why in each for each in cluster.worker_health(WorkerId("w1")).problems)
        waiting = cluster.launch(command(*_SHOW, resources=ONE))
        explained(cluster, waiting, why)
        stand_in.show(FIRST, SECOND)
        assert cluster.wait(waiting, timeout=PATIENCE_S).worker_id == "w1"


def test_a_gpu_in_which_another_program_computes_is_given_to_no_task(site: Site, stand_in: StandIn) -> None:
    with subprocess.Popen(["sleep", "600"]) as program:
        try:
            stand_in.show(replace(FIRST, processes=[("c", program.pid, 2 * GIB)]))
            site.start_worker("w1", FIRST)
            why = f"process {program.pid}, which is not of a task, holds more than 1 GiB of its memory: end it"
            with site.connect() as cluster:
                wait_until(lambda: why in str(cluster.worker_health(WorkerId("w1")).problems), PATIENCE_S)
                waiting = cluster.launch(command(*_SHOW, resources=ONE))
                explained(cluster, waiting, why)
                stand_in.show(FIRST)
                info = cluster.wait(waiting, timeout=PATIENCE_S)
                assert (info.status, costs(info)) == (JobStatus.SUCCEEDED, (0, 0))
        finally:
            program.kill()
