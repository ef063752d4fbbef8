"""A runtime for workers whose tasks get nowhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fluster_services.worker.contract.attempt_records import LaunchSpec
from fluster_services.worker.contract.faults import WorkerFaultError
from fluster_services.worker.contract.runtime import RunningTask


class NoRuntime:
    """Nothing gets so far as to be started."""

    async def start(self, spec: LaunchSpec, payload: bytes | None = None) -> RunningTask:
        raise AssertionError(f"{spec.key} was started")

    async def adopt(self) -> list[RunningTask]:
        return []

    def renew(self, ended_in_s: float) -> None:
        """Nothing runs that could be ended."""

    def trouble(self) -> str | None:
        return None

    def places(self) -> list[Path]:
        return []

    def examine(self) -> str | None:
        return None

    async def wait_broken(self) -> WorkerFaultError:
        await asyncio.Event().wait()
        raise AssertionError

    def limits(self) -> str:
        return ""

    async def close(self) -> None:
        pass
