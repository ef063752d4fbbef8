"""What nvidia-smi prints of GPUs, as an inventory."""

from fluster_services.worker.gpus import nvidia_smi
from fluster_services.worker.gpus.inventory import Gpu, GpuProcess

MIB = 1 << 20
H100, A100 = "GPU-00000000-1111-2222-3333-444444444444", "GPU-00000001-1111-2222-3333-444444444444"
GPUS = f"""\
0, {H100}, NVIDIA H100 80GB HBM3, 00000000:10:00.0, 81559, 2522, 37, 31, 71.25, 0, Disabled, 580.159.04
1, {A100}, NVIDIA A100-SXM4-40GB, 00000000:11:00.0, 40960, 20, [N/A], 29, [N/A], 3, Enabled, 580.159.04
2, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [N/A], [N/A], [N/A], [N/A], [N/A], 580.159.04
"""
LISTED = f"""\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: {H100})
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {A100})
  MIG 3g.20gb     Device  0: (UUID: MIG-aaaa)
  MIG 1g.5gb      Device  1: (UUID: MIG-bbbb)
"""


def test_rows_are_gpus_with_their_instances_and_processes() -> None:
    processes = f"{H100}, 4711, 2508\n{H100}, 4712, [N/A]\n"
    inventory = nvidia_smi.parse(GPUS, processes, LISTED)
    assert (inventory.source, inventory.driver) == ("nvidia-smi", "580.159.04")
    assert inventory.gpus == (
        Gpu(
            0,
            uuid=H100,
            model="NVIDIA H100 80GB HBM3",
            bus_id="00000000:10:00.0",
            memory_total=81_559 * MIB,
            memory_used=2_522 * MIB,
            utilization=37,
            temperature=31,
            power=71.25,
            uncorrected_errors=0,
            processes=(GpuProcess(4711, 2_508 * MIB), GpuProcess(4712)),
        ),
        Gpu(
            1,
            uuid=A100,
            model="NVIDIA A100-SXM4-40GB",
            bus_id="00000000:11:00.0",
            memory_total=40_960 * MIB,
            memory_used=20 * MIB,
            temperature=29,
            uncorrected_errors=3,
            processes=(),
            is_divided=True,
        ),
        Gpu(0, uuid="MIG-aaaa", model="NVIDIA A100-SXM4-40GB MIG 3g.20gb", bus_id="00000000:11:00.0", parent=A100),
        Gpu(1, uuid="MIG-bbbb", model="NVIDIA A100-SXM4-40GB MIG 1g.5gb", bus_id="00000000:11:00.0", parent=A100),
        Gpu(2, processes=(), fault="nvidia-smi says: [GPU is lost]"),
    )
    assert [gpu.uuid for gpu in inventory.usable] == [H100, "MIG-aaaa", "MIG-bbbb"]


def test_what_it_says_beside_rows_is_left_out() -> None:
    said = "No devices were found\n\nUnable to determine the device handle for GPU0000:11:00.0: Unknown Error\n"
    assert nvidia_smi.parse(said, said, said).gpus == ()
    assert nvidia_smi.parse(f"{said}{GPUS.splitlines()[0]}\n", "", "").gpus[0].uuid == H100
