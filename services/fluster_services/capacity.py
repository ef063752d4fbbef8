"""Capacity: what a task takes, whether it fits, and the classes under which tasks are offered.

A class is (device, variant, count, CPU level, memory level), the levels being powers of two. A worker listens on
every class that its free capacity covers, so NATS hands an offer to one with room. A task that lies between two
levels is offered on the class above it, and if no worker listens there, by name.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fluster_bus.core import subjects
from fluster_bus.messages import Capacity, Namespace, ResourceConfig
from fluster_bus.messages.parts.counted import DECIMALS, Counts, as_counts, combined, number_text, words
from fluster_bus.messages.parts.resources import MIB, as_words, given_labels, worker_named

ANY_VARIANT, NO_VARIANT = "any", "none"
_CPU_LEVELS = (0.0, 0.25, 0.5, *(float(1 << power) for power in range(13)))  # up to 4096
_MEMORY_LEVELS = tuple(128 * MIB << power for power in range(16))  # 128 MiB to 4 TiB
_COUNT_LEVELS = (1, 2, 4, 8, 16, 32, 64)
_DECIMALS = 3  # of a CPU: sums of fractions must come out even
_KEPT_NEEDS = 4_096
_NAMED = 10  # workers, in a text
_tuple = tuple.__new__  # a named tuple of all its fields, which Python makes without running a function of its own


class CapacityClass(NamedTuple):
    """A subject on which tasks of one size and namespace are offered. A tuple, since workers compare hundreds of them for a task."""

    namespace: Namespace
    device: str
    variant: str
    devices: int
    cpu: float
    memory: int

    @property
    def subject(self) -> str:
        return _subject(self)


@functools.lru_cache(maxsize=_KEPT_NEEDS)
def _subject(of: CapacityClass) -> str:
    cpu, memory = f"c{round(of.cpu * 1000)}m", f"m{of.memory // MIB}"
    return subjects.dispatch(of.namespace, of.device, of.variant, of.devices, cpu=cpu, memory=memory)


def needed(resources: ResourceConfig, namespace: Namespace | None = None) -> Capacity:
    """What one task takes from a worker; one of the namespace, if that is given."""
    device = resources.device
    return _need(
        resources.cpu,
        resources.memory_taken,
        resources.disk,
        device.kind,
        device.variant,
        0 if device.kind == "cpu" else device.count,
        as_words(resources.labels) if resources.labels else (),
        as_counts(resources.resources) if resources.resources else (),
        () if namespace is None else (namespace,),
    )


# Many tasks need the same: then it is one object, found and compared at once.
@functools.lru_cache(maxsize=_KEPT_NEEDS)
def _need(  # noqa: PLR0917 - by position, as the cache finds them sooner so
    cpu: float,
    memory: int,
    disk: int,
    device: str,
    variant: str,
    devices: int,
    labels: tuple[str, ...],
    resources: Counts,
    namespaces: tuple[Namespace, ...],
) -> Capacity:
    # Rounded up here, so that what is given away and what comes back is the same to the last digit.
    cpu = math.ceil(round(cpu * 1000, 3)) / 1000
    return Capacity(
        cpu=cpu,
        memory=memory,
        disk=disk,
        device=device,
        variant=variant,
        devices=devices,
        tasks=1,
        labels=labels,
        resources=resources,
        namespaces=namespaces,
    )


def fits(need: Capacity, free: Capacity) -> bool:
    """True when a worker with `free` has room for `need`."""
    return (
        need.cpu <= free.cpu
        and need.memory <= free.memory
        and need.disk <= free.disk
        and (free.tasks is None or (need.tasks or 0) <= free.tasks)
        and serves(need, free)
        and has_labels(need, free)
        and has_counts(need.resources, free.resources)
        and has_devices(need, free)
    )


def times_fit(need: Capacity, free: Capacity, most: int) -> int:
    """For how many tasks, of at most so many, a worker with `free` has room at once. It takes no longer for more of them."""
    if not fits(need, free):
        return 0
    thousand, ten_thousand = 10**_DECIMALS, 10**DECIMALS
    left = dict(free.resources)
    if need.devices:  # a task has devices of one model
        counts = [count for model, count in models(free).items() if need.variant in (model, ANY_VARIANT)]
        most = min(most, sum(count // need.devices for count in counts))
    kinds: tuple[tuple[int, int], ...] = (
        (round(need.cpu * thousand), math.floor(round(free.cpu * thousand, _DECIMALS))),
        (need.memory, free.memory),
        (need.disk, free.disk),
        *(() if free.tasks is None else ((need.tasks or 0, free.tasks),)),
        *((round(count * ten_thousand), round(left[name] * ten_thousand)) for name, count in need.resources),
    )
    return min([most, *(has // wanted for wanted, has in kinds if wanted)])


def serves(need: Capacity, free: Capacity) -> bool:
    """True when a worker with `free` runs jobs of the namespace of `need`; also when one of them does not say."""
    return not (need.namespaces and free.namespaces) or set(need.namespaces) <= set(free.namespaces)


def has_labels(need: Capacity, free: Capacity) -> bool:
    """True when a worker with `free` has every label that `need` names."""
    return not need.labels or set(need.labels) <= set(free.labels)


def has_counts(need: Counts, free: Counts) -> bool:
    """True when of everything in `need` there is as much in `free`."""
    if not need:
        return True
    left = dict(free)
    return all(left.get(name, 0) >= count for name, count in need)


def has_devices(need: Capacity, free: Capacity) -> bool:
    """True when a worker with `free` has as many devices of one model as `need` asks for."""
    if need.devices == 0:
        return True
    if need.device != free.device:
        return False
    if need.devices <= free.devices and need.variant in (free.variant, ANY_VARIANT):
        return True
    return any(need.devices <= count and need.variant in (model, ANY_VARIANT) for model, count in free.other_devices)


def _devices(capacity: Capacity) -> str:
    """`2 x gpu h100 + 1 x gpu a100`, each model that there is."""
    found = [(model, count) for model, count in models(capacity).items() if count]
    names = [f"{count} x {capacity.device}{'' if model == ANY_VARIANT else f' {model}'}" for model, count in found]
    return " + ".join(names)


def models(capacity: Capacity) -> dict[str, int]:
    """{model: how many devices of it}, also those of which nothing is left."""
    return {capacity.variant: capacity.devices, **dict(capacity.other_devices)}


def device_count(capacity: Capacity) -> int:
    """How many devices there are, of whatever model."""
    others = capacity.other_devices
    return capacity.devices + sum(count for _, count in others) if others else capacity.devices


def most_of_a_model(capacity: Capacity) -> int:
    """How many devices a task could have there at most."""
    others = capacity.other_devices
    return max((capacity.devices, *(count for _, count in others))) if others else capacity.devices


def of_model(need: Capacity, free: Capacity) -> Capacity:
    """What a worker with `free` gives for `need`: of devices of any model those of which fewest are left that are enough.

    So the larger groups stay for tasks that want many.
    """
    if not need.devices or not free.other_devices or need.variant != ANY_VARIANT:
        return need
    enough = [(count, model) for model, count in models(free).items() if count >= need.devices]
    return need.model_copy(update={"variant": min(enough)[1] if enough else free.variant})


def minus(free: Capacity, need: Capacity) -> Capacity:
    """What is left when `need` is given away."""
    return _changed(free, need, -1)


def withhold(free: Capacity, counts: Mapping[str, int]) -> Capacity:
    """What is left when so many devices, {model: count}, are withheld for the time being; none below zero."""
    if not counts:
        return free
    return free.model_copy(
        update={
            "devices": max(0, free.devices - counts.get(free.variant, 0)),
            "other_devices": tuple(
                (model, max(0, count - counts.get(model, 0))) for model, count in free.other_devices
            ),
        }
    )


def plus(free: Capacity, need: Capacity) -> Capacity:
    """What there is when `need` has come back."""
    return _changed(free, need, 1)


def plus_all(free: Capacity, needs: Iterable[Capacity]) -> Capacity:
    """What there is when all of `needs` have come back."""
    return functools.reduce(plus, needs, free)


def _changed(free: Capacity, need: Capacity, sign: int) -> Capacity:
    return free.model_copy(
        update={
            **(_changed_devices(free, need, sign) if need.devices or need.other_devices else {}),
            "cpu": round(free.cpu + sign * need.cpu, _DECIMALS),
            "memory": free.memory + sign * need.memory,
            "disk": free.disk + sign * need.disk,
            "tasks": None if free.tasks is None else free.tasks + sign * (need.tasks or 0),
            "resources": _changed_counts(free.resources, need.resources, sign) if need.resources else free.resources,
        }
    )


def _changed_devices(free: Capacity, need: Capacity, sign: int) -> dict[str, object]:
    """The fields about devices. What has no model of its own adds up what each model has."""
    if not free.other_devices and free.variant != NO_VARIANT:
        return {"devices": free.devices + sign * device_count(need)}
    left = models(free)
    is_sum = free.variant == NO_VARIANT
    of_any = 0
    for model, count in models(need if is_sum else of_model(need, free)).items():
        if is_sum or model in left:
            left[model] = left.get(model, 0) + sign * count
        else:
            of_any += count
    # Needs that were added up do not say who has devices of which model: workers give those first of which they have fewest.
    for model in sorted(left, key=lambda each: (left[each], each)) if sign < 0 and of_any else ():
        part = min(of_any, max(left[model], 0))
        left[model] -= part
        of_any -= part
    left[free.variant] += sign * of_any
    own = left.pop(free.variant)
    others = tuple(sorted((model, count) for model, count in left.items() if count or not is_sum))
    return {"devices": own, "other_devices": others}


def _changed_counts(free: Counts, need: Counts, sign: int) -> Counts:
    return combined(free, need, lambda left, count: left + sign * count)


@functools.lru_cache(maxsize=_KEPT_NEEDS)
def class_of(need: Capacity) -> CapacityClass | None:
    """The smallest class that covers `need`; None when it is beyond all levels, or asks for disk, labels, resources or other
    workers, or is of no one namespace.

    Those are in no class, so such a task is offered by name alone; a worker of a version without them is never asked.
    """
    cpu = _at_least(_CPU_LEVELS, need.cpu)
    memory = _at_least(_MEMORY_LEVELS, need.memory)
    count = 0 if need.devices == 0 else _at_least(_COUNT_LEVELS, need.devices)
    if cpu is None or memory is None or count is None:
        return None
    if need.disk or need.labels or need.resources or need.elsewhere or len(need.namespaces) != 1:
        return None
    device, variant = ("cpu", "none") if need.devices == 0 else (need.device, need.variant)
    return CapacityClass(need.namespaces[0], device, variant, int(count), cpu, int(memory))


def is_between_levels(need: Capacity, offered: CapacityClass) -> bool:
    """True when a worker may have room for `need` and yet not for the class above it."""
    return (need.cpu, need.memory, need.devices) != (offered.cpu, offered.memory, offered.devices)


def _at_least(levels: tuple[float, ...] | tuple[int, ...], value: float) -> float | None:
    return next((level for level in levels if level >= value), None)


def classes_covered(free: Capacity) -> frozenset[CapacityClass]:
    """Every class that a worker with `free` has room for."""
    if free.tasks is not None and free.tasks < 1:
        return frozenset()
    kinds: list[tuple[str, str, int]] = [("cpu", "none", 0)]
    most = most_of_a_model(free)
    if most:
        variants = {**models(free), ANY_VARIANT: most}
        kinds += [
            (free.device, variant, count)
            for variant, has in variants.items()
            for count in _COUNT_LEVELS
            if count <= has
        ]
    cpus, memories = bisect.bisect_right(_CPU_LEVELS, free.cpu), bisect.bisect_right(_MEMORY_LEVELS, free.memory)
    return _classes(free.namespaces, tuple(kinds), cpus, memories)


@functools.lru_cache(maxsize=1)  # what is free changes with each task, and seldom passes a level
def _classes(
    namespaces: tuple[Namespace, ...], kinds: tuple[tuple[str, str, int], ...], cpus: int, memories: int
) -> frozenset[CapacityClass]:
    """Those of the lowest so many levels."""
    places = itertools.product(namespaces, kinds, _CPU_LEVELS[:cpus], _MEMORY_LEVELS[:memories])
    return frozenset(
        [
            _tuple(CapacityClass, (namespace, device, variant, count, cpu, memory))
            for namespace, (device, variant, count), cpu, memory in places
        ]
    )


def describe(need: Capacity) -> str:
    """`2 CPUs, 4.0 GiB memory, 1 x gpu h100`, for a person."""
    cpu = f"{need.cpu:g} CPU{'' if need.cpu == 1 else 's'}"
    parts = [cpu, f"{describe_bytes(need.memory)} memory"]
    if need.disk:
        parts.append(f"{describe_bytes(need.disk)} disk")
    if device_count(need):
        parts.append(_devices(need))
    parts += words(need.resources)
    worker = worker_named(need.labels)
    parts += given_labels(need.labels)
    return ", ".join(parts) + (f", worker {worker}" if worker is not None else "")


def describe_bytes(size: int) -> str:
    """`1.5 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log(size, 1024)), len(units) - 1) if size > 0 else 0
    return f"{size / 1024**power:.4g} {units[power]}"


def misfit(need: Capacity, totals: list[tuple[str, Capacity]]) -> str:
    """Why no worker of `totals` (names and whole capacities) could ever run a task that needs `need`."""
    serving = [each for each in totals if serves(need, each[1])]
    if not serving:
        served = ", ".join(sorted({namespace for _, total in totals for namespace in total.namespaces}))
        return (
            f"no worker runs jobs of namespace {need.namespaces[0]} (those that there are run jobs of {served}): one needs credentials of "
            "its jobs (FLUSTER_JOB_CREDENTIALS_DIR, --job-credentials), and for its own, where these are signed, "
            f"`fluster credentials add worker NAME --namespace {need.namespaces[0]}`"
        )
    totals = serving
    labelled = [each for each in totals if has_labels(need, each[1])]
    worker = worker_named(need.labels)
    if worker is not None and worker not in (name for name, _ in totals):
        names = ", ".join(sorted(name for name, _ in totals)[:_NAMED]) + (" does" if len(totals) == 1 else " do")
        return f"needs {describe(need)}; no worker {worker} takes work now ({names})"
    if not labelled:
        known = sorted({label for _, total in totals for label in given_labels(total.labels)})
        wanted = given_labels(need.labels)
        if worker is not None:
            known = sorted(given_labels(next(total.labels for name, total in totals if name == worker)))
            return f"needs {describe(need)}; worker {worker} has no {' and '.join(wanted)} ({', '.join(known) or 'it has no labels'})"
        return f"needs {describe(need)}; no worker has {' and '.join(wanted)} ({', '.join(known) or 'none has labels'})"
    if need.devices and not any(has_devices(need, total) for _, total in labelled):
        known = sorted({_devices(total) for _, total in labelled if device_count(total)})
        most = f"; there is {', '.join(known)}" if known else "; none has any"
        return f"needs {describe(need)}; no worker has {_devices(need)}{most}"
    for name, count in need.resources:
        largest_count = max(dict(total.resources).get(name, 0) for _, total in labelled)
        if largest_count < count:
            lacking = f"no worker has {name}: {number_text(count)} (the most any has is {number_text(largest_count)})"
            return f"needs {describe(need)}; {lacking}"
    largest_name, largest = max(labelled, key=lambda each: (device_count(each[1]), each[1].cpu, each[1].memory))
    has = describe(largest.model_copy(update={"labels": given_labels(largest.labels)}))
    no_disk = ", no disk" if need.disk and not largest.disk else ""
    return f"needs {describe(need)}; the largest worker, {largest_name}, has {has}{no_disk}"
