"""What a worker of one namespace says of the progress of another's tasks is passed over: its user may not send there, nor does it count."""

from __future__ import annotations

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, Namespace, Progress, ProgressReport
from fluster_bus.server import EmbeddedServer
from fluster_services.controller.state.job_index import JobKey
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController, StartWorker, job_request
from tests.component.toy_worker import STAY_RUNNING
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


def _word(job: JobId, task: int, fraction: float) -> ProgressReport:
    return ProgressReport(namespace=NS, job_id=job, task=task, attempt=1, progress=Progress(fraction=fraction))


async def _say(bus: Bus, namespace: str, job: str, task: int, word: bytes) -> None:
    await bus.publish(subjects.watch_progress(namespace, job, str(task)), word)


async def test_progress_counts_where_it_was_said(
    cluster: AsyncCluster,
    controller: RunningController,
    start_worker: StartWorker,
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
) -> None:
    worker = await start_worker(plan=STAY_RUNNING)
    job = await cluster.launch(job_request(replicas=2))
    await wait_until_async(lambda: len(worker.held) == 2)
    board, key = controller.controller.progress, JobKey(NS, job)
    bus = await connect_bus(own_server, Role.SERVICE, name="speaker")
    true = _word(job, 0, 0.5).to_json()

    async def is_heard() -> bool:
        await _say(bus, NS, job, 0, true)
        return board.of(key) == {0: Progress(fraction=0.5)}

    await wait_until_async(is_heard)
    forged = _word(job, 0, 0.9).to_json()
    for namespace, name, task in (("other", job, 0), (Namespace(NS), "another", 0), (NS, job, 1)):
        await _say(bus, namespace, name, task, forged)
    await _say(bus, NS, job, 0, b"{")
    await _say(bus, NS, job, 1, _word(job, 1, 0.25).to_json())
    await wait_until_async(lambda: len(board.of(key)) == 2)
    assert board.of(key) == {0: Progress(fraction=0.5), 1: Progress(fraction=0.25)}
