"""The machine's GPUs that the VMs of one backend have, each its own."""

from __future__ import annotations

from fluster_bus.core.devices import ANY_MODEL, Devices, parse_gpus, visible_ids
from fluster_bus.messages import WorkerId
from fluster_services.vm.backend import VMError


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
