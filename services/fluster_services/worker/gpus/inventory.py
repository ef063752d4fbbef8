"""What was read of a machine's GPUs, and what a task finds in its environment of those that are its own.

A value that the driver does not tell is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from fluster_bus.core.json_types import JsonObject

Source = Literal["nvml", "nvidia-smi", "none"]

MAX_GPUS = 64  # of one machine: more are not read
MAX_INSTANCES = 16  # of one GPU that is divided
MAX_PROCESSES = 256  # on one GPU
MASK_VARIABLE = "FLUSTER_GPU_MASK"
UUIDS_VARIABLE = "FLUSTER_GPU_UUIDS"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
MaskStyle = Literal["index", "uuid"]
MASK_STYLES: tuple[MaskStyle, ...] = ("index", "uuid")
# By default CUDA counts the fastest first, which is another order on a machine with several models.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
NO_GPU = {VISIBLE_VARIABLE: "", **ORDER}


@dataclass(frozen=True)
class GpuProcess:
    """A process that has memory on a GPU."""

    pid: int  # as this process would see it; processes of other containers may be missing
    memory: int | None = None  # bytes on the GPU


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one that is divided (MIG)."""

    index: int  # in the order of PCI buses; that of an instance counts the instances of its GPU
    uuid: str = ""
    model: str = ""  # as the driver names it, such as NVIDIA H100 80GB HBM3
    bus_id: str = ""  # such as 00000000:17:00.0
    memory_total: int | None = None  # bytes
    memory_used: int | None = None  # bytes, without what the driver keeps for itself
    utilization: int | None = None  # percent of the time in which something ran
    temperature: int | None = None  # degrees Celsius
    power: float | None = None  # watts
    uncorrected_errors: int | None = None  # of its memory (ECC), since the driver was loaded
    processes: tuple[GpuProcess, ...] | None = None
    parent: str = ""  # of an instance: the UUID of its GPU
    is_divided: bool = False  # into instances, and of no use as a whole
    fault: str = ""  # why it cannot be used; what was to be read after that is missing

    @property
    def is_usable(self) -> bool:
        """True for what a task can be given."""
        return not self.fault and not self.is_divided


@dataclass(frozen=True)
class GpuPair:
    """How near two GPUs are to each other, by their UUIDs."""

    first: str
    second: str
    level: int  # of what they have in common: 0 a board, 10 and 20 PCIe switches, 30 a host bridge, 40 a NUMA node, 50 the machine
    has_nvlink: bool = False


@dataclass(frozen=True)
class GpuInventory:
    """All GPUs of a machine, as they were found at one time."""

    source: Source = "none"
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    driver: str = ""  # version, such as 580.159.04
    cuda: str = ""  # the newest version that the driver knows, such as 13.0
    trouble: str = ""  # why nothing, or not all, could be read

    @property
    def usable(self) -> tuple[Gpu, ...]:
        """What tasks can be given, in the order of the GPUs."""
        return tuple(gpu for gpu in self.gpus if gpu.is_usable)


def gpu_as_json(gpu: Gpu) -> Mapping[str, object]:
    """What `gpu_from_json` reads."""
    return asdict(gpu)


def gpu_from_json(data: JsonObject) -> Gpu:
    """The GPU that `gpu_as_json` wrote."""
    processes: Sequence[JsonObject] | None = data["processes"]
    known = None if processes is None else tuple(GpuProcess(**each) for each in processes)
    return Gpu(**{**data, "processes": known})


def mask_style(text: str | None) -> MaskStyle:
    """The style that FLUSTER_GPU_MASK names. Raises ValueError."""
    for style in MASK_STYLES:
        if style == (text or MASK_STYLES[0]):
            return style
    raise ValueError(f"{MASK_VARIABLE}={text!r} is not known: choose {', '.join(MASK_STYLES)}")


def mask(gpus: Sequence[Gpu], style: MaskStyle) -> dict[str, str]:
    """Variables for a task that has these GPUs. By index, since some programs cannot read UUIDs; instances have no index."""
    names = [gpu.uuid if gpu.uuid and (gpu.parent or style == "uuid") else str(gpu.index) for gpu in gpus]
    return {VISIBLE_VARIABLE: ",".join(names), **ORDER, UUIDS_VARIABLE: ",".join(gpu.uuid for gpu in gpus)}
