"""The VMs of one backend: who they are, how large each is and which GPUs are its own, how far it is, who waits for one."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core.devices import ANY_MODEL, Devices, parse_gpus, visible_ids
from fluster_bus.core.errors import BusError
from fluster_bus.core.names import check_name, check_namespace, near, unique_name
from fluster_bus.messages import Capacity, Namespace, WorkerId, WorkerInfo, parse_size
from fluster_bus.messages.parts.resources import as_words, check_labels
from fluster_bus.storage.feeds import CaughtUp
from fluster_bus.storage.streams import workers_table
from fluster_bus.storage.tables import Deleted, Row
from fluster_services.cluster_files import open_private
from fluster_services.vm.backend import (
    ClusterToJoin,
    UnknownVMError,
    VMError,
    VMFailedError,
    VMInfo,
    VMStatus,
    VMTimeoutError,
)
from fluster_services.worker.contract.faults import LaunchError
from fluster_services.worker.engine import asked

log = logging.getLogger(__name__)


class Machine(Protocol):
    """One machine of a backend. Both methods block, and are called in threads."""

    def run(self, write: Callable[[bytes], None]) -> int:
        """Have it run; its exit code when it is over, and all of its output was written. Raises VMError, LaunchError."""

    def stop(self) -> None:
        """End it, also before `run` has come far, and return when nothing of it is left. Raises VMError, LaunchError."""


@dataclass
class _VM:
    """A VM that was allocated and is not released."""

    vm_id: WorkerId
    resources: Capacity
    machine: Machine
    output: Output
    status: VMStatus = VMStatus.BOOTING
    exit_code: int | None = None
    message: str = ""
    booted: asyncio.Event = field(default_factory=asyncio.Event)  # or over
    over: asyncio.Event = field(default_factory=asyncio.Event)
    life: asyncio.Task[None] | None = None
    is_leaving: bool = False  # it is being released: its worker may be heard to leave before that is done

    def info(self) -> VMInfo:
        return VMInfo(
            vm_id=self.vm_id,
            status=self.status,
            resources=self.resources,
            exit_code=self.exit_code,
            message=self.message,
        )

    def become_ready(self) -> None:
        if not self.over.is_set():
            self.status = VMStatus.READY
            self.booted.set()

    def end(self, status: VMStatus, message: str) -> None:
        if not self.over.is_set():
            self.status, self.message = (VMStatus.STOPPED, "it was released") if self.is_leaving else (status, message)
        self.booted.set()
        self.over.set()


def served_namespaces(given: Sequence[str] | None) -> tuple[Namespace, ...] | None:
    """The namespaces of a backend, each once. Raises InvalidNameError, ValueError."""
    if given is None:
        return None
    if isinstance(given, str) or not given:
        raise ValueError(
            f"namespaces={given!r}: give a list of one namespace at least, or leave it out for all of the cluster"
        )
    return tuple(dict.fromkeys(Namespace(check_namespace(each)) for each in given))


class Fleet(ABC):
    """What all backends of this package have in common: all but how a machine is made."""

    def __init__(self, namespaces: Sequence[str] | None = None) -> None:
        """`namespaces` are those whose jobs the VMs run; without them all of the cluster."""
        self._namespaces = served_namespaces(namespaces)
        self._cluster: ClusterToJoin | None = None
        self._vms: dict[WorkerId, _VM] = {}
        self._released: set[WorkerId] = set()

    @abstractmethod
    def _sized(self, resources: Capacity, device_ids: tuple[str, ...]) -> Capacity:
        """What a VM gets that is asked for with these resources, and has these devices. Raises VMError."""

    @abstractmethod
    async def _prepare(self) -> None:
        """Have ready what all machines need. Raises VMError, LaunchError."""

    @abstractmethod
    def _machine(
        self, cluster: ClusterToJoin, vm_id: WorkerId, resources: Capacity, device_ids: tuple[str, ...]
    ) -> Machine:
        """A machine that is not there yet, with these of this machine's devices."""

    def _with_devices(
        self, cluster: ClusterToJoin, vm_id: WorkerId, resources: Capacity
    ) -> tuple[Capacity, tuple[str, ...]]:
        """What was asked for with the devices that are usual, and the ids of all that the VM has. Raises VMError."""
        return resources, cluster.device_ids.get(vm_id, ())

    async def open(self, cluster: ClusterToJoin) -> None:
        if self._cluster is not None:
            raise VMError("this backend serves a cluster already: close it first, or make another")
        self._cluster = replace(cluster, job_credentials=self._served(cluster))

    def _served(self, cluster: ClusterToJoin) -> Mapping[Namespace, BusAddress]:
        """The credentials that VMs are given for jobs: of no other namespace than those that they serve. Raises VMError."""
        if self._namespaces is None:
            return cluster.job_credentials
        strange = [name for name in self._namespaces if name not in cluster.job_credentials]
        if strange:
            raise VMError(
                f"namespaces={list(self._namespaces)!r}, and the cluster has no {', '.join(strange)}: it has "
                f"{', '.join(sorted(cluster.job_credentials))}"
            )
        return {name: cluster.job_credentials[name] for name in self._namespaces}

    async def close(self) -> None:
        ends = await asyncio.gather(*(self.release(vm_id) for vm_id in list(self._vms)), return_exceptions=True)
        self._cluster = None
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def allocate(self, resources: Capacity | None = None, *, vm_id: WorkerId | None = None) -> VMInfo:
        cluster = self._opened()
        chosen = vm_id or WorkerId(unique_name("vm"))
        check_name("VM id", chosen)  # a part of subjects, of a file's name, and of a container's
        if chosen in self._vms:
            raise VMError(f"there is a VM {chosen!r} already: release it, or choose another id")
        asked_for, device_ids = self._with_devices(cluster, chosen, resources or Capacity())
        sized = self._sized(asked_for, device_ids)
        output = Output(cluster.log_dir and cluster.log_dir / f"{chosen}.log")
        vm = _VM(chosen, sized, self._machine(cluster, chosen, sized, device_ids), output)
        self._vms[chosen] = vm
        self._released.discard(chosen)
        vm.life = asyncio.create_task(self._live(vm, cluster.bus))
        return vm.info()

    async def release(self, vm_id: WorkerId) -> None:
        cluster = self._opened()
        if vm_id in self._released:
            return
        vm = self._known(vm_id)
        vm.is_leaving = True
        try:
            await asked(vm.machine.stop)
        except LaunchError as cause:
            vm.is_leaving = False
            raise VMError(f"VM {vm_id!r} could not be released: {cause}") from cause
        if self._vms.get(vm_id) is not vm:  # it was released meanwhile
            return
        del self._vms[vm_id]
        self._released.add(vm_id)
        if vm.life is not None:
            vm.life.cancel()
            await asyncio.wait({vm.life})
        vm.end(VMStatus.STOPPED, "it was released")
        vm.output.close()
        await _forget(cluster.bus, vm_id)

    async def get_status(self, vm_id: WorkerId) -> VMInfo:
        self._opened()
        return self._known(vm_id).info()

    async def list_vms(self) -> list[VMInfo]:
        self._opened()
        return [vm.info() for vm in self._vms.values()]

    async def wait_ready(self, vm_id: WorkerId, timeout_s: float = 300.0) -> VMInfo:
        self._opened()
        vm = self._known(vm_id)
        try:
            async with asyncio.timeout(timeout_s):
                await vm.booted.wait()
        except TimeoutError as cause:
            words = vm.output.last_words()
            raise VMTimeoutError(
                f"VM {vm_id!r} was not ready within {timeout_s:g} s; its last words: {words or 'none'}"
            ) from cause
        if vm.over.is_set():
            raise VMFailedError(f"VM {vm_id!r} is not ready: {vm.message or 'its worker has left'}")
        return vm.info()

    async def wait_over(self, vm_id: WorkerId) -> VMInfo:
        self._opened()
        vm = self._known(vm_id)
        await vm.over.wait()
        return vm.info()

    # ---- one VM's life ----------------------------------------------------------------------------------

    async def _live(self, vm: _VM, bus: Bus) -> None:
        try:
            await self._prepare()
            code = await _run(vm, bus)
        except (LaunchError, VMError, BusError) as error:
            vm.end(VMStatus.FAILED, str(error))
        except Exception as error:
            log.exception("VM %s is given up", vm.vm_id)
            vm.end(VMStatus.FAILED, f"{type(error).__name__}: {error}")
        else:
            vm.exit_code = code
            vm.end(VMStatus.FAILED if code else VMStatus.STOPPED, _told(code, vm.output.last_words()))

    # ---- who there is -----------------------------------------------------------------------------------

    def _opened(self) -> ClusterToJoin:
        if self._cluster is None:
            raise VMError("this backend serves no cluster: call open() first")
        return self._cluster

    def _known(self, vm_id: WorkerId) -> _VM:
        if vm_id in self._vms:
            return self._vms[vm_id]
        if vm_id in self._released:
            raise UnknownVMError(f"VM {vm_id!r} was released")
        raise UnknownVMError(f"there is no VM {vm_id!r}{near(vm_id, self._vms)}")


