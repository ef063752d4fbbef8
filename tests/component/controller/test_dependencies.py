"""Jobs that run after others: with a real server, a real controller, and toy workers."""

from __future__ import annotations

import asyncio

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.errors import JobRefusedError
from fluster_bus.core import buckets
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, JobStatus
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage import submissions as submissions_module
from tests.component.controllers import (
    NS,
    F,
    K,
    RunningController,
    S,
    StartController,
    StartWorker,
    check_events,
    job_request,
)
from tests.component.toy_worker import FAIL, STAY_RUNNING, SUCCEED
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


async def test_a_job_starts_when_the_others_have_succeeded(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    worker = await start_worker(plan=STAY_RUNNING)
    first, second = await cluster.launch_many([job_request("first"), job_request("second")])
    last = await cluster.launch(job_request("last", after=(first, await cluster.poll(second)), replicas=2))
    info = await cluster.poll(last)
    assert (info.status, info.tasks, info.after) == (JobStatus.PENDING, (), (first, second))

    async def is_explained() -> bool:
        return await cluster.explain(last) == f"waits for 2 jobs: {first} (RUNNING) and {second} (RUNNING)"

    await wait_until_async(is_explained)
    await worker.end(buckets.attempt_key(NS, first, 0, 1))
    await cluster.wait(first, timeout=60)
    assert await cluster.explain(last) == f"waits for job {second}, which is RUNNING"
    await worker.end(buckets.attempt_key(NS, second, 0, 1))
    wanted = [buckets.attempt_key(NS, last, task, 1) for task in (0, 1)]
    await wait_until_async(lambda: worker.now_held() == wanted)
    for key in wanted:
        await worker.end(key)
    assert (await cluster.wait(last, timeout=60)).status is S
    await check_events(cluster.bus, [first, second, last])


async def test_a_job_fails_with_what_it_waits_for_and_so_do_those_that_wait_for_it(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    first = await cluster.launch(job_request("first"))
    second = await cluster.launch(job_request("second", after=(first,)))
    third = await cluster.launch(job_request("third", after=(second,)))
    anyway = await cluster.launch(job_request("anyway", after=(second,), after_failure="run"))
    worker = await start_worker(plan=lambda record: FAIL if record.job_id == first else SUCCEED)
    ended = await cluster.wait([first, second, third, anyway], timeout=60)
    assert [info.status for info in ended] == [F, F, F, S]
    assert ended[1].error_message == f"it was to run after job {first}, which ended as FAILED: exit code 1"
    assert f"after job {second}, which ended as FAILED" in ended[2].error_message
    assert len(worker.starts) == 2
    late = await cluster.launch(job_request("late", after=(first,)))
    assert (await cluster.wait(late, timeout=60)).status is F, "also when it had ended before"
    await check_events(cluster.bus, [first, second, third, anyway, late])


async def test_a_job_is_stopped_while_it_waits_for_another(cluster: AsyncCluster) -> None:
    first = await cluster.launch(job_request("first"))
    second = await cluster.launch(job_request("second", after=(first,)))
    await cluster.terminate(second, reason="enough")
    ended = await cluster.wait(second, timeout=60)
    assert (ended.status, ended.error_message) == (K, "enough")
    assert (await cluster.poll(first)).status is JobStatus.PENDING


async def test_what_does_not_exist_is_not_waited_for(cluster: AsyncCluster) -> None:
    await cluster.launch(job_request(job_id=JobId("prepare")))
    with pytest.raises(JobRefusedError, match="after='prepaer': there is no such job; did you mean 'prepare'"):
        await cluster.launch(job_request(after=(JobId("prepaer"),)))
    assert len(await cluster.list_jobs()) == 1


async def test_jobs_that_are_submitted_together_may_wait_for_those_before_them(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    await start_worker()
    names = [JobId(f"job{each}") for each in range(100)]
    chain = [job_request(name, job_id=name, after=names[max(0, each - 1) : each]) for each, name in enumerate(names)]
    await cluster.launch_many(chain)
    ended = await cluster.wait(names, timeout=60)
    assert {info.status for info in ended} == {S}
    first, last = (
        job_request(name, job_id=JobId(name), after=(JobId(other),)) for name, other in (("x", "y"), ("y", "x"))
    )
    with pytest.raises(JobRefusedError, match="after='y': there is no such job"):
        await cluster.launch_many([first, last])


async def test_who_waits_for_whom_survives_the_controller(
    own_server: EmbeddedServer,
    start_controller: StartController,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submissions_module, "_ACK_WAIT_S", 1)
    controller = await start_controller()
    worker = await start_worker(plan=STAY_RUNNING)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        first = await cluster.launch(job_request("first"))
        second = await cluster.launch(job_request("second", after=(first,), replicas=2))
        await wait_until_async(lambda: len(worker.held) == 1)
        await controller.stop()
        # No controller is there when it ends, nor when another is submitted that waits for one that is not recorded yet.
        await worker.end(buckets.attempt_key(NS, first, 0, 1))
        third = await cluster.launch(job_request("third"))
        fourth = await cluster.launch(job_request("fourth", after=(third,)))
        await start_controller()
        wanted = sorted(buckets.attempt_key(NS, job, task, 1) for job, task in ((second, 0), (second, 1), (third, 0)))
        await wait_until_async(lambda: worker.now_held() == wanted)
        for key in wanted:
            await worker.end(key)
        await wait_until_async(lambda: worker.now_held() == [buckets.attempt_key(NS, fourth, 0, 1)])
        await worker.end(worker.now_held()[0])
        ended = await cluster.wait([first, second, third, fourth], timeout=60)
        assert {info.status for info in ended} == {S}
        await check_events(cluster.bus, [first, second, third, fourth])


async def test_a_controller_that_dies_while_it_releases_a_job(
    own_server: EmbeddedServer,
    start_controller: StartController,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dying: RunningController = await start_controller()
    wrote = asyncio.Event()
    record_task = dying.controller.writer.record_task

    async def record_two(task: object) -> None:
        if wrote.is_set():
            await asyncio.Event().wait()
        await record_task(task)  # type: ignore[arg-type]
        if getattr(task, "job_id", None) == "second":
            wrote.set()

    monkeypatch.setattr(dying.controller.writer, "record_task", record_two)
    worker = await start_worker()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        await cluster.launch(job_request("first", job_id=JobId("first")))
        await cluster.launch(job_request("second", job_id=JobId("second"), after=(JobId("first"),), replicas=3))
        await wrote.wait()
        await dying.stop()
        await start_controller()
        ended = await cluster.wait(JobId("second"), timeout=60)
        assert (ended.status, len(ended.tasks)) == (S, 3)
        assert len(worker.starts) == 4
        await check_events(cluster.bus, [JobId("first"), JobId("second")])
