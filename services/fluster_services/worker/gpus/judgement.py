"""Which GPUs a worker gives to no task for the time being, and why. Pure: told what was read, it says what follows."""

from __future__ import annotations

from fluster_services.worker.gpus.inventory import Gpu, GpuInventory
from fluster_services.worker.gpus.reader import is_named


def by_id(inventory: GpuInventory, name: str) -> Gpu | None:
    """The GPU, or instance, that a worker knows by this id: its UUID, or its index where that was given by hand."""
    found = [gpu for gpu in inventory.gpus if is_named(gpu, name)]
    return found[0] if len(found) == 1 else None


def why_unwell(gpu: Gpu) -> str | None:
    """Why a GPU is of no use; None while it is well."""
    if gpu.fault:
        return gpu.fault
    if gpu.is_divided:
        return (
            "it is divided into instances (MIG) and of no use as a whole: restart the worker, which then offers those"
        )
    if gpu.uncorrected_errors:
        return (
            f"its memory had {gpu.uncorrected_errors} errors that could not be corrected (ECC): stop what uses it, and run "
            f"`nvidia-smi --gpu-reset -i {gpu.index}`"
        )
    return None


def why_missing(inventory: GpuInventory) -> str:
    """Why a GPU that was there is not among those that were read."""
    return inventory.trouble or "the driver does not find it any more: restart the machine"


def named(gpu: Gpu | None, name: str) -> str:
    """A GPU in the words of a message."""
    if gpu is None:
        return f"GPU {name}"
    return f"GPU {gpu.index} ({gpu.uuid})" if gpu.uuid and not gpu.parent else f"GPU {gpu.uuid or gpu.index}"