def _told(code: int, last_words: str) -> str:
    if code == 0:
        return ""
    how = f"signal {code - 128} killed it" if code > 128 else f"it ended with exit code {code}"
    return f"{how}; its last words: {last_words}" if last_words else how


async def _run(vm: _VM, bus: Bus) -> int:
    async with aclosing(workers_table(bus).watch(vm.vm_id)) as changes:
        async for change in changes:
            if isinstance(change, CaughtUp):
                break  # what is there is of an earlier worker of that name
        registered = asyncio.create_task(_see_registered(changes, vm))
        try:
            return await asked(vm.machine.run, vm.output.write)
        finally:
            registered.cancel()
            (end,) = await asyncio.gather(registered, return_exceptions=True)
            if isinstance(end, BusError):
                log.warning("whether %s has registered is not known: %s", vm.vm_id, end)


async def _see_registered(changes: AsyncGenerator[Row[WorkerInfo] | Deleted | CaughtUp], vm: _VM) -> None:
    async for change in changes:
        if isinstance(change, Row):
            vm.become_ready()
            return


async def _forget(bus: Bus, vm_id: WorkerId) -> None:
    """A worker will not be heard again: no request waits for it."""
    try:
        await workers_table(bus).delete(vm_id)
    except BusError as error:
        log.info("that %s is gone is not in the table of workers: %s", vm_id, error)


