"""What this machine has, as far as it is not given by hand."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from fluster_bus.access.address import BusAddress
from fluster_bus.core.devices import VISIBLE_DEVICES, Devices
from fluster_bus.messages import Capacity
from fluster_bus.messages.nodes import MAX_NODE_GPUS, NodeGpu, NodeInfo
from fluster_bus.messages.parts.counted import as_counts
from fluster_bus.messages.parts.resources import as_words
from fluster_bus.running.fence_clock import boot_id
from fluster_services.config import CacheLimits
from fluster_services.worker.environments.folder_cache import stored_bytes
from fluster_services.worker.gpus.inventory import GpuInventory
from fluster_services.worker.gpus.reader import GpuReader, with_visible

log = logging.getLogger(__name__)

_GEFORCE = re.compile(r"\b(rtx|gtx)\s*(\d{3,4})\s*(ti|super)?\b")
_MODEL = re.compile(r"\b([a-z]{1,2}\d{1,4}[a-z]?)\b")
_MAX_TEXT = 500  # of what others' programs say


@dataclass(frozen=True)
class CapacityOverrides:
    """What is given by hand; the rest is detected."""

    cpu: float | None = None
    memory: int | None = None  # bytes
    disk: int | None = None
    devices: Devices | None = None
    tasks: int | None = None  # at once; None: as many as have room
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


def detect(overrides: CapacityOverrides, state_dir: Path, caches: CacheLimits) -> tuple[Capacity, Devices]:
    """The machine's capacity, and its devices."""
    devices = overrides.devices if overrides.devices is not None else detect_gpus()
    total = Capacity(
        cpu=overrides.cpu if overrides.cpu is not None else _cpus(),
        memory=overrides.memory
        if overrides.memory is not None
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk=overrides.disk if overrides.disk is not None else free_disk(state_dir, caches),
        device=devices.kind,
        variant=devices.variant,
        devices=len(devices.ids),
        other_devices=devices.other_counts,
        tasks=overrides.tasks,
        labels=as_words(overrides.labels),
        resources=as_counts(overrides.resources),
    )
    return total, devices


def _cpus() -> float:
    return float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def free_disk(state_dir: Path, caches: CacheLimits) -> int:
    """What is free where tasks run, without what the caches may still grow by."""
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    growth = max(0, caches.workspaces_bytes - stored_bytes(state_dir / "workspaces"))
    growth += max(0, caches.environments_bytes - stored_bytes(state_dir / "environments"))
    return max(0, shutil.disk_usage(state_dir).free - growth)


def detect_gpus() -> Devices:
    """The GPUs that NVIDIA's driver has, of those that CUDA_VISIBLE_DEVICES leaves; none without it."""
    return asyncio.run(find_gpus())


async def find_gpus() -> Devices:
    """The same for a process that serves meanwhile."""
    return offered_gpus(await read_gpus(), os.environ.get(VISIBLE_DEVICES["gpu"]))


async def read_gpus() -> GpuInventory:
    """This machine's GPUs, all of them, however they are."""
    reader = GpuReader()
    try:
        return await reader.read()
    finally:
        await reader.close()


def offered_gpus(inventory: GpuInventory, visible: str | None) -> Devices:
    """Those that tasks can be given, and CUDA_VISIBLE_DEVICES (`visible`) leaves: of the most frequent model, and the others.

    Their ids are UUIDs, or indices where the driver does not tell those. What is wrong with the others is logged.
    """
    if inventory.trouble:
        log.warning("GPUs could not be read: %s; give them by hand with FLUSTER_GPUS=MODEL:COUNT", inventory.trouble)
    for gpu in inventory.gpus:
        if gpu.fault:
            log.warning("GPU %d %s is not offered: %s", gpu.index, gpu.uuid or "(UUID unknown)", gpu.fault)
    usable = with_visible(inventory, visible).usable
    models = [gpu_variant(gpu.model) for gpu in usable]
    if not usable:
        return Devices()
    ids: dict[str, list[str]] = {}
    for gpu, model in zip(usable, models, strict=True):
        ids.setdefault(model, []).append(gpu.uuid or str(gpu.index))
    first, *others = sorted(ids, key=lambda each: (len(ids[each]), each), reverse=True)
    rest = tuple(Devices("gpu", each, tuple(ids[each])) for each in others)
    return Devices("gpu", first, tuple(ids[first]), rest)


def gpu_variant(name: str) -> str:
    """`h100` of `NVIDIA H100 80GB HBM3`, `rtx4090` of `NVIDIA GeForce RTX 4090`, `a100-1g-5gb` of an instance `MIG 1g.5gb`."""
    text, _, profile = name.lower().partition(" mig ")
    if profile:  # a task that asks for a whole one must not be given a part
        return f"{gpu_variant(text)}-{re.sub(r'[^a-z0-9]+', '-', profile).strip('-')}"
    consumer = _GEFORCE.search(text)
    if consumer is not None:
        return "".join(part for part in consumer.groups() if part)
    model = _MODEL.search(text)
    return model[1] if model is not None else re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def detect_host(address: BusAddress) -> str:
    """How other machines reach this one: by the address from which it reaches the bus, or by name when that is itself."""
    server = urlsplit(address.servers[0])
    try:
        family, _, _, _, target = socket.getaddrinfo(server.hostname, server.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing, only looks up the way
            host = str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    return socket.gethostname() if host == "::1" or host.startswith("127.") else host


def describe_node(
    state_dir: Path, gpus: GpuInventory | None = None, withheld: Mapping[str, str] = MappingProxyType({})
) -> NodeInfo:
    """What the machine has; `gpus` are those that were found, None before they are looked for, and `withheld` why tasks are not
    given some, by UUID.
    """
    inventory = gpus if gpus is not None else GpuInventory()
    try:
        disk = shutil.disk_usage(state_dir).total
    except OSError:  # others report that the folder cannot be used
        disk = 0
    return NodeInfo(
        machine=boot_id(),
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
                withheld=withheld.get(gpu.uuid, "")[:_MAX_TEXT],
            )
            for gpu in inventory.gpus[:MAX_NODE_GPUS]
        ),
        gpu_driver=inventory.driver[:_MAX_TEXT],
        cuda=inventory.cuda[:_MAX_TEXT],
        gpu_trouble=inventory.trouble[:_MAX_TEXT],
    )
