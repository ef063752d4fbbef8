"""Tasks that ask for more than CPUs and memory: labels, disk, devices."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluster_bus.messages import Capacity, JobStatus, ResourceConfig
from fluster_bus.messages.parts.resources import GIB
from tests.system.daemons import PATIENT, Daemons
from tests.system.job_requests import command, texts, wait_ready
from tests.system.processes import Family

PATIENCE_S = 60


@pytest.fixture
def daemons(tmp_path: Path, family: Family) -> Iterator[Daemons]:
    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        yield daemons


def test_a_task_runs_where_its_labels_are(daemons: Daemons) -> None:
    for zone in ("a", "b"):
        total = Capacity(cpu=4, memory=8 * GIB, disk=GIB, labels=(f"zone={zone}",))
        daemons.start_worker(f"in-{zone}", total=total)
    with daemons.connect() as cluster:
        requests = [command("true", resources=ResourceConfig(labels={"zone": zone})) for zone in ("a", "b") * 3]
        infos = cluster.wait(cluster.launch_many(requests), timeout=PATIENCE_S)
        assert [info.worker_id for info in infos] == ["in-a", "in-b"] * 3
        nowhere = cluster.launch(command("true", resources=ResourceConfig(labels={"zone": "c"})))
        assert "no worker has zone=c (zone=a, zone=b)" in cluster.explain(nowhere)
        info = cluster.wait(nowhere, timeout=PATIENCE_S)
        assert info.status is JobStatus.UNSCHEDULABLE
        assert "no worker has zone=c" in info.error_message
        on_disk = cluster.launch(command("true", resources=ResourceConfig(disk=GIB, labels={"zone": "b"})))
        assert cluster.wait(on_disk, timeout=PATIENCE_S).worker_id == "in-b"
        assert {worker.info.labels["zone"] for worker in cluster.list_workers()} == {"a", "b"}


def test_each_task_sees_its_own_devices_also_after_a_restart(daemons: Daemons, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    total = Capacity(cpu=8, memory=8 * GIB, device="gpu", variant="h100", devices=3)
    daemons.start_worker("w1", total=total, device_ids=("4", "5", "7"))
    show = f"echo $CUDA_VISIBLE_DEVICES; read _ < {gate}"
    with daemons.connect() as cluster:
        one, two = (ResourceConfig.with_gpu("h100", count) for count in (1, 2))
        first = cluster.launch(command("sh", "-c", show, resources=two, env={"CUDA_VISIBLE_DEVICES": "0,1,2"}))
        wait_ready(cluster, first)
        daemons.kill("w1")
        daemons.start_worker("w1", total=total, device_ids=("4", "5", "7"))
        second = cluster.launch(command("sh", "-c", show, resources=one))
        wait_ready(cluster, second)
        none = cluster.launch(command("sh", "-c", 'echo "<$CUDA_VISIBLE_DEVICES>"'))
        cluster.wait(none, timeout=PATIENCE_S)
        assert (texts(cluster, first), texts(cluster, second), texts(cluster, none)) == (["4,5"], ["7"], ["<>"])
        for job_id in (first, second):
            cluster.terminate(job_id)
        cluster.wait([first, second], timeout=PATIENCE_S)
