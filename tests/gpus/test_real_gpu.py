"""What is read of a GPU that is really there, and what a process sees of it. Skipped where there is none."""

import asyncio
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fluster_services.worker.gpus.inventory import GpuInventory
from fluster_services.worker.gpus.reader import GpuReader
from tests import optional

GIB = 1 << 30


def read(*, by_program: bool = False, monkeypatch: pytest.MonkeyPatch | None = None) -> GpuInventory:
    async def run() -> GpuInventory:
        reader = GpuReader()
        try:
            return await reader.read()
        finally:
            await reader.close()

    if by_program:
        assert monkeypatch is not None
        monkeypatch.setattr("fluster_services.worker.gpus.reader._has_library", lambda: False)
    return asyncio.run(run())


@pytest.fixture(scope="module")
def inventory() -> GpuInventory:
    found = read()
    if not found.gpus:
        optional.skip("a GPU", "NVIDIA's driver shows no GPU here: run these on a machine with one")
    return found


@contextmanager
def holding(size: int) -> Iterator[subprocess.Popen[str]]:
    """A process that has so much memory of the first GPU."""
    command = [sys.executable, "-m", "tests.gpus.cuda_program", str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert said["alloc"] == 0, said
        yield process
        assert process.stdin is not None
        process.stdin.close()


def seen(mask: str) -> dict[str, Any]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": mask, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    command = [sys.executable, "-m", "tests.gpus.cuda_program"]
    said: dict[str, Any] = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    return said


def plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-").replace("-", "")


def test_each_gpu_is_read_whole(inventory: GpuInventory) -> None:
    assert inventory.source == "nvml"
    assert not inventory.trouble
    assert inventory.driver
    assert inventory.cuda
    for gpu in inventory.gpus:
        assert not gpu.fault
        assert gpu.uuid.startswith(("GPU-", "MIG-"))
        assert gpu.model
        assert gpu.bus_id.count(":") == 2
        assert gpu.memory_total is not None
        assert gpu.memory_used is not None
        assert gpu.memory_total > GIB
        assert 0 <= gpu.memory_used <= gpu.memory_total
        assert gpu.temperature is None or 0 < gpu.temperature < 120


def test_nvidia_smi_tells_the_same(inventory: GpuInventory, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("nvidia-smi") is None:
        optional.skip("nvidia-smi", "nvidia-smi is not on PATH")
    told = read(by_program=True, monkeypatch=monkeypatch)
    assert told.source == "nvidia-smi"
    assert told.driver == inventory.driver

    def lasting(found: GpuInventory) -> list[dict[str, Any]]:
        changing = ("memory_used", "utilization", "temperature", "power", "processes", "memory_total")
        return [{k: v for k, v in dataclasses.asdict(gpu).items() if k not in changing} for gpu in found.gpus]

    assert lasting(told) == lasting(inventory)
    for one, other in zip(told.gpus, inventory.gpus, strict=True):
        assert one.memory_total is not None
        assert other.memory_total is not None
        assert abs(one.memory_total - other.memory_total) < 2 << 20


def test_who_holds_memory_is_on_the_gpu(inventory: GpuInventory) -> None:
    before = read().gpus[0].memory_used
    with holding(2 * GIB) as process:
        during = read().gpus[0]
        assert before is not None
        assert during.memory_used is not None
        assert during.memory_used - before >= 2 * GIB
        assert during.processes is not None
        mine = [each for each in during.processes if each.pid == process.pid]
        assert mine, f"{process.pid} is not among {during.processes}"
        assert mine[0].memory is None or mine[0].memory >= 2 * GIB


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        pytest.param(lambda gpu: str(gpu.index), 1, id="index"),
        pytest.param(lambda gpu: gpu.uuid, 1, id="uuid"),
        pytest.param(lambda _gpu: "", 0, id="nothing"),
    ],
)
def test_a_mask_shows_its_gpu_alone(inventory: GpuInventory, mask: Callable[[Any], str], expected: int) -> None:
    for gpu in inventory.usable:
        said = seen(mask(gpu))
        assert [each["uuid"] for each in said["devices"]] == [plain(gpu.uuid)] * expected
        assert all(each["total"] > GIB for each in said["devices"])
