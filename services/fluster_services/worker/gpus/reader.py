"""Reads this machine's GPUs, however badly they are: within a time limit, and without a thread of this process in the driver."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace

from fluster.json_lines import JsonLineStream
from fluster_bus.core.json_types import JsonObject
from fluster_services.worker.gpus import nvidia_smi
from fluster_services.worker.gpus.inventory import MAX_GPUS, Gpu, GpuInventory, GpuPair, gpu_from_json

_LIBRARY = "libnvidia-ml.so.1"
_DEVICE_S = 5.0  # for all values of one GPU
_START_S = 30.0  # until a helper knows how many there are: without persistence mode it wakes the driver first
_MAX_LINE_BYTES = 1 << 20
_COMPLAINT = 500  # characters
_MOST_STUCK = 2  # helpers that the driver does not let go of: they cannot be killed either


class GpuReader:
    """Reads GPUs by a helper process, which it keeps. `device_s` and `start_s` bound how long it waits for the driver."""

    def __init__(self, *, device_s: float = _DEVICE_S, start_s: float = _START_S) -> None:
        self._device_s = device_s
        self._start_s = start_s
        self._helper: asyncio.subprocess.Process | None = None
        self._connection: JsonLineStream | None = None  # to the helper
        self._stuck: list[asyncio.subprocess.Process] = []
        self._turn = asyncio.Lock()

    @property
    def helper_pid(self) -> int | None:
        """The helper's process; None before the first reading, and when it has ended."""
        return self._helper.pid if self._helper is not None and self._helper.returncode is None else None

    async def read(self) -> GpuInventory:
        """All GPUs. What cannot be read is reported in the inventory's `trouble` and in each GPU's `fault`; nothing is raised."""
        async with self._turn:
            return await self._read()

    async def _read(self) -> GpuInventory:
        if importlib.util.find_spec("pynvml") is not None and _has_library():
            inventory = await self._by_nvml()
            if inventory is not None:
                return inventory
        if shutil.which(nvidia_smi.LIST[0]) is not None:
            return await self._by_nvidia_smi()
        return GpuInventory()

    async def close(self) -> None:
        """End the helper."""
        if self._helper is not None:
            await self._end(self._helper)
            self._helper = None

    # ---- by the library ---------------------------------------------------------------------------------

    async def _by_nvml(self) -> GpuInventory | None:
        """None when the helper does not find the library."""
        gpus: dict[int, list[Gpu]] = {}
        hung: dict[int, Gpu] = {}  # they are left out the next time
        reading = _Reading(gpus, left_out=[])
        for _ in range(_MOST_STUCK):
            reading = _Reading(gpus, left_out=sorted(hung))
            try:
                await self._ask(reading)
            except TimeoutError:
                await self._drop()
                if reading.current is None or reading.current in hung:
                    return reading.inventory(
                        f"NVIDIA's driver did not answer within {self._start_s:g} s: restart the machine"
                    )
                fault = (
                    f"the driver did not answer for it within {self._device_s:g} s: reset it, or restart the machine"
                )
                hung[reading.current] = Gpu(index=reading.current, fault=fault)
                gpus[reading.current] = [hung[reading.current]]
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                await self._drop()
                return reading.inventory(f"the helper that reads GPUs ended: {error!r}")
            except BaseException:  # cancelled: what it still says would be taken for its next answer
                await self._drop()
                raise
            if reading.end.get("no_library"):
                await self._drop()
                return None
            return reading.inventory(str(reading.end.get("trouble", "")))
        return reading.inventory("NVIDIA's driver hangs at several GPUs: restart the machine")

    async def _ask(self, reading: _Reading) -> None:
        """Have a helper read what is not left out. Raises TimeoutError, OSError, ValueError."""
        helper, connection = await self._running()
        connection.send(reading.left_out)
        await connection.drain()
        while not reading.end:
            async with asyncio.timeout(self._start_s if reading.count is None else self._device_s):
                said = await connection.receive()
            if said is None:
                raise OSError(f"it said nothing more (exit code {helper.returncode})")
            reading.on_said(said)

    async def _running(self) -> tuple[asyncio.subprocess.Process, JsonLineStream]:
        if self._helper is None or self._connection is None or self._helper.returncode is not None:
            self._stuck = [each for each in self._stuck if each.returncode is None]
            if len(self._stuck) >= _MOST_STUCK:
                pids = ", ".join(str(each.pid) for each in self._stuck)
                raise OSError(f"processes {pids} hang in NVIDIA's driver and cannot be ended: restart the machine")
            self._helper = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "fluster_services.worker.gpus.helper",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the worker, which closes it
            )
            assert self._helper.stdin is not None and self._helper.stdout is not None  # noqa: S101, PT018 - they are pipes
            self._connection = JsonLineStream(self._helper.stdout, self._helper.stdin, _MAX_LINE_BYTES)
        return self._helper, self._connection

    async def _drop(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None:
            await self._end(helper)

    async def _end(self, helper: asyncio.subprocess.Process) -> None:
        """Kill it. One that hangs in the driver ends when the driver lets go of it."""
        if helper.returncode is None:
            helper.kill()
            try:
                async with asyncio.timeout(1.0):
                    await helper.wait()
            except TimeoutError:
                self._stuck.append(helper)

    # ---- by the program ---------------------------------------------------------------------------------

    async def _by_nvidia_smi(self) -> GpuInventory:
        try:
            status, gpus = await self._printed(nvidia_smi.QUERY_GPUS)
        except (OSError, TimeoutError) as error:
            return GpuInventory(source="nvidia-smi", trouble=str(error))
        others = []
        for command in (nvidia_smi.QUERY_PROCESSES, nvidia_smi.LIST):
            try:
                others.append((await self._printed(command))[1])
            except (OSError, TimeoutError):  # what only they tell is missing
                others.append("")
        inventory = nvidia_smi.parse(gpus, *others)
        said = gpus.strip()[:_COMPLAINT]
        return replace(inventory, trouble=f"nvidia-smi: exit code {status}: {said}") if status else inventory

    async def _printed(self, command: tuple[str, ...]) -> tuple[int, str]:
        """Its exit code, and what it printed. Raises OSError or TimeoutError, with the text for the log."""
        self._stuck = [each for each in self._stuck if each.returncode is None]
        if len(self._stuck) >= _MOST_STUCK:
            raise OSError("runs of nvidia-smi hang in NVIDIA's driver and cannot be ended: restart the machine")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            async with asyncio.timeout(self._start_s):
                printed, complaint = await process.communicate()
        except TimeoutError as error:
            raise TimeoutError(f"nvidia-smi did not end within {self._start_s:g} s: restart the machine") from error
        finally:
            await self._end(process)
        return process.returncode or 0, (printed or complaint).decode(errors="replace")


class _Reading:
    """What a helper has said so far. `gpus` are those that are known: {index: the GPU and its instances}."""

    def __init__(self, gpus: dict[int, list[Gpu]], *, left_out: list[int]) -> None:
        self._gpus = gpus
        self.left_out = left_out
        self.count: int | None = None
        self.current: int | None = None  # the GPU that is being read
        self.end: JsonObject = {}
        self._driver = self._cuda = ""

    def on_said(self, said: JsonObject) -> None:
        if "count" in said:
            self.count = min(int(said["count"]), MAX_GPUS)
            self._driver, self._cuda = str(said["driver"]), str(said["cuda"])
        elif "begin" in said:
            self.current = int(said["begin"])
        elif "gpus" in said and self.current is not None:
            self._gpus[self.current] = [gpu_from_json(each) for each in said["gpus"]]
        elif "end" in said:
            self.end = {"trouble": "", **said["end"]}

    def inventory(self, trouble: str) -> GpuInventory:
        gpus = tuple(gpu for index in sorted(self._gpus) for gpu in self._gpus[index])
        pairs = tuple(GpuPair(**each) for each in self.end.get("pairs", ()))
        return GpuInventory("nvml", gpus, pairs, self._driver, self._cuda, trouble)


def _has_library() -> bool:
    """Whether it can be loaded, which calls nothing in it."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def with_visible(inventory: GpuInventory, visible: str | None) -> GpuInventory:
    """The same with those alone that CUDA_VISIBLE_DEVICES names, in its order: by index, or by the beginning of a UUID.

    As CUDA has it: nothing counts after a name that fits no GPU, and none is visible when one is named twice.
    """
    if visible is None:
        return inventory
    chosen: list[Gpu] = []
    for name in (each.strip() for each in visible.split(",")):
        found = [gpu for gpu in inventory.gpus if is_named(gpu, name)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return replace(inventory, gpus=())
        chosen += found
    return replace(inventory, gpus=tuple(chosen))


def is_named(gpu: Gpu, name: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES means the GPU by this name."""
    if name.isdecimal():
        return not gpu.parent and gpu.index == int(name)
    return name.startswith(("GPU-", "MIG-")) and gpu.uuid.lower().startswith(name.lower())
