"""Programs that have no version of the wire in common say so, name both, and which is to be updated."""

from __future__ import annotations

import asyncio

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import WireVersionError
from fluster_bus.core.roles import Role
from fluster_bus.core.version import VERSION
from fluster_bus.messages import Capacity, JobStatus, NamespaceReply, NamespaceRequest, WorkerId, WorkerInfo
from fluster_bus.messages.parts.wire_range import SPOKEN, WireRange
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.provisioning import ensure_namespace, ensure_system
from fluster_bus.storage.streams import workers_table
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController, StartWorker, job_request
from tests.component.toy_worker import GIB
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

LATER = WireRange(newest=SPOKEN.newest + 8, oldest=SPOKEN.newest + 7)
ENSURE = subjects.ensure_namespace(NS)


async def test_a_controller_refuses_a_client_of_another_wire(cluster: AsyncCluster) -> None:
    with pytest.raises(WireVersionError) as refused:
        await cluster.bus.ask(ENSURE, NamespaceRequest(wire=LATER), NamespaceReply)
    assert f"the program that asks speaks {LATER}" in str(refused.value)
    assert str(refused.value).endswith(f"update the cluster's controller (fluster {VERSION})")
    told = await cluster.bus.ask(ENSURE, NamespaceRequest(), NamespaceReply)  # as from before there were versions
    assert (told.wire, told.version) == (SPOKEN, VERSION)


async def test_a_client_leaves_a_cluster_of_another_wire(own_server: EmbeddedServer, connect_bus: ConnectBus) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    await ensure_system(bus)
    await ensure_namespace(bus, NS)

    async def answer(request: NamespaceRequest, _subject: str) -> NamespaceReply:
        assert request.wire == SPOKEN
        return NamespaceReply(wire=LATER, version="9.1")

    await bus.serve(ENSURE, NamespaceRequest, answer)
    with pytest.raises(WireVersionError) as refused:
        await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS))
    assert f"the cluster's controller (fluster 9.1) speaks {LATER}" in str(refused.value)
    assert str(refused.value).endswith(f"update this program (fluster {VERSION})")


async def test_a_worker_of_another_wire_gets_nothing_and_is_told_of(
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    controller: RunningController,
    cluster: AsyncCluster,
    start_worker: StartWorker,
) -> None:
    operator: Bus = await connect_bus(own_server)
    total = Capacity(cpu=4, memory=8 * GIB, namespaces=(NS,))
    later = WorkerInfo(
        worker_id=WorkerId("w9"),
        host="h",
        pid=1,
        total=total,
        version="9.1",
        python="3",
        started_at=0,
        wire=LATER,
    )
    await workers_table(operator).put("w9", later)

    async def troubles() -> dict[str, str]:
        return {each.info.worker_id: each.info.trouble for each in await cluster.list_workers()}

    await wait_until_async(troubles)
    trouble = (await troubles())["w9"]
    assert f"worker w9 (fluster 9.1) speaks {LATER}" in trouble
    assert trouble.endswith(f"update the cluster's controller (fluster {VERSION})")
    job_id = await cluster.launch(job_request())
    assert trouble in await cluster.explain(job_id)
    await start_worker()
    async with asyncio.timeout(60):
        ended = await cluster.wait(job_id)
    assert (ended.status, ended.worker_id) == (JobStatus.SUCCEEDED, "w1")