_TAIL_BYTES = 4_000
_WORDS_LINES, _WORDS_CHARS = 3, 600
_FILE_BYTES = 10 << 20  # then it is set aside, and the one before it dropped


class Output:
    """Written by one thread, read by others."""

    def __init__(self, file: Path | None) -> None:
        self._path = file
        self._file: BinaryIO | None = None
        self._tail = b""
        self._is_closed = False
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Take in what the VM wrote."""
        with self._lock:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            if self._path is None or self._is_closed:
                return
            if self._file is None:
                self._file = open(self._path, "ab", opener=open_private)  # noqa: SIM115 - Path.open takes no opener; closed by `close`
            self._file.write(data)
            self._file.flush()
            if self._file.tell() >= _FILE_BYTES:
                self._file.close()
                self._file = None
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))

    def last_words(self) -> str:
        """The last lines, as one line."""
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_WORDS_LINES:])[-_WORDS_CHARS:]

    def close(self) -> None:
        """Keep no file open; what comes yet is not written there."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()
                self._file = None


def usual_size(
    cpus: float, memory: int | str, *, disk: int | str | None = None, labels: Mapping[str, str] | None = None
) -> Capacity:
    """The size of a VM for which none was asked. Raises ValueError."""
    if isinstance(cpus, bool) or not isinstance(cpus, int | float) or not 0 < cpus < math.inf:
        raise ValueError(f"cpus={cpus!r}: give a number of CPUs above 0, for each VM")
    size = parse_size(memory)
    if size <= 0:
        raise ValueError(f"memory={memory!r}: give what each VM has, such as '4GB'")
    try:
        room = parse_size(disk) if disk is not None else 0
    except ValueError as error:
        raise ValueError(f"disk={disk!r}: {error}") from error
    try:
        words = as_words(check_labels(labels or {}))
    except ValueError as error:
        raise ValueError(f"labels={labels!r}: {error}") from error
    return Capacity(cpu=cpus, memory=size, disk=room, labels=words)


