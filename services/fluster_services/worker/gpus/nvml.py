"""GPUs as NVIDIA's library (NVML) reports them. Its calls may block for ever: a process of its own makes them, see helper.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pynvml

from fluster_services.worker.gpus.inventory import (
    MAX_GPUS,
    MAX_INSTANCES,
    MAX_PROCESSES,
    Gpu,
    GpuPair,
    GpuProcess,
)

NvmlError = pynvml.NVMLError
NO_LIBRARY = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND

T = TypeVar("T")

# After these nothing more is asked of a device. Others, such as "not supported", are about one value.
_FATAL = {
    pynvml.NVML_ERROR_TIMEOUT: "the driver did not answer for it in time: reset it, or restart the machine",
    pynvml.NVML_ERROR_IRQ_ISSUE: "the kernel has trouble with its interrupts: restart the machine",
    pynvml.NVML_ERROR_GPU_IS_LOST: "it has fallen off the bus: restart the machine",
    pynvml.NVML_ERROR_RESET_REQUIRED: "it needs a reset: stop what uses it, and run `nvidia-smi --gpu-reset`",
    pynvml.NVML_ERROR_GPU_NOT_FOUND: "the driver does not find it any more: restart the machine",
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: "it has too little power: see to its power cables",
    pynvml.NVML_ERROR_UNKNOWN: "the driver failed for a reason that it does not know: look into the kernel's log for NVRM",
}
_MIG_ON = 1


class _FaultError(Exception):
    """Nothing more can be read of a device."""


class Nvml:
    """The library, once it is ready. Raises NvmlError when there is no library, no driver, or they do not fit each other."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._pairs: dict[tuple[str, str], GpuPair] = {}  # it does not change while the machine is up
        self._handles: dict[str, object] = {}

    @staticmethod
    def close() -> None:
        with contextlib.suppress(NvmlError):
            pynvml.nvmlShutdown()

    @staticmethod
    def versions() -> tuple[str, str]:
        """The driver's, and the newest of CUDA that it knows."""
        driver = _told(pynvml.nvmlSystemGetDriverVersion)
        cuda = _told(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return driver or "", "" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"

    @staticmethod
    def count() -> int:
        """How many GPUs there are, at most MAX_GPUS. Raises NvmlError."""
        return min(int(pynvml.nvmlDeviceGetCount()), MAX_GPUS)

    def read(self, index: int) -> list[Gpu]:
        """The GPU, and its instances if it is divided. Does not raise: what is wrong with it is its `fault`."""
        known: dict[str, Any] = {"index": index}
        instances: list[Gpu] = []
        try:
            device = _asked(lambda: pynvml.nvmlDeviceGetHandleByIndex(index), is_needed=True)
            for name, value in _values(device):
                known[name] = value  # noqa: PERF403 - what was read before it fails is kept
            if known["uuid"]:
                self._handles[known["uuid"]] = device
            mode = _asked(lambda: pynvml.nvmlDeviceGetMigMode(device))
            known["is_divided"] = mode is not None and mode[0] == _MIG_ON
            if known["is_divided"]:
                instances = list(_instances(device, known))
        except _FaultError as fault:
            known["fault"] = str(fault)
        return [Gpu(**known), *instances]

    def pairs(self, gpus: list[Gpu]) -> list[GpuPair]:
        """How near those of them are to each other that are well, and no instances."""
        uuids = [gpu.uuid for gpu in gpus if gpu.uuid and not gpu.fault and not gpu.parent]
        found = []
        for place, first in enumerate(uuids):
            for second in uuids[place + 1 :]:
                pair = self._pairs.get((first, second)) or self._look(first, second)
                if pair is not None:
                    self._pairs[first, second] = pair
                    found.append(pair)
        return found

    def _look(self, first: str, second: str) -> GpuPair | None:
        one, other = self._handles[first], self._handles[second]
        level = _told(lambda: pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other))
        if level is None:
            return None
        nvlink = _told(lambda: pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK))
        return GpuPair(first, second, int(level), nvlink == pynvml.NVML_P2P_STATUS_OK)


