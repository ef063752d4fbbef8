"""How large a VM is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fluster_bus.messages import Capacity, parse_size
from fluster_bus.messages.parts.resources import as_words, check_labels
from fluster_services.vm.backend import VMError


def usual_size(
    cpus: float, memory: int | str, *, disk: int | str | None = None, labels: Mapping[str, str] | None = None
) -> Capacity:
    """What a VM has for whose size nobody asked. Raises ValueError."""
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
