"""A program that owns jobs ends, in the middle of what else becomes of them: a real server, a real controller, toy workers."""

from __future__ import annotations

import asyncio

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.errors import JobRefusedError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, OwnerReply, OwnerRequest
from fluster_bus.server import EmbeddedServer
from tests.component.controllers import NS, K, RunningController, S, StartController, StartWorker, job_request
from tests.component.toy_worker import STAY_RUNNING, ToyWorker
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

MINE = JobId("mine")


def _key(attempt: int, job_id: JobId = MINE) -> str:
    return buckets.attempt_key(NS, job_id, 0, attempt)


async def _tell_end(bus: Bus, owner: str) -> int:
    """How many jobs of it have not ended, or may still come, as its helper hears it."""
    request = OwnerRequest(owner=owner, ended=True)
    return (await bus.ask(subjects.jobs_verb(NS, "own"), request, OwnerReply)).unfinished


async def _replace(cluster: AsyncCluster, worker: ToyWorker, controller: RunningController) -> asyncio.Task[JobId]:
    """Have a job of the owner "old" run, and one of the owner "new" wait to take its place."""
    worker.obeys = False
    await cluster.launch(job_request("old", job_id=MINE, owner="old"))
    await wait_until_async(lambda: len(worker.held) == 1)
    new = job_request("new", job_id=MINE, on_conflict="replace", owner="new")
    replacing = asyncio.create_task(cluster.launch(new))
    await wait_until_async(lambda: worker.to_stop)
    assert controller.controller.intake.has_parked
    return replacing


async def test_what_replaces_a_job_of_it_is_not_its_own(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController
) -> None:
    worker = await start_worker(plan=STAY_RUNNING)
    replacing = await _replace(cluster, worker, controller)
    assert await _tell_end(cluster.bus, "old")
    await worker.end(_key(1), K, "stopped")
    await replacing
    await wait_until_async(lambda: worker.now_held() == [_key(2)])
    assert await _tell_end(cluster.bus, "old") == 0
    await worker.end(_key(2))
    assert (await cluster.wait(MINE, timeout=60)).status is S


async def test_its_end_is_told_on_until_all_that_it_submitted_is_recorded(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    first = await start_controller()
    worker = await start_worker(plan=STAY_RUNNING)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        replacing = await _replace(cluster, worker, first)
        assert await _tell_end(cluster.bus, "new") == 1, "it waits for the other to be gone"
        await first.stop()  # which alone has noted that the program has ended
        await start_controller()
        await worker.end(_key(1), K, "stopped")
        told = [await _tell_end(cluster.bus, "new")]
        await replacing
        while told[-1]:
            told.append(await _tell_end(cluster.bus, "new"))
        info = await cluster.wait(MINE, timeout=60)
        assert (info.status, info.name) == (K, "new")
        assert "new, has ended" in info.error_message


async def test_one_program_more_than_may_own_jobs_is_refused_by_name(
    cluster: AsyncCluster, controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller.controller.owners._leases, "_most", 1)  # noqa: SLF001 - the bound is for a whole cluster, too many to start
    await cluster.launch(job_request("one", owner="first"))
    await cluster.launch(job_request("two", owner="first"))
    with pytest.raises(JobRefusedError, match=r"1 programs own jobs in namespace .*, and 'second' would be one more"):
        await cluster.launch(job_request("three", owner="second"))
    await cluster.launch(job_request("four"))