def why_unavailable(error: Any) -> str:
    """What is the matter when the library cannot be made ready, and what helps."""
    remedies = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not found: install NVIDIA's driver",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "NVIDIA's driver is not loaded: run `modprobe nvidia`, or install the driver",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "NVIDIA's driver was updated while it was loaded: restart the machine",
        pynvml.NVML_ERROR_NO_PERMISSION: "the user of the worker may not read /dev/nvidiactl: give it access",
    }
    return remedies.get(error.value) or f"NVIDIA's library cannot be used: {_words(error)}"


def _values(device: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a device, one after the other. Raises _FaultError."""
    yield "uuid", _asked(lambda: pynvml.nvmlDeviceGetUUID(device)) or ""
    yield "model", _asked(lambda: pynvml.nvmlDeviceGetName(device)) or ""
    pci = _asked(lambda: pynvml.nvmlDeviceGetPciInfo(device))
    yield "bus_id", _text(pci.busId) if pci is not None else ""
    memory = _asked(lambda: _memory(device))
    yield "memory_total", None if memory is None else int(memory.total)
    yield "memory_used", None if memory is None else int(memory.used)
    rates = _asked(lambda: pynvml.nvmlDeviceGetUtilizationRates(device))
    yield "utilization", None if rates is None else int(rates.gpu)
    yield "temperature", _asked(lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU))
    milliwatts = _asked(lambda: pynvml.nvmlDeviceGetPowerUsage(device))
    yield "power", None if milliwatts is None else milliwatts / 1000
    yield (
        "uncorrected_errors",
        _asked(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                device, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        ),
    )
    yield "processes", _processes(device)


def _memory(device: object) -> Any:
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
    except NvmlError as error:
        if error.value not in {pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH}:
            raise
    return pynvml.nvmlDeviceGetMemoryInfo(device)  # of drivers before 510; it counts what the driver keeps as used


def _processes(device: object) -> tuple[GpuProcess, ...] | None:
    """Those that compute, and those that draw; a process may do both."""
    found: dict[int, GpuProcess] = {}
    is_told = False
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        running = _asked(lambda ask=ask: ask(device))  # type: ignore[misc]
        is_told |= running is not None
        for each in running or ():
            found[each.pid] = GpuProcess(int(each.pid), None if each.usedGpuMemory is None else int(each.usedGpuMemory))
    return tuple(sorted(found.values(), key=lambda each: each.pid)[:MAX_PROCESSES]) if is_told else None


def _instances(device: Any, parent: dict[str, Any]) -> Iterator[Gpu]:
    count = _asked(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(device)) or 0
    for index in range(min(int(count), MAX_INSTANCES)):
        instance = _asked(lambda index=index: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index))  # type: ignore[misc]
        if instance is None:  # places of instances may be empty
            continue
        known = dict(_values(instance))
        yield Gpu(index=index, parent=parent["uuid"], **{**known, "bus_id": parent["bus_id"]})


def _asked(ask: Callable[[], T], *, is_needed: bool = False) -> T | None:
    """What the library answers; None when it does not tell. Raises _FaultError when the device is of no use any more."""
    try:
        answer = ask()
    except NvmlError as error:
        if error.value in _FATAL:
            raise _FaultError(f"{_FATAL[error.value]} ({_words(error)})") from error
        if is_needed:
            raise _FaultError(f"the driver refuses it: {_words(error)}") from error
        return None
    return _text(answer) if isinstance(answer, bytes) else answer  # type: ignore[return-value]


def _told(ask: Callable[[], T]) -> T | None:
    try:
        return _asked(ask)
    except _FaultError:
        return None


def _words(error: Any) -> str:
    return f"NVML error {error.value}, {error}"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
