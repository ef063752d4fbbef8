"""What a worker has given away. Only the worker decides; what others believe about it is a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fluster_bus.devices import Devices
from fluster_bus.messages import Capacity, Namespace
from fluster_services.capacity import fits, minus, plus


class Ledger:
    """A worker's capacity: never more is reserved than there is."""

    def __init__(self, total: Capacity, device_ids: Sequence[str] = ()) -> None:
        self.total = total
        self._device_ids = tuple(device_ids) or tuple(map(str, range(total.devices)))
        self._devices: dict[str, tuple[str, ...]] = {}  # {attempt: the devices that are its own}
        self._left = total  # below zero when more was adopted than there is
        self._reserved: dict[str, Capacity] = {}  # {attempt: what it has}

    @property
    def free(self) -> Capacity:
        """What can still be given away."""
        left = self._left
        amounts = (left.cpu, left.memory, left.disk, left.devices, left.tasks or 0)
        if min(amounts) >= 0 and all(count >= 0 for _, count in left.resources):
            return left
        return left.model_copy(
            update={
                "cpu": max(left.cpu, 0),
                "memory": max(left.memory, 0),
                "disk": max(left.disk, 0),
                "devices": max(left.devices, 0),
                "tasks": None if left.tasks is None else max(left.tasks, 0),
                "resources": tuple(each for each in left.resources if each[1] > 0),
            }
        )

    def add_devices(self, devices: Devices) -> None:
        """Have what was found only now, where there was none."""
        count = len(devices.ids)
        kind = {"device": devices.kind, "variant": devices.variant}
        self.total = self.total.model_copy(update={**kind, "devices": count})
        self._left = self._left.model_copy(update={**kind, "devices": self._left.devices + count})
        self._device_ids = devices.ids

    def add_namespace(self, namespace: Namespace) -> None:
        """Have room for jobs of that namespace, too."""
        served = {"namespaces": tuple(sorted({*self.total.namespaces, namespace}))}
        self.total, self._left = self.total.model_copy(update=served), self._left.model_copy(update=served)

    def __len__(self) -> int:
        return len(self._reserved)

    def attempts(self) -> Mapping[str, Capacity]:
        """{attempt: what it has}"""
        return self._reserved

    def __contains__(self, attempt: str) -> bool:
        return attempt in self._reserved

    def reserve(self, attempt: str, need: Capacity, *, instead_of: str = "") -> bool:
        """Give `need` to an attempt; False when it does not fit, or has something already.

        What `instead_of` has, if anything, is kept for this attempt: it is given up for it.
        """
        if attempt in self._reserved:
            return False
        kept = self._reserved.get(instead_of)
        if kept is not None:
            self.release(instead_of)
        if fits(need, self.free):
            self.hold(attempt, need)
            return True
        if kept is not None:
            self.hold(instead_of, kept)
        return False

    def why_full(self, need: Capacity) -> str | None:
        """Why there is no room for `need`; None while there is."""
        if fits(need, self.free):
            return None
        if self.free.tasks == 0:
            return f"no room: it has {len(self)} tasks, and may have {self.total.tasks} at once"
        return "no room"

    def hold(self, attempt: str, need: Capacity, devices: Sequence[str] | None = None) -> None:
        """Note what an attempt has that runs already, whether or not it still fits; `devices` are those it was given."""
        self._reserved[attempt] = need
        self._devices[attempt] = tuple(devices) if devices is not None else self._free_devices()[: need.devices]
        self._left = minus(self._left, need)

    def _free_devices(self) -> tuple[str, ...]:
        taken = {device for devices in self._devices.values() for device in devices}
        return tuple(device for device in self._device_ids if device not in taken)

    def devices(self, attempt: str) -> tuple[str, ...]:
        """The ids of the devices that an attempt has, and nobody else."""
        return self._devices.get(attempt, ())

    def release(self, attempt: str) -> bool:
        """Take back what an attempt had; False when it had nothing."""
        need = self._reserved.pop(attempt, None)
        if need is None:
            return False
        self._devices.pop(attempt, None)
        self._left = plus(self._left, need)
        return True
