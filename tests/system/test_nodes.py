"""Machines as a user sees them: the GPUs are those of a stand-in for NVIDIA's library."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster.cluster import LocalCluster
from tests.gpus.stand_in import GIB, FakeGpu, FakeInstance, StandIn, build
from tests.system.processes import Family
from tests.waiting import wait_until

_COMMAND = [sys.executable, "-c", "from fluster.cli import main; main()"]
_PROGRAM = """
import sys
from fluster import LocalCluster
with LocalCluster() as cluster:
    print(cluster.address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    folder = tmp_path_factory.mktemp("nvml")
    return StandIn(build(folder), folder / "gpus")


@pytest.fixture
def address(stand_in: StandIn, family: Family) -> Iterator[str]:
    """A cluster on a machine with such GPUs: the variables must be there when its processes begin."""
    instances = [FakeInstance("MIG-1"), FakeInstance("MIG-2")]
    divided = FakeGpu(1, name="NVIDIA A100-SXM4-40GB", mig=1, instances=instances)
    stand_in.show(FakeGpu(0), divided, FakeGpu(2, fails={"nvmlDeviceGetTemperature": 15}), FakeGpu(3))
    environment = {**os.environ, **stand_in.variables}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        yield program.stdout.readline().strip()
        program.stdin.close()


def shown(address: str, *arguments: str) -> str:
    command = [*_COMMAND, *arguments]
    environment = {**os.environ, "FLUSTER_CLUSTER_ADDRESS": address}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


def test_nodes_have_the_gpus_of_their_machine(address: str) -> None:
    def nodes() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(shown(address, "--output", "json", "nodes"))
        return found if found[0]["info"]["gpus"] else []

    (node,) = wait_until(nodes)
    assert node["workers"] == ["worker-0"]
    assert node["alive"]
    info = node["info"]
    assert (info["gpu_driver"], info["cuda"]) == ("580.159.04", "13.0")
    assert (info["cpus"] > 0, info["memory"] > 0, info["disk"] > 0) == (True, True, True)
    assert [(gpu["uuid"], gpu["divided"], gpu["parent"]) for gpu in info["gpus"]] == [
        (FakeGpu(0).uuid, False, ""),
        (FakeGpu(1).uuid, True, ""),
        ("MIG-1", False, FakeGpu(1).uuid),
        ("MIG-2", False, FakeGpu(1).uuid),
        (FakeGpu(2).uuid, False, ""),
        (FakeGpu(3).uuid, False, ""),
    ]
    assert "fallen off the bus" in info["gpus"][4]["fault"]
    assert info["gpus"][0]["memory"] == 80 * GIB
    table = shown(address, "nodes")
    assert "2 x NVIDIA A100-SXM4-40GB MIG 1g.5gb, 2 x NVIDIA H100 80GB HBM3, 1 unwell" in table
    assert "580.159.04 (CUDA 13.0)" in table
    (worker,) = json.loads(shown(address, "--output", "json", "workers"))
    assert worker["info"]["node"] is None


def test_a_machine_without_gpus_has_none(family: Family, tmp_path: Path) -> None:
    with LocalCluster(workers=2, gpus="0") as cluster:
        (node,) = cluster.list_nodes()
        assert node.workers == ("worker-0", "worker-1")
        assert node.info.cpus == os.cpu_count()
        assert node.silent_for_s < 60


def test_tasks_are_given_gpus_of_each_model_of_a_machine(address: str) -> None:
    say = ("--follow", "--", "sh", "-c", "echo $CUDA_DEVICE_ORDER $CUDA_VISIBLE_DEVICES")
    assert shown(address, "submit", "--gpu", "a100-1g-5gb:2", *say).strip().endswith("PCI_BUS_ID MIG-1,MIG-2")
    assert shown(address, "submit", "--gpu", "h100:2", *say).strip().endswith("PCI_BUS_ID 0,3")
