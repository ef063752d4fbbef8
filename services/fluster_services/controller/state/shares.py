"""What each namespace may have at once and what it has, and so which of several goes first.

A quota bounds what the tasks of a namespace take together: those that workers hold, and those that are on offer. Of namespaces
whose tasks wait with equal priority that one goes first which has least of the cluster for its weight: by its dominant share,
the largest of its parts of all CPUs, of all memory and of all devices (Ghodsi et al., Dominant Resource Fairness, 2011).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fluster_bus.messages import Capacity, Namespace
from fluster_bus.messages.namespaces import NamespaceQuota, NamespaceRecord
from fluster_services.capacity import describe_bytes, device_count

_UNBOUNDED = NamespaceQuota()


class Amount(NamedTuple):
    """So much of what a quota bounds. Thousandths of a CPU, as whole numbers, come out even whatever is added up."""

    milli_cpus: float = 0
    memory: float = 0  # bytes
    devices: float = 0  # GPUs, and other accelerators

    @classmethod
    def of(cls, need: Capacity, count: int = 1) -> Amount:
        """What `count` such tasks take."""
        return cls(count * round(need.cpu * 1000), count * need.memory, count * device_count(need))


NOTHING = Amount()


@dataclass(slots=True)
class _Tenant:
    quota: NamespaceQuota = _UNBOUNDED
    weight: float = 1.0
    cpu: float = 0.0  # a sum of thousandths, to far less than half of one
    memory: int = 0
    devices: int = 0

    @property
    def used(self) -> Amount:
        return Amount(round(self.cpu * 1000), self.memory, self.devices)

    @property
    def limits(self) -> Amount:
        quota = self.quota
        return Amount(
            math.inf if quota.cpus is None else round(quota.cpus * 1000),
            math.inf if quota.memory is None else quota.memory,
            math.inf if quota.gpus is None else quota.gpus,
        )


class Shares:
    """What is known of all namespaces; one that it has heard nothing of has no quota, and the weight 1."""

    def __init__(self) -> None:
        self._tenants: dict[Namespace, _Tenant] = {}
        self._total = NOTHING
        self.bounded: dict[Namespace, Amount] = {}  # {namespace with a quota: the most that it may have}
        self.on_freed: Callable[[], None] = _nothing  # a namespace with a quota may have more than before

    def _tenant(self, namespace: Namespace) -> _Tenant:
        tenant = self._tenants.get(namespace)
        if tenant is None:
            tenant = self._tenants[namespace] = _Tenant()
        return tenant

    # ---- events -----------------------------------------------------------------------------------------

    def on_namespace(self, record: NamespaceRecord) -> None:
        """From now on this is its quota, and its weight."""
        tenant = self._tenant(record.name)
        tenant.quota, tenant.weight = record.quota, record.weight
        limits = tenant.limits
        self.bounded.pop(record.name, None)
        if limits != (math.inf,) * len(limits):
            self.bounded[record.name] = limits
        self.on_freed()

    def on_namespace_gone(self, namespace: Namespace) -> None:
        """It has no record: it has no quota, and the weight 1."""
        self.on_namespace(NamespaceRecord(name=namespace))

    def on_total(self, total: Amount) -> None:
        """So much the workers have that take work."""
        self._total = total

    def take(self, namespace: Namespace, need: Capacity) -> None:
        """A task is offered, or held by a worker."""
        tenant = self._tenants.get(namespace) or self._tenant(namespace)
        tenant.cpu += need.cpu
        tenant.memory += need.memory
        tenant.devices += need.devices

    def give_back(self, namespace: Namespace, need: Capacity) -> None:
        """A task is neither offered nor held now that was."""
        tenant = self._tenants[namespace]
        tenant.cpu -= need.cpu
        tenant.memory -= need.memory
        tenant.devices -= need.devices
        if namespace in self.bounded:
            self.on_freed()

    # ---- quotas -----------------------------------------------------------------------------------------

    def used(self, namespace: Namespace) -> Amount:
        """What its tasks take that are held or offered."""
        tenant = self._tenants.get(namespace)
        return tenant.used if tenant is not None else NOTHING

    def quota(self, namespace: Namespace) -> NamespaceQuota:
        tenant = self._tenants.get(namespace)
        return tenant.quota if tenant is not None else _UNBOUNDED

    def fits(self, namespace: Namespace, need: Capacity, count: int = 1, *, beside: Amount = NOTHING) -> bool:
        """True when the quota has room for so many more such tasks, and for what is to be left `beside` them.

        What a task needs nothing of is never short for it.
        """
        limits = self.bounded.get(namespace)
        if limits is None:
            return True
        tenant, cpus = self._tenants[namespace], count * round(need.cpu * 1000)
        return (
            (not cpus or round(tenant.cpu * 1000) + cpus + beside.milli_cpus <= limits.milli_cpus)
            and (not need.memory or tenant.memory + count * need.memory + beside.memory <= limits.memory)
            and (not need.devices or tenant.devices + count * need.devices + beside.devices <= limits.devices)
        )

    def could_fit(self, namespace: Namespace, need: Capacity, count: int = 1) -> bool:
        """True when the quota has room for them while nothing else of the namespace runs."""
        limits = self.bounded.get(namespace)
        return limits is None or all(more <= limit for more, limit in zip(Amount.of(need, count), limits, strict=True))

    # ---- shares -----------------------------------------------------------------------------------------

    def max_priority(self, namespace: Namespace) -> int:
        """A higher priority of its tasks counts as this one beside tasks of others."""
        return self.quota(namespace).max_priority

    def part(self, namespace: Namespace) -> float:
        """Its dominant share: the part of the cluster that it has, of what it has most of."""
        tenant = self._tenants.get(namespace)
        if tenant is None:
            return 0.0
        cpus, memory, devices = self._total
        return max(
            round(tenant.cpu * 1000) / cpus if cpus else 0.0,
            tenant.memory / memory if memory else 0.0,
            tenant.devices / devices if devices else 0.0,
        )

    def weight(self, namespace: Namespace) -> float:
        tenant = self._tenants.get(namespace)
        return tenant.weight if tenant is not None else 1.0

    def weighed(self, namespace: Namespace) -> float:
        """Its dominant share for its weight: who has least goes first."""
        return self.part(namespace) / self.weight(namespace)

    # ---- in words ---------------------------------------------------------------------------------------

    def why_short(self, namespace: Namespace, need: Capacity, count: int = 1) -> str | None:
        """Why the quota keeps so many such tasks waiting; None when it does not."""
        limits = self.bounded.get(namespace)
        if limits is None or self.fits(namespace, need, count):
            return None
        if not self.could_fit(namespace, need, count):
            return self.why_never(namespace, need, count)
        wanted, used = Amount.of(need, count), self.used(namespace)
        short = [
            f"{_words(kind, has)[0]} of {' '.join(_words(kind, limit))} are used"
            + (f", and {'they need' if count > 1 else 'it needs'} {_words(kind, more)[0]}" if has < limit else "")
            for kind, more, has, limit in zip(_KINDS, wanted, used, limits, strict=True)
            if more and has + more > limit
        ]
        return f"waits for the quota of namespace {namespace}: {'; '.join(short)}"

    def why_never(self, namespace: Namespace, need: Capacity, count: int = 1) -> str | None:
        """Why the quota never has room for so many such tasks, and what helps; None when it may."""
        limits = self.bounded.get(namespace)
        if limits is None or self.could_fit(namespace, need, count):
            return None
        beyond = [
            (kind, more, limit)
            for kind, more, limit in zip(_KINDS, Amount.of(need, count), limits, strict=True)
            if more > limit
        ]
        needs = " and ".join(" ".join(_words(kind, more)) for kind, more, _ in beyond)
        has = " and ".join(" ".join(_words(kind, limit)) for kind, _, limit in beyond)
        options = " ".join(f"{_OPTIONS[kind]} {_option_value(kind, more)}" for kind, more, _ in beyond)
        who = f"its {count} tasks need {needs} together" if count > 1 else f"it needs {needs}"
        return (
            f"{who}, more than the quota of namespace {namespace} ever has room for ({has}): ask for less, or have an operator "
            f"raise it (`fluster namespace set {namespace} {options}`)"
        )

    def compared(self, first: Namespace, second: Namespace) -> str:
        """That the first goes before the second, and what both have."""
        weights = self.weight(first), self.weight(second)
        weighed = "equal weights" if weights[0] == weights[1] else f"with weights {weights[0]:g} and {weights[1]:g}"
        return (
            f"namespace {first} goes first: it holds {100 * self.part(first):.3g} % of the cluster, "
            f"{second} {100 * self.part(second):.3g} %, {weighed}"
        )

    def why_no_more_jobs(self, namespace: Namespace, waiting: int) -> str | None:
        """Why no job more may wait beside those that do; None when one may."""
        limit = self.quota(namespace).waiting_jobs
        if limit is None or waiting < limit:
            return None
        return (
            f"{waiting} jobs of namespace {namespace} wait, as many as its quota allows ({limit}): submit it again when some of "
            f"them have started, or have an operator raise it (`fluster namespace set {namespace} --waiting-jobs N`)"
        )


_KINDS = ("milli_cpus", "memory", "devices")
_OPTIONS = dict(zip(_KINDS, ("--cpus", "--memory", "--gpus"), strict=True))


def _words(kind: str, amount: float) -> tuple[str, str]:
    """A number, and of what."""
    match kind:
        case "milli_cpus":
            return f"{amount / 1000:g}", "CPU" if amount == 1000 else "CPUs"
        case "memory":
            return describe_bytes(int(amount)), "memory"
        case _:
            return f"{amount:g}", "GPU" if amount == 1 else "GPUs"


def _option_value(kind: str, amount: float) -> str:
    return f"{amount / 1000:g}" if kind == "milli_cpus" else f"{int(amount)}"


def _nothing() -> None:
    """Before a listener is set."""
