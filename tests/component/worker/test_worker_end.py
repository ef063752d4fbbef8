"""A worker that ends because it can start nothing takes no more work."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fluster.cluster import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, Entrypoint, JobRequest, JobStatus, Namespace, ResourceConfig, WorkerId
from fluster_bus.messages.parts.resources import GIB
from fluster_bus.server import EmbeddedServer
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.contract.faults import WorkerFaultError
from fluster_services.worker.presence.presence import Draining
from fluster_services.worker.worker import Worker
from tests.component.conftest import ConnectBus
from tests.component.controllers import StartWorker
from tests.component.no_runtime import NoRuntime

pytestmark = pytest.mark.anyio

NS = Namespace("default")
ID = WorkerId("broken")


class BreakingRuntime(NoRuntime):
    """Breaks when told to, and takes its time to close."""

    def __init__(self) -> None:
        self.breaks, self.closes, self.may_close = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait_broken(self) -> WorkerFaultError:
        await self.breaks.wait()
        return WorkerFaultError("nothing can be started here")

    async def close(self) -> None:
        self.closes.set()
        await self.may_close.wait()


async def test_what_is_offered_while_it_ends_goes_to_another_uncharged(
    cluster: AsyncCluster,
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    start_worker: StartWorker,
    tmp_path: Path,
) -> None:
    config = WorkerConfig(
        address=own_server.credentials(Role.SERVICE),
        worker_id=ID,
        state_dir=tmp_path,
        total=Capacity(cpu=1.75, memory=8 * GIB),
        job_credentials={NS: own_server.credentials(Role.JOB, NS)},
    )
    runtime, ready, offered = BreakingRuntime(), asyncio.Event(), asyncio.Event()
    bus: Bus = await connect_bus(own_server, Role.SERVICE)
    running = asyncio.create_task(Worker(bus, config, runtime, Draining()).run(ready.set))
    await ready.wait()

    def on_offer(_offer: Delivery) -> None:
        offered.set()

    watching = await connect_bus(own_server)
    await watching.subscribe(subjects.worker_verb(ID, "offer"), on_offer)
    await watching.flush()
    runtime.breaks.set()
    await runtime.closes.wait()
    odd = ResourceConfig(cpu=1.5, memory=GIB)  # between two levels, so it is offered by name
    job_id = await cluster.launch(
        JobRequest(name="odd", entrypoint=Entrypoint(command=("true",)), resources=odd, max_retries_preemption=0)
    )
    await asyncio.wait_for(offered.wait(), 60)
    await start_worker("w0")
    info = await cluster.wait(job_id, timeout=30)
    assert (info.status, info.tasks[0].worker_id) == (JobStatus.SUCCEEDED, "w0")
    runtime.may_close.set()
    with pytest.raises(ExceptionGroup):
        await running
