"""What a task finds in its environment of the GPUs that are its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fluster_services.worker.gpus.inventory import Gpu

MASK_VARIABLE = "FLUSTER_GPU_MASK"
UUIDS_VARIABLE = "FLUSTER_GPU_UUIDS"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
MaskStyle = Literal["index", "uuid"]
MASK_STYLES: tuple[MaskStyle, ...] = ("index", "uuid")
# By default CUDA counts the fastest first, which is another order on a machine with several models.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
NO_GPU = {VISIBLE_VARIABLE: "", **ORDER}


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
