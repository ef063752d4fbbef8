"""What a task asks of a machine, and what a machine has: sizes, devices, and labels, words such as `zone=a` by which workers differ."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from fluster_bus.core.devices import MAX_BYTES
from fluster_bus.core.names import MAX_NAME_LENGTH, WorkerId, check_name
from fluster_bus.messages.parts.counted import check_counts
from fluster_bus.messages.parts.model import Message
from fluster_bus.messages.parts.tpu import tpu_topology

MAX_LABELS = 64
WORKER_LABEL = "fluster.worker"  # each worker has it by itself: its own name
_KEY = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]{0,62}[A-Za-z0-9])?")
_VALUE = re.compile(r"[A-Za-z0-9_.:/-]{0,63}")
_WORKER = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_LENGTH}}}")


def check_labels(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return `labels`. Raises ValueError, which quotes what is wrong."""
    if len(labels) > MAX_LABELS:
        raise ValueError(f"{len(labels)} labels are too many: give at most {MAX_LABELS}")
    for key, value in labels.items():
        known = _WORKER if key == WORKER_LABEL else _VALUE
        if not _KEY.fullmatch(key) or not known.fullmatch(value):
            shown = f"{key}={value}"[:150]
            raise ValueError(
                f"invalid label {shown!r}: write key=value, each of at most 64 letters, digits and _ . / - (a value also :)"
            )
    return labels


def parse_labels(text: str) -> dict[str, str]:
    """The labels in `zone=a,disk=ssd`. Raises ValueError."""
    pairs = [each.strip() for each in text.split(",") if each.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise ValueError(f"invalid label {pair[:150]!r}: write key=value, such as zone=a")
    labels = {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}
    check_labels(labels)
    return labels


def as_words(labels: Mapping[str, str]) -> tuple[str, ...]:
    """`("disk=ssd", "zone=a")`: sorted, and fit to be compared."""
    return tuple(sorted(f"{key}={value}" for key, value in labels.items()))


def from_words(words: tuple[str, ...]) -> dict[str, str]:
    """What `as_words` was given."""
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def with_own_name(words: Sequence[str], worker_id: WorkerId) -> tuple[str, ...]:
    """The labels of a worker of that name: those that it was given, and the one by which a task asks for just this worker."""
    return tuple(sorted([*given_labels(words), *as_words({WORKER_LABEL: worker_id})]))


def given_labels(words: Sequence[str]) -> tuple[str, ...]:
    """The labels without the one that each worker has by itself."""
    return tuple(word for word in words if word.partition("=")[0] != WORKER_LABEL)


def worker_named(words: tuple[str, ...]) -> WorkerId | None:
    """The one worker that a task with these labels may run on; None when it may on all."""
    name = from_words(words).get(WORKER_LABEL)
    return WorkerId(name) if name is not None else None


KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
_UNITS = {
    "": 1,
    "b": 1,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "ki": KIB,
    "mi": MIB,
    "gi": GIB,
    "ti": TIB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}


def parse_disk(value: int | str) -> int:
    """Bytes of a disk, which may be none. Raises ValueError."""
    size = parse_size(value)
    if size > MAX_BYTES:
        raise ValueError(f"{value!r} is more than any disk has: give a size such as 1TB")
    return size


def parse_size(value: object) -> int:
    """Bytes of `"2GB"`, `"512MiB"`, `"4g"` (binary, as Docker has it) or a plain number. Raises ValueError."""
    size = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is not None and match[2].lower() in _UNITS:
            size = float(match[1]) * _UNITS[match[2].lower()]
    if not math.isfinite(size):
        shown = repr(value)[:100]
        raise ValueError(f"invalid size {shown}: write bytes, or a number with a unit, such as '2GB' or '512MiB'")
    return int(size)


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=1 << 60)]


class _DeviceConfig(Message):
    """A device tells its kind even when that is its default: the reader goes by it."""

    @model_serializer(mode="wrap")
    def _tell_kind(self, write: SerializerFunctionWrapHandler) -> dict[str, object]:
        return {"kind": vars(self)["kind"], **write(self)}  # each kind of device has a type of its own for it


class CpuConfig(_DeviceConfig):
    """No accelerator."""

    kind: Literal["cpu"] = "cpu"

    @property
    def variant(self) -> str:
        return "none"

    def chip_count(self) -> int:
        return 0

    def vm_count(self) -> int:
        return 1


