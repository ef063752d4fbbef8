"""GPUs as NVIDIA's binding reports them, over a library that stands in for NVIDIA's."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from fluster_services.worker.gpus.inventory import Gpu, GpuPair, GpuProcess
from fluster_services.worker.gpus.reader import GpuReader
from tests.gpus.stand_in import GIB, FakeGpu, FakeInstance, StandIn, build
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

NVML_GPU_IS_LOST, NVML_RESET_REQUIRED, NVML_UNKNOWN, NVML_NO_PERMISSION = 15, 16, 999, 4
NVML_DRIVER_NOT_LOADED, NVML_LIBRARY_NOT_FOUND, NVML_VERSION_MISMATCH = 9, 12, 18


@pytest.fixture(scope="session")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stand_in(library_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(library_folder, tmp_path / "gpus")
    for name, value in made.variables.items():
        monkeypatch.setenv(name, value)
    # The variables are for the helper; this process began without them, and does not find the library itself.
    monkeypatch.setattr("fluster_services.worker.gpus.reader._has_library", lambda: True)
    return made


@pytest.fixture
async def reader(stand_in: StandIn) -> AsyncIterator[GpuReader]:
    made = GpuReader(device_s=1.0, start_s=30.0)
    yield made
    await made.close()


async def test_all_values_of_a_gpu_are_read(stand_in: StandIn, reader: GpuReader) -> None:
    stand_in.show(
        FakeGpu(
            0,
            used=3 * GIB,
            utilization=87,
            temperature=64,
            milliwatts=512_500,
            ecc=2,
            processes=[("c", 4711, 2 * GIB), ("g", 4712, GIB), ("c", 4713, 0), ("g", 4711, 2 * GIB)],
        )
    )
    inventory = await reader.read()
    assert (inventory.source, inventory.driver, inventory.cuda) == ("nvml", "580.159.04", "13.0")
    assert inventory.trouble == ""
    assert inventory.gpus == (
        Gpu(
            index=0,
            uuid="GPU-00000000-1111-2222-3333-444444444444",
            model="NVIDIA H100 80GB HBM3",
            bus_id="00000000:10:00.0",
            memory_total=80 * GIB,
            memory_used=3 * GIB,
            utilization=87,
            temperature=64,
            power=512.5,
            uncorrected_errors=2,
            processes=(GpuProcess(4711, 2 * GIB), GpuProcess(4712, GIB), GpuProcess(4713, None)),
        ),
    )


async def test_what_the_driver_does_not_tell_is_unknown(stand_in: StandIn, reader: GpuReader) -> None:
    silent = FakeGpu(0, memory=None, utilization=None, temperature=None, milliwatts=None, ecc=None, mig=None)
    no_processes = {f"nvmlDeviceGet{kind}RunningProcesses": NVML_NO_PERMISSION for kind in ("Compute", "Graphics")}
    stand_in.show(replace(silent, fails=no_processes))
    (gpu,) = (await reader.read()).gpus
    assert gpu == Gpu(0, uuid=silent.uuid, model=silent.name, bus_id=silent.bus_id)
    assert gpu.is_usable


async def test_readings_follow_each_other_in_one_process(stand_in: StandIn, reader: GpuReader) -> None:
    stand_in.show(FakeGpu(0))
    assert [gpu.memory_used for gpu in (await reader.read()).gpus] == [0]
    stand_in.show(FakeGpu(0, used=GIB), FakeGpu(1))
    first, second = await asyncio.gather(reader.read(), reader.read())
    assert [gpu.memory_used for gpu in first.gpus] == [GIB, 0]
    assert second == first


async def test_instances_of_a_divided_gpu_are_devices_of_their_own(stand_in: StandIn, reader: GpuReader) -> None:
    instances = [FakeInstance("MIG-a"), FakeInstance("MIG-b", place=4)]
    stand_in.show(FakeGpu(0), FakeGpu(1, name="NVIDIA A100-SXM4-40GB", mig=1, instances=instances))
    inventory = await reader.read()
    assert [(gpu.uuid, gpu.index, gpu.parent) for gpu in inventory.usable] == [
        (FakeGpu(0).uuid, 0, ""),
        ("MIG-a", 0, FakeGpu(1).uuid),
        ("MIG-b", 4, FakeGpu(1).uuid),
    ]
    assert inventory.gpus[1].is_divided
    assert {gpu.bus_id for gpu in inventory.gpus[1:]} == {FakeGpu(1).bus_id}
    assert {gpu.memory_total for gpu in inventory.gpus[2:]} == {5 * GIB}


@pytest.mark.parametrize(
    ("call", "code", "why"),
    [
        pytest.param("handle", NVML_GPU_IS_LOST, "fallen off the bus", id="gone"),
        pytest.param("*", NVML_GPU_IS_LOST, "fallen off the bus", id="lost"),
        pytest.param("nvmlDeviceGetTemperature", NVML_GPU_IS_LOST, "fallen off the bus", id="lost-midway"),
        pytest.param("nvmlDeviceGetUtilizationRates", NVML_RESET_REQUIRED, "needs a reset", id="reset"),
        pytest.param("nvmlDeviceGetMemoryInfo", NVML_UNKNOWN, "kernel's log", id="unknown"),
        pytest.param("handle", NVML_NO_PERMISSION, "the driver refuses it: NVML error 4", id="no-handle"),
    ],
)
async def test_a_gpu_that_fails_ends_that_gpu_alone(
    stand_in: StandIn, reader: GpuReader, call: str, code: int, why: str
) -> None:
    stand_in.show(FakeGpu(0), FakeGpu(1, fails={call: code}), FakeGpu(2))
    inventory = await reader.read()
    assert [gpu.index for gpu in inventory.usable] == [0, 2]
    assert why in inventory.gpus[1].fault
    assert f"NVML error {code}" in inventory.gpus[1].fault
    assert inventory.gpus[1].uuid == ("" if call in {"handle", "*"} else FakeGpu(1).uuid)
    stand_in.show(FakeGpu(0), FakeGpu(1), FakeGpu(2))
    assert [gpu.index for gpu in (await reader.read()).usable] == [0, 1, 2]


@pytest.mark.parametrize("call", ["handle", "nvmlDeviceGetPowerUsage"])
async def test_a_gpu_at_which_the_driver_hangs_is_left_out(stand_in: StandIn, reader: GpuReader, call: str) -> None:
    stand_in.show(FakeGpu(0), FakeGpu(1, hangs=[call]), FakeGpu(2), nearness=[(0, 2, 20, 1)])
    inventory = await reader.read()
    assert [gpu.index for gpu in inventory.usable] == [0, 2]
    assert inventory.gpus[1].fault == ("the driver did not answer for it within 1 s: reset it, or restart the machine")
    assert inventory.pairs == (GpuPair(FakeGpu(0).uuid, FakeGpu(2).uuid, 20, has_nvlink=True),)
    stand_in.show(FakeGpu(0), FakeGpu(1), FakeGpu(2))
    assert len((await reader.read()).usable) == 3


async def test_hanging_at_several_gpus_is_told_as_the_driver_s(stand_in: StandIn, reader: GpuReader) -> None:
    stand_in.show(FakeGpu(0), FakeGpu(1, hangs=["*"]), FakeGpu(2, hangs=["*"]), FakeGpu(3))
    inventory = await reader.read()
    assert inventory.trouble == "NVIDIA's driver hangs at several GPUs: restart the machine"
    assert [gpu.index for gpu in inventory.gpus if gpu.fault] == [1, 2]


async def test_a_reading_that_is_cancelled_does_not_answer_the_next(stand_in: StandIn, reader: GpuReader) -> None:
    stand_in.show(FakeGpu(0, hangs=["nvmlDeviceGetPowerUsage"]))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await reader.read()
    stand_in.show(FakeGpu(0, used=GIB))
    assert [(gpu.memory_used, gpu.fault) for gpu in (await reader.read()).gpus] == [(GIB, "")]


async def test_a_helper_that_died_is_replaced(stand_in: StandIn, reader: GpuReader) -> None:
    stand_in.show(FakeGpu(0))
    assert len((await reader.read()).usable) == 1
    assert reader.helper_pid is not None
    os.kill(reader.helper_pid, signal.SIGKILL)
    await wait_until_async(lambda: reader.helper_pid is None)
    assert len((await reader.read()).usable) == 1


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (NVML_DRIVER_NOT_LOADED, "NVIDIA's driver is not loaded: run `modprobe nvidia`"),
        (NVML_VERSION_MISMATCH, "NVIDIA's driver was updated while it was loaded: restart the machine"),
        (NVML_UNKNOWN, "NVIDIA's library cannot be used: NVML error 999"),
    ],
)
async def test_a_driver_that_does_not_work_is_told(stand_in: StandIn, reader: GpuReader, code: int, why: str) -> None:
    stand_in.show(FakeGpu(0), init=code)
    inventory = await reader.read()
    assert inventory.gpus == ()
    assert why in inventory.trouble
    stand_in.show(FakeGpu(0))
    assert len((await reader.read()).usable) == 1


async def test_nearness_is_that_of_each_pair(stand_in: StandIn, reader: GpuReader) -> None:
    stand_in.show(FakeGpu(0), FakeGpu(1), FakeGpu(2), nearness=[(0, 1, 10, 1), (0, 2, 50, 0), (1, 2, 50, 0)])
    pairs = (await reader.read()).pairs
    a, b, c = (FakeGpu(number).uuid for number in range(3))
    assert pairs == (GpuPair(a, b, 10, has_nvlink=True), GpuPair(a, c, 50), GpuPair(b, c, 50))


@pytest.fixture
def listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nvidia-smi that prints what lies in that folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        "name = 'gpus' if 'query-gpu' in sys.argv[1] else 'processes' if 'compute' in sys.argv[1] else 'listed'\n"
        f"sys.stdout.write(pathlib.Path({str(tmp_path)!r}, name + '.txt').read_text())\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


async def test_nvidia_smi_is_asked_where_the_library_is_missing(
    stand_in: StandIn, reader: GpuReader, listing: Path
) -> None:
    stand_in.show(FakeGpu(0), init=NVML_LIBRARY_NOT_FOUND)
    uuid = FakeGpu(0).uuid
    (listing / "gpus.txt").write_text(
        f"0, {uuid}, NVIDIA H100 80GB HBM3, 00000000:10:00.0, 81559, 4, 0, 31, 71.25, 0, Disabled, 580.159.04\n"
    )
    (listing / "processes.txt").write_text(f"{uuid}, 4711, 2048\n")
    (listing / "listed.txt").write_text(f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {uuid})\n")
    inventory = await reader.read()
    assert (inventory.source, inventory.driver) == ("nvidia-smi", "580.159.04")
    (gpu,) = inventory.gpus
    assert gpu.processes == (GpuProcess(4711, 2 * GIB),)
    assert (gpu.uuid, gpu.memory_total, gpu.power) == (uuid, 81_559 << 20, 71.25)


async def test_without_library_and_program_there_are_no_gpus(
    stand_in: StandIn, reader: GpuReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.show(init=NVML_LIBRARY_NOT_FOUND)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    inventory = await reader.read()
    assert (inventory.source, inventory.gpus, inventory.trouble) == ("none", (), "")
