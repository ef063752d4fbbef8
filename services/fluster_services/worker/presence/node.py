"""The machine that a worker is on, for those who look at the cluster."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from fluster_bus.messages.nodes import MAX_NODE_GPUS, NodeGpu, NodeInfo
from fluster_services.worker.gpus.inventory import GpuInventory
from fluster_services.worker.linux.processes import boot_id

_MAX_TEXT = 500  # of what others' programs say


def describe_node(state_dir: Path, gpus: GpuInventory | None = None) -> NodeInfo:
    """What the machine has; `gpus` are those that were found, None before they are looked for."""
    inventory = gpus if gpus is not None else GpuInventory()
    try:
        disk = shutil.disk_usage(state_dir).total
    except OSError:  # it is told by others that the folder cannot be used
        disk = 0
    return NodeInfo(
        machine=boot_id() or "",
        system=f"{platform.system()} {platform.release()} {platform.machine()}"[:_MAX_TEXT],
        cpus=os.cpu_count() or 0,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk=disk,
        gpus=tuple(
            NodeGpu(
                index=gpu.index,
                uuid=gpu.uuid[:_MAX_TEXT],
                model=gpu.model[:_MAX_TEXT],
                memory=gpu.memory_total or 0,
                bus_id=gpu.bus_id[:_MAX_TEXT],
                parent=gpu.parent[:_MAX_TEXT],
                divided=gpu.is_divided,
                fault=gpu.fault[:_MAX_TEXT],
            )
            for gpu in inventory.gpus[:MAX_NODE_GPUS]
        ),
        gpu_driver=inventory.driver[:_MAX_TEXT],
        cuda=inventory.cuda[:_MAX_TEXT],
        gpu_trouble=inventory.trouble[:_MAX_TEXT],
    )
