"""Gangs on a real server, with workers that do what the test says."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets
from fluster_bus.core.roles import Role
from fluster_bus.messages import (
    Capacity,
    Entrypoint,
    JobId,
    JobInfo,
    JobRequest,
    JobStatus,
    Namespace,
    ResourceConfig,
    TaskRecord,
    WorkerId,
)
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.streams import jobs_table, tasks_table
from fluster_services import job_lifecycle
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.holds import Holds
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.presence.presence import Draining
from fluster_services.worker.worker import Worker
from tests.component.conftest import ConnectBus
from tests.component.controllers import IMPATIENT, NS, F, K, RunningController, S, StartController, U
from tests.component.no_runtime import NoRuntime
from tests.component.toy_worker import FAIL, GIB, STAY_RUNNING, SUCCEED, Plan, ToyWorker, started_at_most_once
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

StartWorker = Callable[..., Awaitable[ToyWorker]]


@pytest.fixture
async def start_worker(own_server: EmbeddedServer, connect_bus: ConnectBus) -> AsyncIterator[StartWorker]:
    """Workers that, at the end of the test, have given back everything."""
    async with AsyncExitStack() as stack:

        async def start(
            worker_id: str, plan: Callable[[TaskRecord], Plan] | Plan = SUCCEED, *, cpu: float = 2, hold_s: float = 20
        ) -> ToyWorker:
            bus = await connect_bus(own_server, Role.SERVICE, name=worker_id)
            planned = plan if callable(plan) else lambda _record: plan
            worker = ToyWorker(
                bus, WorkerId(worker_id), Capacity(cpu=cpu, memory=8 * GIB), planned, heartbeat_s=0.1, hold_s=hold_s
            )

            async def check() -> None:
                if not worker.silent:
                    await wait_until_async(lambda: worker.ledger.free == worker.total, describe=worker.now_held)

            stack.push_async_callback(check)
            return await worker.start()

        yield start


def _gang(replicas: int, *, name: str = "gang", cpu: float = 1, **fields: object) -> JobRequest:
    return JobRequest(
        name=name,
        entrypoint=Entrypoint(command=("true",)),
        resources=ResourceConfig.with_cpu(cpu),
        replicas=replicas,
        gang=True,
        retry_backoff_s=0,
        **fields,  # type: ignore[arg-type]
    )


def _states(info: JobInfo) -> list[JobStatus]:
    return [task.status for task in info.tasks]


def _key(job_id: JobId, task: int, attempt: int = 1) -> str:
    return buckets.attempt_key(NS, job_id, task, attempt)


async def _task(bus: Bus, job_id: JobId, task: int) -> TaskRecord:
    row = await tasks_table(bus, NS).get(buckets.task_key(job_id, task))
    assert row is not None
    return row.value


async def test_all_start_with_one_go_and_the_address_of_the_first(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    workers = [await start_worker(f"w{each}") for each in range(2)]
    workers[1].may_prepare.clear()
    job_id = await cluster.launch(_gang(4))

    async def all_are_held() -> bool:  # as the controller has heard, which is after the workers hold them
        return "gang is being gathered: 4 of 4 tasks are held" in await cluster.explain(job_id)

    await wait_until_async(all_are_held)
    assert sum(len(worker.held) for worker in workers) == 4
    assert (await cluster.poll(job_id)).status is JobStatus.BUILDING
    assert [worker.went for worker in workers] == [[], []], "nothing starts while one is not ready"
    workers[1].may_prepare.set()
    info = await cluster.wait(job_id, timeout=60)
    assert info.status is S
    went = [each for worker in workers for each in worker.went]
    assert len(went) == 4
    ((epoch, address),) = {(epoch, address) for _, epoch, address in went}
    assert epoch == 1
    assert (address or "").startswith("127.0.0.1:")


async def test_a_gang_that_does_not_fit_holds_nothing(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    workers = [await start_worker(f"w{each}", lambda task: SUCCEED if task.gang else STAY_RUNNING) for each in range(2)]
    filling = await cluster.launch(JobRequest(name="fill", entrypoint=Entrypoint(command=("true",))))
    await wait_until_async(lambda: any(worker.held for worker in workers))
    gang = await cluster.launch(_gang(4))
    told = "gang of 4 needs 4 x (1 CPU, 1 GiB memory) at once; only 3 fit now; next in line"
    await wait_until_async(lambda: _explained(cluster, gang, told))
    small = await cluster.launch(_gang(2, name="small"))
    assert (await cluster.wait(small, timeout=60)).status is S
    info = await cluster.poll(gang)
    assert info.status is JobStatus.PENDING
    assert not any(key.startswith(f"{NS}.{gang}.") for worker in workers for key in worker.offers)
    for worker in workers:
        await worker.end(_key(filling, 0))
    assert (await cluster.wait(gang, timeout=60)).status is S


async def test_whoever_is_behind_a_gang_is_told_so(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    worker = await start_worker("w0", lambda task: SUCCEED if task.gang else STAY_RUNNING)
    filling = await cluster.launch(JobRequest(name="fill", entrypoint=Entrypoint(command=("true",))))
    await wait_until_async(lambda: worker.held)
    gang = await cluster.launch(_gang(2))
    behind = await cluster.launch(_gang(2, name="behind").model_copy(update={"gang": False}))

    async def is_explained() -> bool:
        return (await cluster.explain(behind)).endswith("; 2 tasks are before it")

    await wait_until_async(is_explained)
    await cluster.terminate(behind)
    await worker.end(_key(filling, 0))
    assert (await cluster.wait(gang, timeout=60)).status is S


async def test_a_pause_before_a_retry_is_told(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    await start_worker("w0", FAIL)
    request = JobRequest(
        name="job", entrypoint=Entrypoint(command=("true",)), max_retries_failure=1, retry_backoff_s=3_600
    )
    job_id = await cluster.launch(request)

    async def told() -> bool:
        said = await cluster.explain(job_id)
        return re.fullmatch(r"waits \d+\.\d s before attempt 2, after: exit code 1", said) is not None

    await wait_until_async(told)
    await cluster.terminate(job_id)


async def _explained(cluster: AsyncCluster, job_id: JobId, told: str) -> bool:
    return await cluster.explain(job_id) == told


async def test_when_a_worker_declines_the_others_release_at_once_and_uncharged(
    cluster: AsyncCluster, controller: RunningController, start_worker: StartWorker
) -> None:
    honest, full = await start_worker("w0"), await start_worker("w1")
    honest.may_prepare.clear()  # so that it would hold for ever
    assert full.ledger.reserve("something", Capacity(cpu=1)), "of which the controller does not know"
    job_id = await cluster.launch(_gang(4))
    await wait_until_async(lambda: len(honest.claimed) >= 4)  # twice two: it was gathered, released and gathered again
    tasks = [await _task(honest.bus, job_id, task) for task in range(4)]
    assert {(task.attempt, task.failures, task.preemptions) for task in tasks} == {(1, 0, 0)}
    assert honest.went == full.went == []
    full.ledger.release("something")
    honest.may_prepare.set()
    info = await cluster.wait(job_id, timeout=60)
    assert info.status is S
    assert len({epoch for worker in (honest, full) for _, epoch, _ in worker.went}) == 1


@pytest.mark.parametrize("failures", [0, 1])
async def test_a_task_that_fails_starts_the_gang_again_or_ends_it(
    cluster: AsyncCluster, start_worker: StartWorker, failures: int
) -> None:
    def plan(task: TaskRecord) -> Plan:
        if task.attempt > 1 or task.task == 2:
            return SUCCEED
        return FAIL if task.task == 1 else STAY_RUNNING

    workers = [await start_worker(f"w{each}", plan) for each in range(2)]
    job_id = await cluster.launch(_gang(4, max_retries_failure=failures))
    info = await cluster.wait(job_id, timeout=60)
    attempts = [(task.attempt, task.failures, task.preemptions) for task in info.tasks]
    if failures:
        assert _states(info) == [S, S, S, S]
        assert attempts == [(2, 0, 0), (2, 1, 0), (2, 0, 0), (2, 0, 0)]
    else:
        assert (info.status, info.error_message) == (F, "task 1: exit code 1")
        assert _states(info) == [K, F, S, K]
        assert info.tasks[0].error_message == "task 1 of its gang ended as FAILED"
    assert started_at_most_once(*workers)


async def test_a_lost_worker_starts_the_gang_again(
    start_controller: StartController, own_server: EmbeddedServer, start_worker: StartWorker
) -> None:
    await start_controller(IMPATIENT)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:

        def plan(task: TaskRecord) -> Plan:
            return STAY_RUNNING if task.attempt == 1 else SUCCEED

        first, second = await start_worker("w0", plan), await start_worker("w1", plan)
        job_id = await cluster.launch(_gang(4))
        await wait_until_async(lambda: len(first.went) == len(second.went) == 2)
        lost = [int(key.split(".")[2]) for key in second.now_held()]
        await second.vanish()
        third = await start_worker("w2", plan)
        info = await cluster.wait(job_id, timeout=60)
        assert info.status is S
        assert {task.attempt for task in info.tasks} == {2}
        assert [task.task for task in info.tasks if task.preemptions] == lost
        assert len({epoch for worker in (first, third) for _, epoch, _ in worker.went[-2:]}) == 1


async def test_holds_outlive_their_controller(
    start_controller: StartController, own_server: EmbeddedServer, start_worker: StartWorker
) -> None:
    dying = await start_controller()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        workers = [await start_worker(f"w{each}") for each in range(2)]
        workers[1].may_prepare.clear()
        job_id = await cluster.launch(_gang(4))
        await wait_until_async(lambda: sum(len(worker.held) for worker in workers) == 4)
        await dying.stop()
        workers[1].may_prepare.set()
        await start_controller()
        info = await cluster.wait(job_id, timeout=60)
        assert info.status is S
        assert sum(len(worker.claimed) for worker in workers) == 4, "the same holds were said go"


async def test_holds_expire_when_no_controller_comes(
    start_controller: StartController, own_server: EmbeddedServer, start_worker: StartWorker
) -> None:
    dying = await start_controller()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        workers = [await start_worker(f"w{each}", hold_s=0.5) for each in range(2)]
        workers[1].may_prepare.clear()
        job_id = await cluster.launch(_gang(4))
        await wait_until_async(lambda: sum(len(worker.held) for worker in workers) == 4)
        await dying.stop()
        await wait_until_async(lambda: not any(worker.held for worker in workers))

        async def released() -> bool:
            tasks = [await _task(workers[0].bus, job_id, task) for task in range(4)]
            return {(task.state, task.attempt) for task in tasks} == {(JobStatus.PENDING, 1)}

        await wait_until_async(released)
        job = await jobs_table(workers[0].bus, NS).get(job_id)
        assert job is not None
        assert (job.value.epoch, job.value.is_go) == (1, False)
        workers[1].may_prepare.set()
        await start_controller()
        info = await cluster.wait(job_id, timeout=60)
        assert info.status is S
        assert {(task.attempt, task.preemptions) for task in info.tasks} == {(1, 0)}


@pytest.mark.parametrize("is_prepared", [False, True])
async def test_a_gang_is_cancelled_while_it_is_gathered(
    cluster: AsyncCluster, start_worker: StartWorker, is_prepared: bool
) -> None:
    workers = [await start_worker(f"w{each}", STAY_RUNNING) for each in range(2)]
    workers[1].may_prepare.clear()
    if not is_prepared:
        workers[0].may_prepare.clear()
    job_id = await cluster.launch(_gang(4))
    await wait_until_async(lambda: sum(len(worker.held) for worker in workers) == 4)
    await cluster.terminate(job_id, reason="enough")
    info = await cluster.wait(job_id, timeout=60)
    assert (info.status, _states(info)) == (K, [K] * 4)
    assert [worker.went for worker in workers] == [[], []]


async def test_gangs_that_each_need_most_of_the_cluster_all_run(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    workers = [await start_worker(f"w{each}") for each in range(3)]
    jobs = await cluster.launch_many([_gang(4, name=f"gang{each}") for each in range(6)])
    infos = await cluster.wait(jobs, timeout=60)
    assert {info.status for info in infos} == {S}
    assert started_at_most_once(*workers)


async def test_gangs_are_gathered_by_priority(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    jobs = await cluster.launch_many([_gang(2, name=f"gang{each}", priority=each) for each in (0, 2, 1)])
    await start_worker("w1")
    infos = sorted(await cluster.wait(jobs, timeout=60), key=lambda info: info.started_at or 0)
    assert [info.name for info in infos] == ["gang2", "gang1", "gang0"]


async def test_a_gang_that_could_never_start_together_is_given_up(
    start_controller: StartController, own_server: EmbeddedServer, start_worker: StartWorker
) -> None:
    await start_controller(IMPATIENT)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        for each in range(2):
            await start_worker(f"w{each}")
        info = await cluster.wait(await cluster.launch(_gang(5)), timeout=60)
        assert info.status is U
        told = "gang of 5 needs 5 x (1 CPU, 1 GiB memory) at once; all 2 workers together, empty, fit 4"
        assert info.error_message == told


async def test_a_gang_that_finds_no_room_in_its_time_is_given_up(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    await start_worker("w0")
    info = await cluster.wait(await cluster.launch(_gang(3, scheduling_timeout_s=0.2)), timeout=60)
    assert info.status is U
    assert "within 0.2 s" in info.error_message


async def test_the_time_of_a_gang_goes_on_while_it_is_held_and_let_go(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    honest, full = await start_worker("w0"), await start_worker("w1")
    honest.may_prepare.clear()
    assert full.ledger.reserve("something", Capacity(cpu=1)), "of which the controller does not know"
    info = await cluster.wait(await cluster.launch(_gang(4, scheduling_timeout_s=2.5)), timeout=60)
    assert info.status is U
    assert len(honest.claimed) >= 4, "it was gathered at once, and again a second later"
    assert "within 2.5 s" in info.error_message
    full.ledger.release("something")


async def test_a_worker_that_declines_again_is_left_out_for_longer(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    honest, full = await start_worker("w0"), await start_worker("w1")
    honest.may_prepare.clear()
    assert full.ledger.reserve("something", Capacity(cpu=1)), "of which the controller does not know"
    launched = time.monotonic()
    await cluster.launch(_gang(4))
    await wait_until_async(lambda: len(honest.claimed) >= 6)
    assert time.monotonic() - launched >= 3, "at once, after one second, and after two more"
    full.ledger.release("something")


async def test_a_retry_waits_for_its_pause(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    worker = await start_worker("w0", lambda task: FAIL if task.attempt == 1 else SUCCEED)
    request = _gang(2, max_retries_failure=1).model_copy(update={"retry_backoff_s": 0.4})
    started = asyncio.get_running_loop().time()
    info = await cluster.wait(await cluster.launch(request), timeout=60)
    assert info.status is S
    assert asyncio.get_running_loop().time() - started >= 0.3
    assert len(worker.claimed) == 4


async def test_a_gang_that_is_replaced_while_its_leader_is_not_sure_is_not_gathered(
    cluster: AsyncCluster, controller: RunningController, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat, mine = controller.controller.seat, JobId("mine")
    is_sure, is_asked, wait_sure = asyncio.Event(), asyncio.Event(), seat.wait_sure

    async def wait_long() -> None:
        task = asyncio.current_task()
        if task is not None and getattr(task.get_coro(), "__qualname__", "") == "Gangs.run":
            is_asked.set()
            await is_sure.wait()
        await wait_sure()

    monkeypatch.setattr(seat, "wait_sure", wait_long)
    for each in range(2):
        await start_worker(f"w{each}")
    await cluster.launch(_gang(4, job_id=mine))
    await is_asked.wait()
    await cluster.launch(_gang(2, name="new", job_id=mine, on_conflict="replace"))
    is_sure.set()
    info = await cluster.wait(mine, timeout=60)
    assert (info.status, info.name, len(info.tasks)) == (S, "new", 2)


async def test_a_hold_decides_nothing_about_the_job_that_has_the_id_now(bus: Bus, namespace: Namespace) -> None:
    request = _gang(1)
    job = job_lifecycle.new_job(namespace, JobId("mine"), request, order=1, now=0)
    (task,) = job_lifecycle.new_tasks(job)
    held = task.model_copy(update={"state": JobStatus.BUILDING, "worker_id": "w1", "epoch": 3})
    successor = job_lifecycle.new_job(namespace, JobId("mine"), request, order=2, now=0)
    running = successor.model_copy(update={"epoch": 1, "is_go": True})
    table = jobs_table(bus, namespace)
    revision = await table.create("mine", running)
    claims = Claims(bus, WorkerId("w1"), (namespace,))
    holds = Holds(bus, claims, namespaces=(namespace,), host="127.0.0.1", expiry_s=0.0)
    assert await holds._call_off(held) is None  # noqa: SLF001 - before its time, which `_expiry_s` sets
    is_off = asyncio.Event()
    holds._expiry_s = 60  # noqa: SLF001 - from then on it is never due
    holds.open("key", held, on_off=is_off.set)
    await asyncio.wait_for(is_off.wait(), 60)
    holds.close("key")
    row = await table.get("mine")
    assert row is not None
    assert (row.revision, row.value) == (revision, running)


async def test_a_worker_that_leaves_before_a_hold_is_ready_releases_it_uncharged(
    cluster: AsyncCluster,
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    start_worker: StartWorker,
    tmp_path: Path,
) -> None:
    address = own_server.credentials(Role.SERVICE)
    config = WorkerConfig(
        address=address,
        worker_id=WorkerId("leaving"),
        state_dir=tmp_path,
        total=Capacity(cpu=2, memory=8 * GIB),
        job_credentials={NS: own_server.credentials(Role.JOB, NS)},
    )
    draining = Draining()
    leaving = Worker(await connect_bus(own_server, Role.SERVICE), config, NoRuntime(), draining)
    preparing: list[object] = []

    async def prepare(*arguments: object, **_named: object) -> Any:
        preparing.append(arguments)
        await asyncio.Event().wait()

    leaving._attempts._starter._preparation.prepare = prepare  # type: ignore[method-assign]  # noqa: SLF001 - a preparation that does not end
    running = asyncio.create_task(leaving.run(lambda: None))
    job_id = await cluster.launch(_gang(2, max_retries_preemption=0))
    await wait_until_async(lambda: len(preparing) == 2)
    draining.ask(0)
    await asyncio.wait_for(running, 60)
    await start_worker("w0")
    info = await cluster.wait(job_id, timeout=60)
    assert (info.status, [(task.attempt, task.preemptions) for task in info.tasks]) == (S, [(1, 0)] * 2)