class GpuConfig(_DeviceConfig):
    """GPUs of one model on one machine; `variant="any"` takes whichever there is."""

    by_position: ClassVar[tuple[str, ...]] = ("variant", "count")
    kind: Literal["gpu"] = "gpu"
    variant: str = "any"
    count: int = Field(default=1, ge=1, le=1024)

    if TYPE_CHECKING:

        def __init__(self, variant: str = "any", count: int = 1) -> None: ...

    @field_validator("variant")
    @classmethod
    def _check(cls, value: str) -> str:
        return check_name("GPU variant", value.lower())

    def chip_count(self) -> int:
        return self.count

    def vm_count(self) -> int:
        return 1


class TpuConfig(_DeviceConfig):
    """A TPU slice such as `v5litepod-16`, of one or several VMs."""

    by_position: ClassVar[tuple[str, ...]] = ("variant",)
    kind: Literal["tpu"] = "tpu"
    variant: str

    if TYPE_CHECKING:

        def __init__(self, variant: str) -> None: ...

    @field_validator("variant")
    @classmethod
    def _check(cls, value: str) -> str:
        return tpu_topology(value).variant

    def chip_count(self) -> int:
        return tpu_topology(self.variant).chip_count

    def vm_count(self) -> int:
        return tpu_topology(self.variant).vm_count

    @property
    def count(self) -> int:
        """Chips on each VM, which is what one task takes."""
        return tpu_topology(self.variant).chips_per_vm


Device = Annotated[CpuConfig | GpuConfig | TpuConfig, Field(discriminator="kind")]


_NO_RESOURCES: Mapping[str, float] = MappingProxyType({})


# What a task takes of its worker's memory that asks for none, and what each takes at least: it has a process that looks after it.
_UNASKED_MEMORY, _LEAST_MEMORY = 128 * MIB, 16 * MIB


class ResourceConfig(Message):
    """What one task needs: CPUs (fractions allowed), memory and disk in bytes, a device, labels of its worker.

    `resources` are what is counted by names of your own, such as {"license": 1}: whole numbers or up to four decimals, above 0.
    A worker that offers them gives no more away than it has. `cpu=0` is for what mostly waits: it needs no CPU to be free.
    `memory=0` is 128 MiB, since nothing runs without any.
    """

    cpu: float = Field(default=1, ge=0, le=4096, allow_inf_nan=False)
    memory: Size = GIB
    disk: Size = 0
    device: Device = CpuConfig()
    labels: Mapping[str, str] = Field(default_factory=dict)
    """Each must be the worker's, such as {"zone": "a"}."""

    resources: Mapping[str, float] = Field(default_factory=dict)

    @field_validator("resources", mode="before")
    @classmethod
    def _check_resources(cls, value: object) -> Mapping[str, float]:
        return check_counts(value)

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        return check_labels(value)

    @property
    def memory_taken(self) -> int:
        """Bytes that a worker gives the task."""
        return max(self.memory, _LEAST_MEMORY) if self.memory else _UNASKED_MEMORY

    @classmethod
    def with_cpu(
        cls,
        cpu: float = 1,
        *,
        memory: int | str = GIB,
        disk: int | str = 0,
        resources: Mapping[str, float] = _NO_RESOURCES,
    ) -> ResourceConfig:
        """CPUs and memory alone. `memory` and `disk` take bytes or text such as `"2GB"`."""
        return cls(cpu=cpu, memory=parse_size(memory), disk=parse_size(disk), resources=resources)

    @classmethod
    def with_gpu(
        cls,
        variant: str = "any",
        count: int = 1,
        *,
        cpu: float = 1,
        memory: int | str = GIB,
        disk: int | str = 0,
        resources: Mapping[str, float] = _NO_RESOURCES,
    ) -> ResourceConfig:
        """`count` GPUs of model `variant` for each task."""
        device = GpuConfig(variant=variant, count=count)
        return cls(cpu=cpu, memory=parse_size(memory), disk=parse_size(disk), device=device, resources=resources)

    @classmethod
    def with_tpu(
        cls,
        variant: str,
        *,
        cpu: float = 1,
        memory: int | str = GIB,
        disk: int | str = 0,
        resources: Mapping[str, float] = _NO_RESOURCES,
    ) -> ResourceConfig:
        """A TPU slice; a slice of several VMs wants as many replicas (`device.vm_count()`)."""
        device = TpuConfig(variant=variant)
        return cls(cpu=cpu, memory=parse_size(memory), disk=parse_size(disk), device=device, resources=resources)
