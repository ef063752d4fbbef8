"""Allocates one worker's GPUs to its tasks: never one that another holder has, or that is of no use.

Why a GPU is given to no task for the time being is decided by pure functions, which get what was read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fluster_services.worker.gpus.holders import (
    Holder,
    Strangers,
    StrangerWatch,
    described,
    look_for,
    parse_note,
    strangers_on,
    why_not_gone,
)
from fluster_services.worker.gpus.inventory import (
    ORDER,
    VISIBLE_VARIABLE,
    Gpu,
    GpuInventory,
    GpuProcess,
    MaskStyle,
    mask,
)
from fluster_services.worker.gpus.locks import GpuLock, GpuTakenError, find_lock_folder, lock_path
from fluster_services.worker.gpus.reader import GpuReader, is_named

log = logging.getLogger(__name__)

DRIVER_FILE = Path("/dev/nvidiactl")  # it is there once the driver of a machine with GPUs is loaded


@dataclass(frozen=True)
class GpuLease:
    """What a task is started with so that it, and no other, has its GPUs."""

    devices: tuple[str, ...] = ()  # ids, as the worker knows them
    variables: Mapping[str, str] = field(default_factory=dict)
    uuids: tuple[str, ...] = ()
    locks: Mapping[str, str] = field(
        default_factory=dict
    )  # {lock file: the note in it of a holder that is proved to be gone}


class GpuAllocator:
    """Allocates one worker's GPUs. `has_container` tells whether the container of a holder is there, None where that is not known.

    With `keeps_apart` a GPU of which programs that are not tasks hold much memory is given to no task; else that is a warning.
    """

    def __init__(
        self,
        reader: GpuReader,
        *,
        lock_folder: str | None = None,
        style: MaskStyle = "index",
        has_container: Callable[[Holder], bool | None] = lambda _: None,
        keeps_apart: bool = False,
    ) -> None:
        self._reader = reader
        self._keeps_apart = keeps_apart
        self._stranger_watch = StrangerWatch()
        self._tolerated: dict[str, Strangers] = {}  # {id: who uses a GPU that is given to tasks all the same}
        self._style: MaskStyle = style
        self._has_container = has_container
        self._known: dict[str, Gpu] = {}  # {id: the GPU as it was when it was last read}
        self.inventory = GpuInventory()
        self.unwell: dict[str, str] = {}  # {id: why it is of no use}
        self._taken: dict[str, str] = {}  # {id: who else has it, or had it and is not known to be gone}
        self._leased: set[str] = set()  # since the last look began
        self._folder: Path | None = None
        self.trouble: str | None = None  # why GPUs are not locked
        try:
            self._folder = find_lock_folder(lock_folder)
        except OSError as error:
            self.trouble = f"GPUs are not locked against other workers and clusters of this machine: {error}"

    async def read(self) -> GpuInventory:
        """All GPUs of the machine, as they are now."""
        self.inventory = await self._reader.read()
        return self.inventory

    async def close(self) -> None:
        """End what reads GPUs."""
        await self._reader.close()

    @property
    def withheld(self) -> dict[str, str]:
        """{id: why it is given to no task}"""
        return {**self._taken, **self.unwell}

    async def look(self, ids: Sequence[str], in_use: Callable[[], Collection[str]]) -> None:
        """Find which of these GPUs are to be withheld; of those `in_use` by tasks of this worker only how they are is looked at."""
        before, self._leased = self.withheld, set()
        inventory, used = await self.read(), frozenset(in_use())
        unwell, taken = await asyncio.to_thread(self._look_whole, inventory, ids, used)
        self.unwell = unwell
        self._taken = {name: why for name, why in taken.items() if name not in self._leased and name not in in_use()}
        for name in sorted(self.withheld.keys() - before.keys()):
            log.warning("%s is given to no task: %s", named(self._known.get(name), name), self.withheld[name])
        for name in sorted(before.keys() - self.withheld.keys()):
            log.info("%s is given to tasks again", named(self._known.get(name), name))

    async def lease(self, ids: Sequence[str]) -> GpuLease:
        """What a task needs to be started with these. Raises GpuTakenError when one cannot be given; then it is withheld."""
        if not ids:
            return GpuLease()
        inventory = await self.read()
        notes: dict[str, str] = {}
        unwell, taken = await asyncio.to_thread(self._look, inventory, ids, (), notes)
        if unwell or taken:
            self.unwell, self._taken = {**self.unwell, **unwell}, {**self._taken, **taken}
            raise GpuTakenError("; ".join(map(self.described, (*unwell, *taken))))
        self._leased.update(ids)
        gpus = [gpu for name in ids if (gpu := by_id(inventory, name)) is not None]
        if len(gpus) < len(ids):  # they were given by hand, and no driver reports them
            return GpuLease(tuple(ids), {VISIBLE_VARIABLE: ",".join(ids), **ORDER})
        return GpuLease(tuple(ids), mask(gpus, self._style), tuple(gpu.uuid for gpu in gpus if gpu.uuid), notes)

    def why_held(self, ids: Sequence[str]) -> str | None:
        """Why one of these GPUs cannot be had at this moment, by a brief look at the locks alone; it is withheld then."""
        for name in ids:
            gpu = self._known.get(name)
            lock: GpuLock | None = None
            try:
                lock = self._lock(gpu) if gpu is not None else None
                if lock is not None and lock.is_held():
                    self._taken = {**self._taken, name: f"{described(lock.note())} holds it"}
                    return self.described(name)
            except OSError:  # the next look tells
                continue
            finally:
                if lock is not None:
                    lock.close()
        return None

    def uuids(self, ids: Sequence[str]) -> tuple[str, ...]:
        """The UUIDs of these, as far as they are known."""
        found = (self._known[name].uuid if name in self._known else "" if name.isdecimal() else name for name in ids)
        return tuple(filter(None, found))

    def has_gpus(self, ids: Sequence[str]) -> bool:
        """Whether one of these is, or was, among the GPUs that were read."""
        return any(name in self._known or by_id(self.inventory, name) is not None for name in ids)

    def names_of(self, indices: Collection[str]) -> dict[str, str]:
        """{index: UUID} of these, as far as they were read."""
        found = {index: by_id(self.inventory, index) for index in indices if index.isdecimal()}
        return {index: gpu.uuid for index, gpu in found.items() if gpu is not None and gpu.uuid}

    def described(self, name: str) -> str:
        """A GPU that is withheld, and why."""
        return f"{named(self._known.get(name), name)}: {self.withheld[name]}"

    def told(self, ids: Sequence[str]) -> list[str]:
        """Which of these are withheld, and why, in words for all who look at the cluster."""
        return [
            f"{named(self._known.get(name), name)} is given to no task: {self.withheld[name]}"
            for name in ids
            if name in self.withheld
        ]

    def problems(self, ids: Sequence[str]) -> list[str]:
        """What an operator should know of these."""
        shared = [
            f"{named(self._known.get(name), name)} is given to tasks although {who.described()}"
            for name, who in sorted(self._tolerated.items())
            if name in ids
        ]
        return [*self.told(ids), *shared, *([self.trouble] if self.trouble is not None and self._known else [])]

    def _lock(self, gpu: Gpu) -> GpuLock | None:
        """None where there is none. Raises OSError when its file cannot be used."""
        return GpuLock(lock_path(self._folder, gpu.uuid)) if self._folder is not None and gpu.uuid else None

    def _look(
        self, inventory: GpuInventory, ids: Sequence[str], in_use: Collection[str], notes: dict[str, str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Which of these are unwell, and which are taken, and why. `notes` gets those in the locks of the others."""
        unwell: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in ids:
            gpu = self._found(inventory, name)
            if gpu is None:
                if name in self._known:
                    unwell[name] = why_missing(inventory)
                continue
            if gpu.uuid or name not in self._known:
                self._known[name] = gpu
            if (why := why_unwell(gpu)) is not None:
                unwell[name] = why
            elif name not in in_use and (why := self._why_taken(gpu, notes)) is not None:
                taken[name] = why
        return unwell, taken

    def _look_whole(
        self, inventory: GpuInventory, ids: Sequence[str], in_use: frozenset[str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        """The same as by `_look`, with those taken that strangers use."""
        unwell, taken = self._look(inventory, ids, in_use, {})
        free = {*ids} - unwell.keys() - taken.keys() - in_use
        return unwell, {**taken, **self._look_for_strangers(inventory, free)}

    def _look_for_strangers(self, inventory: GpuInventory, free: Collection[str]) -> dict[str, str]:
        """Which of these, that no task has, are to be given to none since other programs use them, and why."""
        gpus = {name: gpu for name in free if (gpu := self._found(inventory, name)) is not None}
        staying = self._stranger_watch.on_look(
            {name: who for name, gpu in gpus.items() if (who := strangers_on(gpu)) is not None}
        )
        kept_out = {name: who for name, who in staying.items() if self._keeps_apart and not who.has_server}
        for name in sorted(staying.keys() - kept_out.keys() - self._tolerated.keys()):
            log.warning("%s is given to tasks although %s", named(gpus[name], name), staying[name].described())
        self._tolerated = {name: who for name, who in staying.items() if name not in kept_out}
        return {name: f"{who.described()}: end {who.them}" for name, who in kept_out.items()}

    def _found(self, inventory: GpuInventory, name: str) -> Gpu | None:
        """The GPU of that id; one that is lost may not even tell its UUID, and is known by its index."""
        gpu, before = by_id(inventory, name), self._known.get(name)
        if gpu is not None or before is None or before.parent:
            return gpu
        return next((each for each in inventory.gpus if not each.uuid and each.index == before.index), None)

    def _why_taken(self, gpu: Gpu, notes: dict[str, str]) -> str | None:
        """Why the lock of a GPU cannot be had; None when it can."""
        lock: GpuLock | None = None
        try:
            lock = self._lock(gpu)
            if lock is None:
                return None
            lock.touch()
            note = lock.note()
            if lock.is_held():
                return f"{described(note)} holds it"
        except OSError as error:
            return f"its lock cannot be used: {error}"
        finally:
            if lock is not None:
                lock.close()
        notes[str(lock.path)] = note
        return self._why_unproved(note, gpu.processes, lock.path)

    def _why_unproved(self, note: str, processes: Sequence[GpuProcess] | None, path: Path) -> str | None:
        if not note:
            return None
        holder = parse_note(note)
        if holder is None:
            return f"who held it last cannot be known: remove {path} once nothing of it uses the GPU"
        why = why_not_gone(holder, look_for(holder, processes, self._has_container))
        return None if why is None else f"{why}: end it, or remove {path} once nothing of it uses the GPU"


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
