"""Holds tasks that asked for disk to it: what each has in its own folder is measured now and then, and who has more is stopped.

Only its own folder counts, with its log and what it returns. What it writes elsewhere, such as in a `cwd` of its user's, does not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Mapping

from fluster_bus.messages import JobStatus
from fluster_services.capacity import describe_bytes
from fluster_services.worker.folder_cache import size_of
from fluster_services.worker.outcome import Outcome
from fluster_services.worker.runtime import RunningTask

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
_MEASURING_COSTS = 20  # measured so seldom that it takes one part in so many of the time
_OVER = "over its disk limit of "


class DiskWatch:
    """Watches what runs at one worker."""

    def __init__(self, running: Mapping[str, RunningTask], *, grace_s: float) -> None:
        self._running = running
        self._grace_s = grace_s

    async def run(self) -> None:
        """Measure and stop, until cancelled."""
        pause_s = INTERVAL_S
        while True:
            await asyncio.sleep(pause_s)
            began_at = time.monotonic()
            for running in [each for each in self._running.values() if each.spec.disk]:
                size = await asyncio.to_thread(size_of, running.folder)
                told = why_over(size, running.spec.disk)
                if told is not None:
                    log.warning("%s is stopped: %s", running.key, told)
                    running.kill(self._grace_s, told)
            pause_s = max(INTERVAL_S, _MEASURING_COSTS * (time.monotonic() - began_at))


def why_over(size: int, limit: int | None) -> str | None:
    """Why an attempt with `size` bytes in its own folder is to be stopped; None when it may go on."""
    if not limit or size <= limit:
        return None
    return f"{_OVER}{describe_bytes(limit)}: its own folder has {describe_bytes(size)}"


def failed_if_over(outcome: Outcome) -> Outcome:
    """The outcome of an attempt; that it was stopped for its disk is a failure of its own, and nobody's wish."""
    if outcome.state is not JobStatus.KILLED or not outcome.reason.startswith(_OVER):
        return outcome
    return dataclasses.replace(outcome, state=JobStatus.FAILED, reason=f"stopped: {outcome.reason}")
