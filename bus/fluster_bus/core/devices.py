"""Accelerators as people name them, and the most that a machine is believed to have.

Imports next to nothing: also a cluster that just starts reads them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

VISIBLE_DEVICES = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}  # by which a task knows which are its own
MAX_CPUS, MAX_BYTES = 1e6, 1 << 60  # of a machine: what is above is a slip of the pen
ANY_MODEL = "any"  # of devices whose model was not given: they are for tasks that name none


@dataclass(frozen=True)
class Devices:
    """Accelerators of one model, with the ids by which the system knows them, and those of other models beside them."""

    kind: str = "cpu"
    variant: str = "none"
    ids: tuple[str, ...] = ()
    others: tuple[Devices, ...] = ()  # each of a model of its own, and without others

    @property
    def other_counts(self) -> tuple[tuple[str, int], ...]:
        """(model, count) of the others, sorted."""
        return tuple(sorted((each.variant, len(each.ids)) for each in self.others))

    def share(self, number: int, count: int) -> Devices:
        """What the one of that number gets when `count` share them as evenly as they can."""
        shared = []
        for each in (self, *self.others):
            begin, end = (len(each.ids) * place // count for place in (number, number + 1))
            if end > begin:
                shared.append(Devices(each.kind, each.variant, each.ids[begin:end]))
        return replace(shared[0], others=tuple(shared[1:])) if shared else Devices()


def parse_gpus(text: str, visible: str | None) -> Devices:
    """`h100:8`, or `h100` for one, `8` of no model that jobs can name, or `0` for none; with the ids of CUDA_VISIBLE_DEVICES
    where that is set.

    Raises ValueError.
    """
    if text == "0":
        return Devices()
    match = re.fullmatch(
        r"(?P<any>[1-9]\d{0,3})|(?P<model>[A-Za-z0-9_-]*[A-Za-z][A-Za-z0-9_-]*)(?::(?P<count>[1-9]\d{0,3}))?", text
    )
    if match is None:
        raise ValueError(f"{text!r} names no GPUs: write a model, a count or both, such as h100:8, or 0 for none")
    count = int(match["any"] or match["count"] or 1)
    ids = visible_ids(visible) or tuple(map(str, range(count)))
    if len(ids) < count:
        raise ValueError(
            f"{text!r} are more GPUs than CUDA_VISIBLE_DEVICES={visible!r} shows: name fewer, or change that variable"
        )
    return Devices("gpu", (match["model"] or ANY_MODEL).lower(), ids[:count])


def visible_ids(text: str | None) -> tuple[str, ...]:
    """Those that CUDA_VISIBLE_DEVICES names."""
    return tuple(each.strip() for each in (text or "").split(",") if each.strip())


def as_json(devices: Devices) -> Sequence[object]:
    """What `from_json` reads."""
    return [devices.kind, devices.variant, list(devices.ids)]


def from_json(data: Sequence[object]) -> Devices:
    """The devices that `as_json` wrote."""
    kind, variant, ids = data
    assert isinstance(ids, list | tuple)  # noqa: S101 - it is ours
    return Devices(str(kind), str(variant), tuple(map(str, ids)))
