"""What a worker has given away. Only the worker decides; what others believe about it is a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from fluster_bus.core.devices import Devices
from fluster_bus.messages import Capacity, Namespace
from fluster_services.capacity import fits, minus, of_model, plus, withhold


class Ledger:
    """A worker's capacity: never more is reserved than there is."""

    def __init__(self, total: Capacity, device_ids: Sequence[str] = (), others: Sequence[Devices] = ()) -> None:
        self.total = total
        # {id: model}
        self._models = dict.fromkeys(device_ids or map(str, range(total.devices)), total.variant)
        self._models |= {each: devices.variant for devices in others for each in devices.ids}
        self._devices: dict[str, tuple[str, ...]] = {}  # {attempt: the devices that are its own}
        self._left = total  # below zero when more was adopted than there is
        self._reserved: dict[str, Capacity] = {}  # {attempt: what it has}
        self._withheld: frozenset[str] = frozenset()  # ids of devices that are not given to tasks

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Of all devices, also those that attempts have."""
        return tuple(self._models)

    @property
    def devices_in_use(self) -> frozenset[str]:
        """The ids of those that attempts have."""
        return frozenset(device for devices in self._devices.values() for device in devices)

    def withhold(self, ids: Collection[str]) -> bool:
        """Withhold these devices from now on, and give all others again; whether that changes anything."""
        withheld = frozenset(ids) & self._models.keys()
        is_other, self._withheld = withheld != self._withheld, withheld
        return is_other

    @property
    def free(self) -> Capacity:
        """What can still be given away."""
        left = self._without_withheld()
        amounts = (left.cpu, left.memory, left.disk, left.devices, left.tasks or 0)
        counts = (*left.resources, *left.other_devices)
        if min(amounts) >= 0 and all(count >= 0 for _, count in counts):
            return left
        return left.model_copy(
            update={
                "cpu": max(left.cpu, 0),
                "memory": max(left.memory, 0),
                "disk": max(left.disk, 0),
                "devices": max(left.devices, 0),
                "other_devices": tuple((model, max(count, 0)) for model, count in left.other_devices),
                "tasks": None if left.tasks is None else max(left.tasks, 0),
                "resources": tuple(each for each in left.resources if each[1] > 0),
            }
        )

    def _without_withheld(self) -> Capacity:
        idle = self._withheld - self.devices_in_use if self._withheld else ()
        return withhold(self._left, Counter(self._models[each] for each in idle)) if idle else self._left

    @property
    def withheld_counts(self) -> tuple[tuple[str, int], ...]:
        """(model, count) of the devices that are withheld, also those that an attempt still has.

        The controller takes the latter from what is left twice, for the moments until that attempt has ended.
        """
        return tuple(sorted(Counter(self._models[each] for each in self._withheld).items()))

    def rename_devices(self, names: Mapping[str, str]) -> None:
        """Know devices that attempts have by other ids: {id until now: id}."""
        for attempt, devices in self._devices.items():
            self._devices[attempt] = tuple(names.get(each, each) for each in devices)

    def add_devices(self, devices: Devices) -> None:
        """Have what was found only now, where there was none."""
        count = len(devices.ids)
        kind = {"device": devices.kind, "variant": devices.variant, "other_devices": devices.other_counts}
        self.total = self.total.model_copy(update={**kind, "devices": count})
        self._left = self._left.model_copy(update={**kind, "devices": count})
        self._models = {each: model.variant for model in (devices, *devices.others) for each in model.ids}
        for attempt, need in list(self._reserved.items()):  # adopted since the start
            self._reserved[attempt] = self._of_model(need, self._devices[attempt])
            self._left = minus(self._left, _only_devices(self._reserved[attempt]))

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
        """Why `need` does not fit now; None when it does."""
        if fits(need, self.free):
            return None
        if self.free.tasks == 0:
            return f"no room: it has {len(self)} tasks, and may have {self.total.tasks} at once"
        return "no room"

    def hold(self, attempt: str, need: Capacity, devices: Sequence[str] | None = None) -> None:
        """Note what an attempt has that runs already, whether or not it still fits; `devices` are those it was given."""
        need = of_model(need, self.free) if devices is None else self._of_model(need, devices)
        self._reserved[attempt] = need
        self._devices[attempt] = (
            tuple(devices) if devices is not None else self._free_devices(need.variant)[: need.devices]
        )
        self._left = minus(self._left, need)

    def _of_model(self, need: Capacity, devices: Sequence[str]) -> Capacity:
        """The same, of the model that these devices are of; a task that named none may have been given any."""
        model = self._models.get(devices[0]) if devices and self.total.other_devices else None
        return need if model is None else need.model_copy(update={"variant": model})

    def _free_devices(self, variant: str) -> tuple[str, ...]:
        taken = self.devices_in_use | self._withheld
        is_divided = bool(self.total.other_devices)
        return tuple(
            device
            for device, model in self._models.items()
            if device not in taken and (not is_divided or model == variant)
        )

    def devices(self, attempt: str) -> tuple[str, ...]:
        """The ids of the devices that only this attempt has."""
        return self._devices.get(attempt, ())

    def release(self, attempt: str) -> bool:
        """Take back what an attempt had; False when it had nothing."""
        need = self._reserved.pop(attempt, None)
        if need is None:
            return False
        self._devices.pop(attempt, None)
        self._left = plus(self._left, need)
        return True


def _only_devices(need: Capacity) -> Capacity:
    return Capacity(device=need.device, variant=need.variant, devices=need.devices)
