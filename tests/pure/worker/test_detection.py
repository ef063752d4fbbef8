"""What a worker takes its machine for."""

from pathlib import Path

import pytest

from fluster_bus.core.devices import Devices, parse_gpus
from fluster_bus.messages import Capacity
from fluster_services.config import CacheLimits
from fluster_services.worker.environments.folder_cache import stored_bytes
from fluster_services.worker.gpus.inventory import Gpu, GpuInventory
from fluster_services.worker.presence.detection import CapacityOverrides, detect, gpu_variant, offered_gpus

NO_CACHES = CacheLimits(0, 0)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce GTX 1080 Ti", "gtx1080ti"),
        ("NVIDIA RTX A6000", "a6000"),
        ("Graphics Device", "graphics-device"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-1g-5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "h100-1g-10gb-me"),
    ],
)
def test_models_are_called_as_people_call_them(name: str, variant: str) -> None:
    assert gpu_variant(name) == variant


INVENTORY = GpuInventory(
    source="nvml",
    gpus=(
        Gpu(0, uuid="GPU-aa00", model="NVIDIA H100 80GB HBM3"),
        Gpu(1, uuid="GPU-ab11", model="NVIDIA H100 80GB HBM3"),
        Gpu(2, uuid="GPU-cc22", model="NVIDIA A100-SXM4-80GB"),
        Gpu(3, model="NVIDIA A100-SXM4-80GB", fault="it has fallen off the bus"),
        Gpu(4, uuid="GPU-dd44", model="NVIDIA L40S", is_divided=True),
        Gpu(0, uuid="MIG-ee", model="NVIDIA L40S MIG 1g.5gb", parent="GPU-dd44"),
    ),
)


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (
            None,
            Devices(
                "gpu",
                "h100",
                ("GPU-aa00", "GPU-ab11"),
                others=(Devices("gpu", "l40s-1g-5gb", ("MIG-ee",)), Devices("gpu", "a100", ("GPU-cc22",))),
            ),
        ),
        ("1", Devices("gpu", "h100", ("GPU-ab11",))),
        ("2", Devices("gpu", "a100", ("GPU-cc22",))),
        ("", Devices()),
        ("7", Devices()),
        ("1, 0", Devices("gpu", "h100", ("GPU-ab11", "GPU-aa00"))),
        ("1,7,0", Devices("gpu", "h100", ("GPU-ab11",))),  # CUDA ends at the first that is not there
        ("GPU-aa00,GPU-ab11", Devices("gpu", "h100", ("GPU-aa00", "GPU-ab11"))),
        ("GPU-ab", Devices("gpu", "h100", ("GPU-ab11",))),
        ("GPU-AB11", Devices("gpu", "h100", ("GPU-ab11",))),
        ("gpu-ab11", Devices()),
        ("0,0", Devices()),  # CUDA fails
        ("0,GPU-aa00", Devices()),
        ("GPU-a", Devices()),  # of two: CUDA takes none
        ("3", Devices()),
        ("4", Devices()),
        ("MIG-ee", Devices("gpu", "l40s-1g-5gb", ("MIG-ee",))),
    ],
)
def test_gpus_are_those_that_are_well_and_visible(visible: str | None, found: Devices) -> None:
    assert offered_gpus(INVENTORY, visible) == found
    assert offered_gpus(GpuInventory(), visible) == Devices()


@pytest.mark.parametrize(
    ("text", "visible", "found"),
    [
        ("0", None, Devices()),
        ("h100", None, Devices("gpu", "h100", ("0",))),
        ("H100:2", None, Devices("gpu", "h100", ("0", "1"))),
        ("a100:2", "4,5,6", Devices("gpu", "a100", ("4", "5"))),
        ("2", "4,5,6", Devices("gpu", "any", ("4", "5"))),
    ],
)
def test_gpus_may_be_given_by_hand(text: str, visible: str | None, found: Devices) -> None:
    assert parse_gpus(text, visible) == found


@pytest.mark.parametrize(
    ("text", "visible"),
    [("08", None), ("-1", None), ("h100:0", None), ("4", "0,1"), ("h100:x", None), ("h100:3", "0,1")],
)
def test_what_names_no_gpus_is_quoted(text: str, visible: str | None) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        parse_gpus(text, visible)


def test_what_is_given_goes_before_what_is_found(tmp_path: Path) -> None:
    given = CapacityOverrides(
        cpu=3, memory=5, disk=7, devices=Devices("gpu", "h100", ("4", "6")), labels={"zone": "a", "b": "c"}
    )
    total, devices = detect(given, tmp_path, NO_CACHES)
    assert total == Capacity(cpu=3, memory=5, disk=7, device="gpu", variant="h100", devices=2, labels=("b=c", "zone=a"))
    assert devices.ids == ("4", "6")


def test_what_the_caches_may_still_take_is_no_free_disk(tmp_path: Path) -> None:
    made = tmp_path / "workspaces" / "x-1" / "made"
    made.parent.mkdir(parents=True)
    made.write_text("1000")
    assert stored_bytes(tmp_path / "workspaces") == 1000
    none = Devices()
    everything = detect(CapacityOverrides(devices=none), tmp_path, NO_CACHES)[0]
    rest = detect(
        CapacityOverrides(devices=none), tmp_path, CacheLimits(workspaces_bytes=1 << 20, environments_bytes=1 << 60)
    )[0]
    assert everything.cpu > 0
    assert everything.memory > 0
    assert everything.disk > 0
    assert rest.disk == 0
