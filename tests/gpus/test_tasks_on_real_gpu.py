"""What tasks find of a GPU that is really there, and that no two have it at once. Skipped where there is none."""

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fluster.cluster import Cluster
from fluster_bus.messages import Capacity, JobId, JobRequest, JobStatus, ResourceConfig, WorkerId
from fluster_bus.messages.parts.resources import GIB
from fluster_services.worker.gpus.inventory import GpuInventory
from tests.gpus.test_real_gpu import holding, inventory, plain  # noqa: F401 - a fixture
from tests.system.conftest import family  # noqa: F401 - a fixture
from tests.system.daemons import PATIENT, Daemons
from tests.system.job_requests import command, texts, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60
HELD = 2 * GIB
_ROOT = Path(__file__).parents[2]
_CUDA = f"cd {shlex.quote(str(_ROOT))} && exec {shlex.quote(sys.executable)} -m tests.gpus.cuda_program"


_HOLDS = f"sleep 600 | ({_CUDA} {HELD})"


def asking(script: str, *, gpus: int) -> JobRequest:
    resources = ResourceConfig.with_gpu(count=gpus) if gpus else ResourceConfig.with_cpu(1)
    return command("sh", "-c", script, resources=resources)


def said(cluster: Cluster, job_id: JobId) -> list[str]:
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert info.status is JobStatus.SUCCEEDED, (info, texts(cluster, job_id))
    return texts(cluster, job_id)


@dataclass
class Machine:
    """Clusters on a machine with one GPU or more, each with a worker that offers the first."""

    gpu: Any
    folder: Path

    def start(self, daemons: Daemons) -> None:
        daemons.start_controller()
        total = Capacity(cpu=4, memory=8 * GIB, device="gpu", variant="real", devices=1)
        daemons.start_worker(total=total, device_ids=(self.gpu.uuid,), gpu_locks=str(self.folder / "locks"))


@pytest.fixture
def machine(inventory: GpuInventory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:  # noqa: F811
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine(inventory.usable[0], tmp_path)


@pytest.fixture
def cluster(machine: Machine, family: Family) -> Iterator[Cluster]:  # noqa: F811
    with Daemons(machine.folder / "a", family, timing=PATIENT) as daemons:
        machine.start(daemons)
        with daemons.connect() as cluster:
            yield cluster


def test_a_task_finds_the_gpu_that_it_was_given(cluster: Cluster, machine: Machine) -> None:
    job_id = cluster.launch(
        asking(f'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $FLUSTER_GPU_UUIDS"; {_CUDA}', gpus=1)
    )
    variables, shown = said(cluster, job_id)
    assert variables == f"{machine.gpu.index} PCI_BUS_ID {machine.gpu.uuid}"
    (device,) = json.loads(shown)["devices"]
    assert device["uuid"] == plain(machine.gpu.uuid)
    assert cluster.poll(job_id).tasks[0].gpus == (machine.gpu.uuid,)


def test_a_task_that_asks_for_no_gpu_finds_none(cluster: Cluster) -> None:
    (shown,) = said(cluster, cluster.launch(asking(_CUDA, gpus=0)))
    assert json.loads(shown)["devices"] == []


def test_no_two_clusters_book_one_gpu(cluster: Cluster, machine: Machine) -> None:
    holder = cluster.launch(asking(f"echo ready; {_HOLDS}", gpus=1))
    wait_ready(cluster, holder, lines=2)
    with Daemons(machine.folder / "b", Family(), timing=PATIENT) as daemons:
        machine.start(daemons)
        with daemons.connect() as other:
            waiting = other.launch(asking(_CUDA, gpus=1))
            why = f"attempt default.{holder}.0.1 "
            wait_until(lambda: why in other.explain(waiting), PATIENCE_S, lambda: other.explain(waiting))
            assert other.poll(waiting).status is JobStatus.PENDING
            cluster.terminate(holder)
            (shown,) = said(other, waiting)
            (device,) = json.loads(shown)["devices"]
            assert device["total"] - device["free"] < HELD, "the first one's memory was freed before"


def test_what_outlives_its_task_has_left_the_gpu_when_the_next_one_has_it(cluster: Cluster, machine: Machine) -> None:
    grandchild = f"(setsid sh -c {shlex.quote(_HOLDS)} & ) | head -n 1"
    (shown,) = said(cluster, cluster.launch(asking(grandchild, gpus=1)))
    assert json.loads(shown)["alloc"] == 0
    (shown,) = said(cluster, cluster.launch(asking(_CUDA, gpus=1)))
    (device,) = json.loads(shown)["devices"]
    assert device["total"] - device["free"] < HELD


def test_a_gpu_in_which_another_program_computes_is_given_to_no_task(cluster: Cluster, machine: Machine) -> None:
    with holding(HELD) as program:
        why = f"process {program.pid}, which is not of a task, holds"
        wait_until(lambda: why in str(cluster.worker_health(WorkerId("w1")).problems), PATIENCE_S)
        waiting = cluster.launch(asking(_CUDA, gpus=1))
        wait_until(lambda: why in cluster.explain(waiting), PATIENCE_S, lambda: cluster.explain(waiting))
        assert cluster.poll(waiting).status is JobStatus.PENDING
    (shown,) = said(cluster, waiting)
    (device,) = json.loads(shown)["devices"]
    assert device["uuid"] == plain(machine.gpu.uuid)
