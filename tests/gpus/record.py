"""`python -m tests.gpus.record`: how NVIDIA's library answers each call that the stand-in imitates, as JSON.

On a machine with one GPU it is what the stand-in is held against. UUIDs are replaced, and what changes by itself is left out.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pynvml

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MADE_UP = "00000000-1111-2222-3333-444444444444"
_CHANGING = {"free", "used", "pid"}


def answers() -> dict[str, Any]:
    """{call: its value, or the number and words of its error}, one after the other."""
    said: dict[str, Any] = {}

    def ask(name: str, call: Callable[[], Any]) -> Any:
        try:
            value = call()
        except pynvml.NVMLError as error:
            said[name] = {"error": error.value, "words": str(error)}
            return None
        said[name] = {"value": _plain(value)}
        return value

    ask("count before init", pynvml.nvmlDeviceGetCount)
    ask("init", pynvml.nvmlInit)
    for name in ("SystemGetDriverVersion", "SystemGetNVMLVersion", "SystemGetCudaDriverVersion_v2", "DeviceGetCount"):
        ask(name, getattr(pynvml, f"nvml{name}"))
    ask("DeviceGetHandleByIndex, of none", lambda: pynvml.nvmlDeviceGetHandleByIndex(99))
    ask("DeviceGetHandleByUUID, of none", lambda: pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{MADE_UP[:-1]}5".encode()))
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    for name in (
        *("UUID", "Name", "Index", "PciInfo", "MemoryInfo", "EccMode", "MigMode", "MaxMigDeviceCount"),
        *("ComputeRunningProcesses", "GraphicsRunningProcesses"),
    ):
        ask(f"DeviceGet{name}", lambda name=name: getattr(pynvml, f"nvmlDeviceGet{name}")(device))  # type: ignore[misc]
    for name in ("UtilizationRates", "PowerUsage"):
        ask(f"DeviceGet{name}", lambda name=name: getattr(pynvml, f"nvmlDeviceGet{name}")(device) and None)  # type: ignore[misc]
    ask("DeviceGetTemperature", lambda: pynvml.nvmlDeviceGetTemperature(device, pynvml.NVML_TEMPERATURE_GPU) and None)
    for version in (pynvml.nvmlMemory_v2, 0x01000028):
        ask(
            f"DeviceGetMemoryInfo {version:#x}",
            lambda version=version: pynvml.nvmlDeviceGetMemoryInfo(device, version),  # type: ignore[misc]
        )
    for kind in (0, 1):
        ask(f"DeviceGetTotalEccErrors {kind}", lambda kind=kind: pynvml.nvmlDeviceGetTotalEccErrors(device, kind, 0))  # type: ignore[misc]
    for place in (0, 7):
        ask(
            f"DeviceGetMigDeviceHandleByIndex {place}",
            lambda place=place: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, place),  # type: ignore[misc]
        )
    ask("DeviceGetTopologyCommonAncestor", lambda: pynvml.nvmlDeviceGetTopologyCommonAncestor(device, device))
    ask("DeviceGetP2PStatus", lambda: pynvml.nvmlDeviceGetP2PStatus(device, device, 2))
    for code in (*range(40), 999, 12345):
        ask(f"ErrorString {code}", lambda code=code: pynvml.nvmlErrorString(code))  # type: ignore[misc]
    ask("shutdown", pynvml.nvmlShutdown)
    ask("count after shutdown", pynvml.nvmlDeviceGetCount)
    ask("shutdown again", pynvml.nvmlShutdown)
    return said


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str):
        return _UUID.sub(MADE_UP, value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if hasattr(value, "_fields_"):
        return {name: _plain(getattr(value, name)) for name, *_ in value._fields_ if name not in _CHANGING}
    if hasattr(value, "__dict__"):
        return {name: _plain(each) for name, each in vars(value).items() if name not in _CHANGING}
    return value


if __name__ == "__main__":
    json.dump(answers(), sys.stdout, indent=1)
    print()