def sized(asked: Capacity, usual: Capacity, device_ids: Sequence[str] = ()) -> Capacity:
    """What a VM gets for which these resources are asked. Raises VMError for what these backends do not give.

    Disk is the machine's own: it is counted, as CPUs of workers on this machine are, and not enforced.
    """
    if asked.devices != len(device_ids):
        known = f"{len(device_ids)} of this machine's were set aside for it" if device_ids else "these VMs have none"
        raise VMError(f"a VM with {asked.devices} {asked.device} devices was asked for: {known}")
    missing = ("cpu", "memory", "disk", "labels")
    return asked.model_copy(update={name: getattr(asked, name) or getattr(usual, name) for name in missing})


class GpuStock:
    """Gives each VM the GPUs that it is to have, and takes them back. `text` says how many that are, as in 'h100:2'; None: none.

    `visible` is CUDA_VISIBLE_DEVICES. Raises ValueError.
    """

    def __init__(self, text: str | None, visible: str | None) -> None:
        try:
            self.usual = parse_gpus(text, None) if text is not None else Devices()
        except ValueError as error:
            raise ValueError(f"gpus={text!r}: {error}") from error
        self._visible = visible_ids(visible)
        self._ids: tuple[str, ...] = ()  # those of this machine, as far as they are known
        self._taken: dict[WorkerId, tuple[str, ...]] = {}

    def know(self, found: Devices) -> None:
        """These GPUs are here; if none were found, those of CUDA_VISIBLE_DEVICES. Raises VMError when they are of another model."""
        if found.ids and self.usual.variant not in (ANY_MODEL, found.variant):
            raise VMError(
                f"gpus='{self.usual.variant}:{len(self.usual.ids)}': this machine's GPUs are {found.variant}: give "
                f"gpus='{found.variant}:{len(self.usual.ids)}', or leave the model out"
            )
        if found.ids and self.usual.variant == ANY_MODEL:
            self.usual = Devices("gpu", found.variant, self.usual.ids)
        self._ids = found.ids or self._visible

    def take(self, vm_id: WorkerId) -> tuple[str, ...]:
        """The ids of the GPUs that a VM has from now on. Raises VMError when too few are left."""
        self.give_back(vm_id)  # which may have been refused since
        count = len(self.usual.ids)
        taken = {each for ids in self._taken.values() for each in ids}
        if self._ids:
            free = [each for each in self._ids if each not in taken]
        else:  # nothing here lists them: the engine knows
            free = [str(number) for number in range(len(taken) + count) if str(number) not in taken]
        if len(free) < count:
            raise VMError(
                f"VM {vm_id!r} is to have {count} GPUs, and {len(free)} of this machine's {len(self._ids)} are left: have fewer "
                "VMs, or fewer GPUs in each (gpus=…)"
            )
        self._taken[vm_id] = tuple(free[:count])
        return self._taken[vm_id]

    def give_back(self, vm_id: WorkerId) -> None:
        """What that VM had may be another's."""
        self._taken.pop(vm_id, None)
