"""Passes on how far tasks are: at once, and again now and then, for a controller that was away."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError
from fluster_bus.messages import Progress, ProgressReport, TaskRecord

log = logging.getLogger(__name__)

_AGAIN_AFTER_S = 10.0
_MAX_DOING = 200


@dataclass
class _Told:
    report: ProgressReport
    told_at: float


class ProgressPump:
    """The newest word of each attempt that runs here."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._told: dict[str, _Told] = {}  # {attempt key: its newest word}

    async def tell(self, key: str, record: TaskRecord, progress: Progress) -> None:
        """Pass on what an attempt says."""
        await self._tell(key, record, progress, is_preparing=False)

    async def tell_preparing(self, key: str, record: TaskRecord, doing: str) -> None:
        """Pass on what is being done before an attempt can start."""
        await self._tell(key, record, Progress(fraction=0.0, message=doing[:_MAX_DOING]), is_preparing=True)

    async def _tell(self, key: str, record: TaskRecord, progress: Progress, *, is_preparing: bool) -> None:
        report = ProgressReport(
            namespace=record.namespace,
            job_id=record.job_id,
            task=record.task,
            attempt=record.attempt,
            progress=progress,
            is_preparing=is_preparing,
        )
        self._told[key] = _Told(report, time.monotonic())
        await self._publish(report)

    def forget(self, key: str) -> None:
        """The attempt is over."""
        self._told.pop(key, None)

    async def repeat_forever(self) -> None:
        """Pass on again what was told a while ago."""
        while True:
            await asyncio.sleep(_AGAIN_AFTER_S / 4)
            now = time.monotonic()
            for told in list(self._told.values()):
                if now - told.told_at >= _AGAIN_AFTER_S:
                    told.told_at = now
                    await self._publish(told.report)

    async def _publish(self, report: ProgressReport) -> None:
        subject = subjects.watch_progress(report.namespace, report.job_id, str(report.task))
        try:
            await self._bus.publish(subject, report.to_json())
        except BusError as error:
            log.info("the progress of %s.%d is reported later: %s", report.job_id, report.task, error)
