"""GPUs as the program nvidia-smi lists them, for machines without the binding of NVIDIA's library. It tells less: no nearness."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from fluster_services.worker.gpus.inventory import MAX_GPUS, MAX_PROCESSES, Gpu, GpuInventory, GpuProcess

_FIELDS = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
    "driver_version",
)
_FORMAT = "--format=csv,noheader,nounits"
QUERY_GPUS = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", _FORMAT)
QUERY_PROCESSES = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", _FORMAT)
LIST = ("nvidia-smi", "-L")  # the only place where it tells instances' UUIDs
_MIB = 1 << 20
_FAULTS = ("GPU is lost", "GPU requires reset", "Unknown Error", "Unable to determine")


def parse(gpus: str, processes: str, listed: str) -> GpuInventory:
    """The inventory in what the three commands above printed. Lines that say something else are left out."""
    running = _running(processes)
    instances = _instances(listed)
    found: list[Gpu] = []
    driver = ""
    for row in _rows(gpus):
        if len(row) != len(_FIELDS) or not row[0].isdecimal() or len(found) >= MAX_GPUS:
            continue
        (index, uuid, model, bus_id, total, used, utilization, temperature, power, errors, mig, driver) = row
        fault = next((text for text in row[1:] for words in _FAULTS if words.lower() in text.lower()), "")
        known = _uuid(uuid)
        memory_total = _size(total)
        found.append(
            Gpu(
                index=int(index),
                uuid=known,
                model="" if _is_missing(model) else model,
                bus_id="" if _is_missing(bus_id) else bus_id,
                memory_total=memory_total,
                memory_used=_size(used),
                utilization=_whole(utilization),
                temperature=_whole(temperature),
                power=_number(power),
                uncorrected_errors=_whole(errors),
                processes=running.get(known, ()),
                is_divided=mig == "Enabled",
                fault=f"nvidia-smi says: {fault}" if fault else "",
            )
        )
        found += [
            Gpu(index=place, uuid=uuid, model=f"{model} MIG {profile}", bus_id=bus_id, parent=known)
            for place, profile, uuid in instances.get(known, ())
        ]
    return GpuInventory(source="nvidia-smi", gpus=tuple(found), driver=driver)


def _rows(text: str) -> Iterator[Sequence[str]]:
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        yield [each.strip() for each in row]


def _running(text: str) -> dict[str, tuple[GpuProcess, ...]]:
    """{UUID: processes}"""
    found: dict[str, list[GpuProcess]] = {}
    for row in _rows(text):
        if len(row) == 3 and row[1].isdecimal():
            on_gpu = found.setdefault(row[0], [])
            if len(on_gpu) < MAX_PROCESSES:
                on_gpu.append(GpuProcess(int(row[1]), _size(row[2])))
    return {uuid: tuple(each) for uuid, each in found.items()}


def _instances(listed: str) -> dict[str, list[tuple[int, str, str]]]:
    """{UUID of a divided GPU: (place, profile, UUID) of its instances}, of lines such as

    GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f)
      MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
    """
    found: dict[str, list[tuple[int, str, str]]] = {}
    parent = ""
    for line in listed.splitlines():
        words = line.split()
        if len(words) < 4 or "(UUID:" not in words:
            continue
        uuid = words[-1].rstrip(")")
        if words[0] == "GPU":
            parent = uuid
        elif words[0] == "MIG" and words[-3].rstrip(":").isdecimal():
            found.setdefault(parent, []).append((int(words[-3].rstrip(":")), words[1], uuid))
    return found


def _is_missing(text: str) -> bool:
    return text.startswith("[") or text in {"", "N/A"}


def _uuid(text: str) -> str:
    return text if text.startswith(("GPU-", "MIG-")) else ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # [N/A], [Not Supported], [GPU is lost]
        return None


def _whole(text: str) -> int | None:
    value = _number(text)
    return None if value is None else int(value)


def _size(text: str) -> int | None:
    value = _number(text)
    return None if value is None else int(value * _MIB)
