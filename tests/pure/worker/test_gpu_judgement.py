"""Which GPUs are given to tasks, and what these find of them."""

import pytest

from fluster_bus.messages import Capacity
from fluster_services.capacity import withhold
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.gpus.allocator import by_id, why_missing, why_unwell
from fluster_services.worker.gpus.inventory import Gpu, GpuInventory, mask, mask_style

ONE, TWO = Gpu(0, uuid="GPU-aa"), Gpu(1, uuid="GPU-bb")
PART = Gpu(0, uuid="MIG-cc", parent="GPU-bb")
NEED = Capacity(device="gpu", variant="h100", devices=1)


def test_tasks_are_told_indices_and_uuids() -> None:
    assert mask([TWO, ONE], "index") == {
        "CUDA_VISIBLE_DEVICES": "1,0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "FLUSTER_GPU_UUIDS": "GPU-bb,GPU-aa",
    }
    assert mask([TWO, ONE], "uuid")["CUDA_VISIBLE_DEVICES"] == "GPU-bb,GPU-aa"
    assert mask([PART], "index")["CUDA_VISIBLE_DEVICES"] == "MIG-cc"


def test_a_style_that_is_not_known_is_quoted() -> None:
    assert (mask_style(None), mask_style(""), mask_style("uuid")) == ("index", "index", "uuid")
    with pytest.raises(ValueError, match="FLUSTER_GPU_MASK='uid' is not known: choose index, uuid"):
        mask_style("uid")


def test_a_gpu_is_known_by_uuid_or_by_index() -> None:
    inventory = GpuInventory(gpus=(ONE, TWO, PART))
    assert [by_id(inventory, name) for name in ("GPU-bb", "1", "MIG-cc", "7", "GPU-dd")] == [TWO, TWO, PART, None, None]


def test_why_a_gpu_is_of_no_use() -> None:
    assert why_unwell(ONE) is None
    assert why_unwell(Gpu(0, fault="it is gone")) == "it is gone"
    assert "nvidia-smi --gpu-reset -i 3" in (why_unwell(Gpu(3, uncorrected_errors=2)) or "")
    assert "MIG" in (why_unwell(Gpu(3, is_divided=True)) or "")
    assert why_missing(GpuInventory(trouble="no driver")) == "no driver"


def test_what_is_withheld_is_not_given_and_comes_back() -> None:
    ledger = Ledger(Capacity(device="gpu", variant="h100", devices=2), ("GPU-aa", "GPU-bb"))
    assert ledger.withhold(["GPU-aa", "GPU-unknown"])
    assert not ledger.withhold(["GPU-aa"])
    assert (ledger.free.devices, ledger.total.devices, ledger.withheld_counts) == (1, 2, (("h100", 1),))
    assert ledger.reserve("one", NEED)
    assert ledger.devices("one") == ("GPU-bb",)
    assert not ledger.reserve("two", NEED)
    assert ledger.withhold([])
    assert ledger.reserve("two", NEED)
    assert ledger.devices("two") == ("GPU-aa",)
    ledger.withhold(["GPU-aa"])  # an attempt has it yet: it is not counted twice
    assert ledger.free.devices == 0
    ledger.release("one")
    assert ledger.free.devices == 1


def test_withheld_devices_leave_the_capacity_of_their_model() -> None:
    free = Capacity(device="gpu", variant="h100", devices=2, other_devices=(("a100", 1),))
    left = withhold(free, {"h100": 1, "a100": 3})
    assert (left.devices, left.other_devices) == (1, (("a100", 0),))
