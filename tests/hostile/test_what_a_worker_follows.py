"""Whatever a worker meets where it starts, follows or ends one attempt, that attempt ends, and the worker goes on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, JobStatus, WorkerId
from fluster_bus.messages.parts.resources import GIB
from fluster_bus.server import EmbeddedServer
from fluster_services.worker.contract.attempt_records import ExitRecord, LaunchSpec
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.contract.runtime import Exited, Progressed, RunningTask, Spooled
from fluster_services.worker.contract.spool import SpoolRecord, SpoolRun
from fluster_services.worker.presence.presence import Draining
from fluster_services.worker.worker import Worker
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, job_request
from tests.component.no_runtime import NoRuntime

pytestmark = pytest.mark.anyio

PATIENCE_S = 60
ENDED = ExitRecord(exit_code=0, signal=None, reason="exited")
WITH_RESULT = dataclasses.replace(ENDED, result_bytes=8)


class _Odd:
    """An attempt that breaks in one place, as no task is known to do."""

    pid, started_at, folder = 1, 1.0, Path()

    def __init__(self, spec: LaunchSpec, breaks_in: str) -> None:
        self.spec = spec
        self.key = spec.key
        self._breaks_in = breaks_in

    def note(self, place: str) -> None:
        if place == self._breaks_in:
            raise LookupError(f"{place} is odd")

    async def events(self) -> AsyncIterator[Spooled | Progressed | Exited]:
        self.note("events")
        yield Exited(WITH_RESULT if self._breaks_in == "read_result" else ENDED)

    def read_log(self, start_offset: int = 0, *, max_bytes: int = 0) -> tuple[list[SpoolRun], int]:
        self.note("read_log")
        return [], start_offset

    def read_result(self, start: int, max_bytes: int) -> bytes:
        self.note("read_result")
        return b""

    def read_log_end(self, *, max_bytes: int) -> tuple[list[SpoolRecord], bool]:
        return [], True

    async def flush(self) -> None: ...

    def kill(self, grace_s: float, reason: str, *, preempted: bool = False) -> None: ...

    def renew(self, fence_after_s: float | None) -> None: ...

    async def forget(self) -> None:
        self.note("forget")


class _OddRuntime(NoRuntime):
    """Its tasks break where their names say."""

    async def start(self, spec: LaunchSpec, payload: bytes | None = None) -> RunningTask:
        odd = _Odd(spec, spec.key.split(".")[1].replace("-", "_"))
        odd.note("start")
        return odd


async def test_an_attempt_that_breaks_ends_alone(
    cluster: AsyncCluster, own_server: EmbeddedServer, connect_bus: ConnectBus, tmp_path: Path
) -> None:
    config = WorkerConfig(
        address=own_server.credentials(Role.SERVICE),
        worker_id=WorkerId("w1"),
        state_dir=tmp_path,
        total=Capacity(cpu=4, memory=8 * GIB),
        job_credentials={NS: own_server.credentials(Role.JOB, NS)},
    )
    ready = asyncio.Event()
    worker = Worker(await connect_bus(own_server, Role.SERVICE), config, _OddRuntime(), Draining())
    running = asyncio.create_task(worker.run(ready.set))
    await ready.wait()
    for place in ("start", "events", "read-log", "read-result"):
        job = await cluster.launch(job_request(job_id=place))
        info = await cluster.wait(job, timeout=PATIENCE_S, raise_on_failure=False)
        assert info.status is JobStatus.FAILED
        assert f"{place.replace('-', '_')} is odd" in info.error_message
    for place in ("forget", "well"):
        job = await cluster.launch(job_request(job_id=place))
        assert (await cluster.wait(job, timeout=PATIENCE_S)).status is JobStatus.SUCCEEDED
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})
