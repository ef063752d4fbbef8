"""The VMs that are not there now though they should be, and why, as the backend that keeps them says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.core.fault_log import FaultLog
from fluster_bus.messages import VMTrouble, WorkerId

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus
    from fluster_bus.core.delivery import Delivery

log = logging.getLogger(__name__)

_MAX_VMS = 10_000


class VMTroubles:
    """What was said last about each. Nothing is kept of it: it is said again for as long as it is so."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._faults = FaultLog(log)
        self._known: dict[WorkerId, tuple[str, float]] = {}  # {VM: (why it is not there, until when that counts)}

    async def listen(self, bus: Bus) -> None:
        """Hear what is said from now on."""
        await bus.subscribe(subjects.vm_trouble(), self._on_message)

    def _on_message(self, delivery: Delivery) -> None:
        with self._faults.contained("what is said of a VM cannot be used"):
            self.hear(VMTrouble.from_json(delivery.data))

    def hear(self, told: VMTrouble) -> None:
        """A VM is in trouble, or no longer."""
        self._known.pop(told.vm_id, None)
        if told.trouble and len(self._known) < _MAX_VMS:
            self._known[told.vm_id] = (told.trouble, self._now() + told.counts_for_s)

    def told(self, working: Collection[WorkerId]) -> list[tuple[WorkerId, str]]:
        """Those that are in trouble by name, and why, but for the ones whose workers are at work."""
        now = self._now()
        self._known = {vm_id: (why, until) for vm_id, (why, until) in self._known.items() if until > now}
        return [(vm_id, why) for vm_id, (why, _until) in sorted(self._known.items()) if vm_id not in working]
