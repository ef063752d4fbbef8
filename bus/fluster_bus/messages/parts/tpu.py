"""The TPU slices that Google Cloud offers: chips, VMs, chips of each VM.

Source: https://cloud.google.com/tpu/docs/ (pages v4, v5e, v5p, v6e). The number in a v4 or v5p name counts
TensorCores, two to a chip; in a v5litepod or v6e name it counts chips.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TpuTopologyInfo:
    """One slice: its name, its chips and the VMs they hang on."""

    variant: str
    chip_count: int
    vm_count: int
    chips_per_vm: int


_CHIPS_PER_VM = 4
_SIZES = {  # {generation: the numbers in its slices' names}
    "v4": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    "v5litepod": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "v5p": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288),
    "v6e": (1, 4, 8, 16, 32, 64, 128, 256),
}
_TWO_CORES_A_CHIP = ("v4", "v5p")
_LARGEST_SINGLE_VM = 8  # chips; only v5litepod and v6e have VMs with other than 4 chips


def _topology(generation: str, size: int) -> TpuTopologyInfo:
    chips = size // 2 if generation in _TWO_CORES_A_CHIP else size
    single = generation not in _TWO_CORES_A_CHIP and chips <= _LARGEST_SINGLE_VM
    chips_per_vm = chips if single else _CHIPS_PER_VM
    return TpuTopologyInfo(f"{generation}-{size}", chips, chips // chips_per_vm, chips_per_vm)


TPU_TOPOLOGIES = {  # {variant: its topology}
    info.variant: info for info in (_topology(generation, size) for generation in _SIZES for size in _SIZES[generation])
}


def tpu_topology(variant: str) -> TpuTopologyInfo:
    """The topology of a slice such as `v5p-64`. Raises ValueError with the sizes that exist."""
    info = TPU_TOPOLOGIES.get(variant)
    if info is None:
        generation = variant.partition("-")[0]
        known = [name for name in TPU_TOPOLOGIES if name.startswith(f"{generation}-")] or [f"{g}-…" for g in _SIZES]
        raise ValueError(f"unknown TPU slice {variant!r}: use one of {', '.join(known)}")
    return info
