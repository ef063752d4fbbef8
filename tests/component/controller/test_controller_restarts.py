"""Controllers, servers and submissions that are interrupted: what goes on, and what was meant all the same."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.core.errors import StorageError
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobStatus, Namespace
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage import submissions as submissions_module
from fluster_bus.storage.provisioning import ensure_system
from fluster_bus.storage.streams import tasks_table
from fluster_services.controller.leading.record_writer import RecordUpdate
from tests.component.conftest import ConnectBus, kill_server
from tests.component.controllers import (
    IMPATIENT,
    NS,
    F,
    K,
    RunningController,
    S,
    StartController,
    StartWorker,
    U,
    are_registered,
    check_events,
    job_request,
    published_events,
)
from tests.component.toy_worker import FAIL, GIB, STAY_RUNNING, SUCCEED, Plan, started_at_most_once
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


# ---- deadlines and restarts -----------------------------------------------------------------------------


async def test_a_scheduling_timeout_goes_on_however_often_the_controller_is_restarted(
    own_server: EmbeddedServer, start_controller: StartController
) -> None:
    running = await start_controller()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        launched_at = time.monotonic()
        job_id = await cluster.launch(job_request(scheduling_timeout_s=2))
        async with asyncio.timeout(60):
            while (info := await cluster.poll(job_id)).status is JobStatus.PENDING:
                await running.stop()
                running = await start_controller()
        assert info.status is U
        assert time.monotonic() - launched_at >= 2


async def test_a_task_whose_time_is_over_is_given_up_also_when_that_could_not_be_written_at_first(
    cluster: AsyncCluster, controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = controller.controller.writer.verdicts
    write = verdicts.write
    refused: list[Sequence[RecordUpdate]] = []

    async def write_later(namespace: Namespace, updates: Sequence[RecordUpdate]) -> list[int | None]:
        if len(refused) < 2:
            refused.append(updates)
            raise StorageError("the disk is full")
        return await write(namespace, updates)

    monkeypatch.setattr(verdicts, "write", write_later)
    info = await cluster.wait(await cluster.launch(job_request(scheduling_timeout_s=0.1)), timeout=60)
    assert (info.status, len(refused)) == (U, 2)


async def test_a_pause_goes_on_however_often_the_controller_is_restarted(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    running = await start_controller()
    worker = await start_worker(plan=FAIL)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        request = job_request(max_retries_failure=1).model_copy(update={"retry_backoff_s": 2.0})
        failed_at = time.monotonic()
        job_id = await cluster.launch(request)
        await wait_until_async(lambda: worker.starts)
        async with asyncio.timeout(60):
            while len(worker.starts) < 2:
                await running.stop()
                running = await start_controller()
        info = await cluster.wait(job_id, timeout=60)
        assert (info.status, info.tasks[0].attempt) == (F, 2)
        assert time.monotonic() - failed_at >= 1.4, "spread by a quarter"


# ---- restarts -------------------------------------------------------------------------------------------


async def test_a_job_submitted_without_a_controller(
    own_server: EmbeddedServer, start_controller: StartController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions_module, "_ACK_WAIT_S", 1)
    controller = await start_controller()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        await controller.stop()
        job_id = await cluster.launch(job_request())
        polling = asyncio.create_task(cluster.poll(job_id))
        await start_controller()
        assert (await polling).status is JobStatus.PENDING
        await cluster.terminate(job_id)
        assert (await cluster.wait(job_id, timeout=60)).status is K


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_controllers_come_and_go_while_jobs_run_through(
    own_server: EmbeddedServer,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    start_controller: StartController,
    seed: int,
) -> None:
    monkeypatch.setattr(submissions_module, "_ACK_WAIT_S", 1)
    dice = random.Random(seed)

    def plan(record: object) -> Plan:
        return dice.choice((SUCCEED, SUCCEED, SUCCEED, FAIL))

    controller = await start_controller()
    workers = [await start_worker(f"w{each}", plan, cpu=3, memory=3 * GIB) for each in range(2)]
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        submitting = asyncio.create_task(
            cluster.launch_many(
                [job_request(f"job{each}", max_retries_failure=2, replicas=1 + each % 2) for each in range(100)]
            )
        )
        for _ in range(6):
            await asyncio.sleep(dice.uniform(0, 0.25))  # any moment is meant
            await controller.stop()
            controller = await start_controller()
        jobs = await submitting
        ended = await cluster.wait(jobs, timeout=100)
        assert len(ended) == 100
        assert {info.status for info in ended} <= {S, F, K}
        assert started_at_most_once(*workers)
        for info in ended:
            assert all(task.attempt <= 3 for task in info.tasks)
        await check_events(cluster.bus, jobs)
        # Once more from nothing: a controller that has only the records tells nothing twice.
        told = Counter(
            (event.job_id, event.task, event.transition.number) for event in await published_events(cluster.bus)
        )
        await controller.stop()
        await start_controller()
        job_id = await cluster.launch(job_request("last"))
        await cluster.wait(job_id, timeout=60)
        await check_events(cluster.bus, [*jobs, job_id])
        again = Counter(
            (event.job_id, event.task, event.transition.number) for event in await published_events(cluster.bus)
        )
        assert max(again.values()) == 1
        assert told.keys() <= again.keys()


@pytest.mark.slow
async def test_a_restart_of_the_bus_loses_no_healthy_worker(
    own_server: EmbeddedServer, start_worker: StartWorker, start_controller: StartController
) -> None:
    await start_controller(IMPATIENT)
    workers = [await start_worker(f"w{each}", STAY_RUNNING, heartbeat_s=0.1) for each in range(2)]
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([job_request() for _ in range(4)])
        await wait_until_async(lambda: sum(len(worker.held) for worker in workers) == 4)
        for _ in range(3):
            kill_server(own_server)
            # Longer than any worker may be silent: the time itself is what is tried.
            await asyncio.sleep(IMPATIENT.worker_timeout_s + 0.2)
            own_server.start()
            await cluster.bus.wait_connected(60)
            await wait_until_async(lambda: are_registered(cluster, {"w0", "w1"}))
        for worker in workers:
            for key in worker.now_held():
                assert await worker.end(key)
        ended = await cluster.wait(jobs, timeout=60)
        assert {(info.status, info.tasks[0].attempt) for info in ended} == {(S, 1)}
        await check_events(cluster.bus, jobs)


async def test_the_server_goes_while_jobs_run_through(
    own_server: EmbeddedServer,
    start_worker: StartWorker,
    controller: RunningController,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = [await start_worker(f"w{each}", cpu=3, memory=3 * GIB) for each in range(2)]
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([job_request(f"job{each}") for each in range(100)])
        for _ in range(2):
            kill_server(own_server)
            await wait_until_async(lambda: not cluster.bus.connected)
            own_server.start()
            await wait_until_async(lambda: cluster.bus.connected)
        ended = await cluster.wait(jobs, timeout=60)
        assert Counter(info.status for info in ended) == {S: 100}
        assert started_at_most_once(*workers)
        await check_events(cluster.bus, jobs)


async def test_a_submission_in_the_middle_of_being_recorded(
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    start_controller: StartController,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller dies after it wrote the job and one of three tasks."""
    monkeypatch.setattr(submissions_module, "_ACK_WAIT_S", 1)
    first = await start_controller()
    await ensure_system(first.bus)
    wrote = asyncio.Event()
    create = first.controller.writer.create

    async def create_two(record: object) -> None:
        if wrote.is_set():
            await asyncio.Event().wait()
        await create(record)  # type: ignore[arg-type]
        if getattr(record, "task", None) == 0:
            wrote.set()

    monkeypatch.setattr(first.controller.writer, "create", create_two)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        submitting = asyncio.create_task(cluster.launch(job_request(replicas=3)))
        await wrote.wait()
        await first.stop()
        await start_worker()
        await start_controller()
        job_id = await submitting
        ended = await cluster.wait(job_id, timeout=60)
        assert (ended.status, len(ended.tasks)) == (S, 3)
        bus = await connect_bus(own_server)
        assert len(await tasks_table(bus, NS).rows(f"{job_id}.*")) == 3
        await check_events(cluster.bus, [job_id])
