"""Waiting callers learn that the connection is lost, and that it is back; and how long they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.cluster.outages import Outage, Step
from fluster.errors import ConnectionLostError
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, JobStatus
from fluster_bus.server import EmbeddedServer
from tests.component.controllers import NS, RunningController, job_request

pytestmark = pytest.mark.anyio

TIMEOUT_S = 60


async def _log(cluster: AsyncCluster, job_id: JobId) -> None:
    async for _line in cluster.logs(job_id, follow=True):
        pass


async def _watch(cluster: AsyncCluster, job_id: JobId) -> None:
    async for _info in cluster.watch(job_id):
        pass


WAITS: dict[str, Callable[[AsyncCluster, JobId], Awaitable[object]]] = {
    "wait": AsyncCluster.wait,
    "result": AsyncCluster.result,
    "watch": _watch,
    "logs": _log,
}


def test_what_is_done_about_a_lost_connection() -> None:
    outage = Outage(since=100.0)
    told = Outage(since=100.0, told=True)
    assert outage.step(104.9, patience_s=None, is_gone=False) is Step.WAIT
    assert outage.step(105.0, patience_s=None, is_gone=False) is Step.TELL
    assert told.step(1e9, patience_s=None, is_gone=False) is Step.WAIT
    assert told.step(699.9, patience_s=600, is_gone=False) is Step.WAIT
    assert told.step(700.0, patience_s=600, is_gone=False) is Step.GIVE_UP
    assert outage.step(100.0, patience_s=None, is_gone=True) is Step.GIVE_UP


async def test_who_waits_is_told_of_a_loss_and_that_it_is_over(
    own_server: EmbeddedServer, cluster: AsyncCluster, controller: RunningController
) -> None:
    del controller  # it is there
    lines: asyncio.Queue[str] = asyncio.Queue()
    cluster.outages.tell = lines.put_nowait
    job_id = await cluster.launch(job_request())
    waiting = asyncio.create_task(cluster.wait(job_id))
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.to_thread(own_server.stop)
        assert "is lost: waiting until it is back" in await lines.get()
        await asyncio.to_thread(own_server.start)
        assert "is back after" in await lines.get()
        await cluster.bus.wait_connected()
        await cluster.terminate(job_id)
        assert (await waiting).status in {JobStatus.KILLED, JobStatus.UNSCHEDULABLE}
    assert lines.empty()


@pytest.mark.parametrize("way", WAITS)
@pytest.mark.parametrize("ends_by", ["patience", "end of the cluster"])
async def test_a_wait_ends_when_the_connection_is_lost_for_too_long(
    own_server: EmbeddedServer, controller: RunningController, tmp_path: Path, way: str, ends_by: str
) -> None:
    del controller
    file = tmp_path / "address.json"
    own_server.credentials(Role.CLIENT, NS).save(file)
    async with await AsyncCluster.connect(str(file), patience=0.1 if ends_by == "patience" else None) as cluster:
        job_id = await cluster.launch(job_request())
        waiting = asyncio.ensure_future(WAITS[way](cluster, job_id))
        await cluster.poll(job_id)
        if ends_by != "patience":
            file.unlink()
        await asyncio.to_thread(own_server.stop)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(ConnectionLostError, match="waited for no longer"):
                await waiting
            with pytest.raises(ConnectionLostError):
                await WAITS["wait"](cluster, job_id)
