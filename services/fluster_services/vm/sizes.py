"""How large a VM is, and which of the machine's GPUs are its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fluster_bus.core.devices import ANY_MODEL, Devices, parse_gpus, visible_ids
from fluster_bus.messages import Capacity, WorkerId, parse_size
from fluster_bus.messages.parts.resources import as_words, check_labels
from fluster_services.vm.backend import VMError


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
