"""The controller on a real server, with workers that do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.errors import JobNotFoundError, JobRefusedError
from fluster_bus.core import buckets, subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, JobId, JobRecord, JobStatus, OfferReply, ResourceConfig, TaskRecord, WorkerId
from fluster_bus.messages.workers import Offer
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.streams import workers_table
from fluster_bus.storage.tables import Row, Table
from fluster_services.config import LOCAL_TIMING
from fluster_services.controller.submissions.checks import SubmissionChecks
from tests.component.conftest import ConnectBus
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
    W,
    are_registered,
    check_events,
    job_request,
)
from tests.component.toy_worker import (
    FAIL,
    GIB,
    STAY_BUILDING,
    STAY_RUNNING,
    SUCCEED,
    Plan,
    ToyWorker,
    started_at_most_once,
)
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


# ---- a job's way ----------------------------------------------------------------------------------------


async def test_a_job_from_submit_to_end(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    job_id = await cluster.launch(job_request("train"))
    waiting = await cluster.poll(job_id)
    assert (waiting.status, waiting.worker_id, waiting.name) == (JobStatus.PENDING, None, "train")
    worker = await start_worker()
    ended = await cluster.wait(job_id, timeout=60)
    assert (ended.status, ended.worker_id, ended.exit_code, ended.error_message) == (S, "w1", 0, "")
    assert ended.tasks[0].attempt == 1
    assert [job.job_id for job in await cluster.list_jobs()] == [job_id]
    assert await cluster.list_jobs(states=[JobStatus.RUNNING]) == []
    assert len(await cluster.list_jobs(limit=1_000_000)) == 1  # more than one request may ask for
    with pytest.raises(ValueError, match="limit='x': give how many jobs to list"):
        await cluster.list_jobs(limit="x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reason=5: give a text"):
        await cluster.terminate(job_id, reason=5)  # type: ignore[arg-type]
    assert worker.starts == [buckets.attempt_key(NS, job_id, 0, 1)]
    await check_events(cluster.bus, [job_id])


async def test_all_tasks_of_a_job_run(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    await start_worker(cpu=2)
    job_id = await cluster.launch(job_request(replicas=5))
    ended = await cluster.wait(job_id, timeout=60)
    assert ended.status is S
    assert [(task.task, task.status) for task in ended.tasks] == [(each, S) for each in range(5)]


async def test_first_come_first_served(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController
) -> None:
    jobs = await cluster.launch_many([job_request(f"job{each}") for each in range(20)])

    async def all_wait() -> bool:
        return all(len(info.tasks) == 1 for info in await cluster.list_jobs())

    await wait_until_async(all_wait)
    worker = await start_worker(plan=STAY_RUNNING, cpu=1, memory=GIB)
    dispatch = controller.controller.dispatch
    for _ in jobs:
        # Of offers that are out together the newest may find the room that came just after the oldest was declined.
        await wait_until_async(lambda: set(worker.held) & set(worker.starts) and dispatch.is_idle)
        await worker.end(worker.now_held()[0])
    await cluster.wait(jobs, timeout=60)
    order = [info.job_id for info in reversed(await cluster.list_jobs())]
    assert worker.starts == [buckets.attempt_key(NS, job_id, 0, 1) for job_id in order]


async def test_a_smaller_job_goes_past_one_that_does_not_fit_now(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    worker = await start_worker(plan=lambda record: STAY_RUNNING if record.resources.cpu > 1 else SUCCEED, cpu=4)
    large = await cluster.launch(job_request("large", cpu=2))
    await wait_until_async(lambda: len(worker.held) == 1)
    larger = await cluster.launch(job_request("larger", cpu=4))
    small = await cluster.launch(job_request("small", cpu=1))
    assert (await cluster.wait(small, timeout=60)).status is S
    assert (await cluster.poll(larger)).status is JobStatus.PENDING
    await worker.end(buckets.attempt_key(NS, large, 0, 1))
    await wait_until_async(lambda: buckets.attempt_key(NS, larger, 0, 1) in worker.held)


async def test_sizes_between_two_levels_are_placed_too(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    """No worker with 3 CPUs listens on the class of 4."""
    await start_worker(cpu=3, memory=3 * GIB)
    request = job_request().model_copy(update={"resources": ResourceConfig.with_cpu(3, memory="3GiB", disk=0)})
    assert (await cluster.wait(await cluster.launch(request), timeout=60)).status is S


async def test_room_on_another_worker_is_found(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    """Two offers at once may reach the same worker; the other one has room."""
    workers = [await start_worker(f"w{each}", STAY_RUNNING, cpu=1, memory=GIB) for each in range(4)]
    for _ in range(10):
        jobs = await cluster.launch_many([job_request() for _ in workers])
        await wait_until_async(
            lambda: all(len(worker.held) == 1 for worker in workers),
            describe=lambda: [worker.now_held() for worker in workers],
        )
        for worker in workers:
            await worker.end(worker.now_held()[0])
        await cluster.wait(jobs, timeout=60)
    assert started_at_most_once(*workers)


async def test_room_that_comes_while_the_offer_is_out_is_not_forgotten(
    cluster: AsyncCluster, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    """A worker says that it has room; then arrives the refusal that was on its way before."""
    bus = await connect_bus(own_server, Role.SERVICE)
    offers = 0

    async def decline(_offer: Offer, _subject: str) -> OfferReply:
        nonlocal offers
        offers += 1
        await bus.publish(subjects.capacity())
        await bus.flush()
        return OfferReply(worker_id=WorkerId("w1"), accepted=False)

    await bus.serve(subjects.worker_verb("w1", "offer"), Offer, decline)
    worker = ToyWorker(bus, WorkerId("w1"), total=Capacity(cpu=4, memory=8 * GIB, disk=GIB))
    await worker.register()
    bus.spawn(worker.beat_forever(), "beats")
    await wait_until_async(_workers_of(cluster))
    # Asking for disk, it is offered by name alone.
    request = job_request().model_copy(update={"resources": ResourceConfig.with_cpu(1, disk=1)})
    await cluster.launch(request)
    await wait_until_async(lambda: offers > 2)


def _workers_of(cluster: AsyncCluster) -> Callable[[], Awaitable[bool]]:
    async def workers() -> bool:
        return any(worker.alive and worker.free.cpu > 0 for worker in await cluster.list_workers())

    return workers


# ---- stopping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [None, STAY_BUILDING, STAY_RUNNING])
async def test_a_job_is_stopped_wherever_it_stands(
    cluster: AsyncCluster, start_worker: StartWorker, plan: Plan | None
) -> None:
    worker = await start_worker(plan=plan) if plan is not None else None
    job_id = await cluster.launch(job_request(replicas=2))
    if worker is not None:
        await wait_until_async(lambda: len(worker.held) == 2)
    await cluster.terminate(job_id, reason="enough")
    ended = await cluster.wait(job_id, timeout=60)
    assert ended.status is K
    assert "enough" in ended.error_message
    assert {task.status for task in ended.tasks} == {K}
    await cluster.terminate(job_id)
    assert (await cluster.poll(job_id)).status is K
    await check_events(cluster.bus, [job_id])


async def test_stopping_as_soon_as_it_is_submitted(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    """The wish meets the claim, the start and the end in every order."""
    worker = await start_worker(plan=lambda record: SUCCEED if record.task % 2 else STAY_RUNNING)
    jobs = []
    for _ in range(40):
        job_id = await cluster.launch(job_request(replicas=2))
        jobs.append(job_id)
        await cluster.terminate(job_id)
    ended = await cluster.wait(jobs, timeout=60)
    assert {info.status for info in ended} == {K}
    assert worker.held == {}
    await check_events(cluster.bus, jobs)


async def test_a_record_that_changes_while_others_are_written_is_not_overwritten(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tasks are to be stopped; one succeeds while the wish for the other is being written."""
    worker = await start_worker(plan=STAY_RUNNING)
    job_id = await cluster.launch(job_request(replicas=2))
    first, second = (buckets.attempt_key(NS, job_id, task, 1) for task in (0, 1))
    await wait_until_async(lambda: worker.now_held() == [first, second])
    table = controller.controller.records[NS]
    update, written, go_on = table.update, asyncio.Event(), asyncio.Event()

    async def slow_update(key: str, value: JobRecord | TaskRecord, revision: int) -> int:
        result = await update(key, value, revision)
        if isinstance(value, TaskRecord) and value.kill_requested is not None and not written.is_set():
            written.set()
            await go_on.wait()
        return result

    monkeypatch.setattr(table, "update", slow_update)
    await cluster.terminate(job_id)
    await written.wait()
    assert await worker.end(second)

    def seen() -> bool:
        return len(controller.controller.job_index.held_by(worker.worker_id)) == 1

    await wait_until_async(seen)
    go_on.set()
    ended = await cluster.wait(job_id, timeout=60)
    assert [task.status for task in ended.tasks] == [K, S]
    await check_events(cluster.bus, [job_id])


async def test_what_has_ended_stays_as_it_ended(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    await start_worker()
    job_id = await cluster.launch(job_request())
    assert (await cluster.wait(job_id, timeout=60)).status is S
    await cluster.terminate(job_id)
    assert (await cluster.poll(job_id)).status is S


async def test_an_end_that_is_stored_is_told_before_the_controller_has_heard_that_it_is(
    own_server: EmbeddedServer,
    start_controller: StartController,
    start_worker: StartWorker,
    connect_bus: ConnectBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that begins to watch after the end was published learns of it from the controller, or waits for ever."""
    stored, heard, asked = asyncio.Event(), asyncio.Event(), asyncio.Event()
    update, watch = Table.update, Table.watch

    async def update_slowly(self: Table[Any], key: str, value: JobRecord | TaskRecord, revision: int) -> int:
        written = await update(self, key, value, revision)
        if isinstance(value, JobRecord) and value.is_over:
            stored.set()
            await heard.wait()
        return written

    async def watch_slowly(self: Table[Any], *keys: Any, **options: Any) -> AsyncIterator[Any]:
        async with aclosing(watch(self, *keys, **options)) as changes:
            async for change in changes:
                if isinstance(change, Row) and isinstance(change.value, JobRecord) and change.value.is_over:
                    await heard.wait()
                yield change

    monkeypatch.setattr(Table, "update", update_slowly)
    monkeypatch.setattr(Table, "watch", watch_slowly)
    await start_controller()
    bus = await connect_bus(own_server, Role.SERVICE)
    await bus.subscribe(subjects.jobs_verb(NS, "status"), lambda _delivery: asked.set())
    await bus.flush()
    await start_worker()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        job_id = await cluster.launch(job_request())
        await asyncio.wait_for(stored.wait(), 60)
        asked.clear()
        waiting = asyncio.create_task(cluster.wait(job_id, timeout=60))
        await asyncio.wait_for(asked.wait(), 60)
        await cluster.list_jobs()  # asked later and answered: so the controller has taken the other question in hand
        heard.set()
        assert (await waiting).status is S


async def test_a_job_that_the_controller_has_not_come_to_yet_is_explained(
    cluster: AsyncCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_new, may_go = SubmissionChecks.check_new, asyncio.Event()

    async def check_later(checks: SubmissionChecks, job: JobRecord) -> None:
        await may_go.wait()
        await check_new(checks, job)

    monkeypatch.setattr(SubmissionChecks, "check_new", check_later)
    job_id = await cluster.launch(job_request())
    explaining = asyncio.create_task(cluster.explain(job_id))
    for _ in range(5):
        await cluster.list_jobs()
    assert not explaining.done()
    may_go.set()
    assert "no worker" in await explaining


async def test_stopping_a_job_that_is_not_there(cluster: AsyncCluster) -> None:
    with pytest.raises(JobNotFoundError, match="'nothing'"):
        await cluster.terminate(JobId("nothing"))
    with pytest.raises(JobNotFoundError, match="'nothing'"):
        await cluster.poll(JobId("nothing"))


async def test_a_job_ends_with_its_parent(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    worker = await start_worker(plan=STAY_RUNNING)
    parent = await cluster.launch(job_request("parent"))
    child = await cluster.launch(job_request("child", parent=parent))
    grandchild = await cluster.launch(job_request("grandchild", parent=child))
    await wait_until_async(lambda: len(worker.held) == 3)
    await worker.end(buckets.attempt_key(NS, parent, 0, 1))
    ended = await cluster.wait([parent, child, grandchild], timeout=60)
    assert [info.status for info in ended] == [S, K, K]
    late = await cluster.launch(job_request("late", parent=parent))
    assert (await cluster.wait(late, timeout=60)).status is K


async def test_what_an_attempt_launched_ends_before_the_next_begins(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    worker = await start_worker(cpu=8, plan=STAY_RUNNING)
    parent = await cluster.launch(job_request("parent", replicas=2, max_retries_failure=1))
    child = await cluster.launch(job_request("child", parent=parent, parent_task=1, parent_attempt=1))
    sibling = await cluster.launch(job_request("sibling", parent=parent, parent_task=0, parent_attempt=1))
    grandchild = await cluster.launch(job_request("grandchild", parent=child))
    await wait_until_async(lambda: len(worker.held) == 5)
    worker.obeys = False
    await worker.end(buckets.attempt_key(NS, parent, 1, 1), JobStatus.FAILED)
    await wait_until_async(lambda: buckets.attempt_key(NS, child, 0, 1) in worker.to_stop)
    assert f"its next attempt begins when what it launched has ended: {child}" in await cluster.explain(parent)
    await worker.end(buckets.attempt_key(NS, child, 0, 1), K)
    assert (await cluster.wait(child, timeout=60)).status is K
    await wait_until_async(lambda: buckets.attempt_key(NS, grandchild, 0, 1) in worker.to_stop)
    assert (await cluster.poll(parent)).tasks[1].attempt == 1
    late = await cluster.launch(job_request("late", parent=parent, parent_task=0, parent_attempt=1))
    with pytest.raises(JobRefusedError, match="attempt 1 of its parent"):
        await cluster.launch(job_request("later", parent=parent, parent_task=1, parent_attempt=1))
    await worker.end(buckets.attempt_key(NS, grandchild, 0, 1), K)
    await wait_until_async(lambda: buckets.attempt_key(NS, parent, 1, 2) in worker.held)

    async def both_run() -> bool:
        return [(await cluster.poll(job)).status for job in (sibling, late)] == [JobStatus.RUNNING] * 2

    await wait_until_async(both_run)
    assert buckets.attempt_key(NS, late, 0, 1) in worker.starts


# ---- trying again ---------------------------------------------------------------------------------------


async def test_a_task_that_fails_is_tried_again(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    await start_worker(plan=lambda record: SUCCEED if record.attempt == 3 else FAIL)
    ended = await cluster.wait(await cluster.launch(job_request(max_retries_failure=2)), timeout=60)
    assert (ended.status, ended.tasks[0].attempt, ended.tasks[0].failures) == (S, 3, 2)
    job_id = await cluster.launch(job_request(max_retries_failure=1))
    ended = await cluster.wait(job_id, timeout=60)
    assert (ended.status, ended.tasks[0].attempt) == (F, 2)
    assert ended.error_message == "exit code 1"


async def test_the_tasks_of_a_lost_worker_run_elsewhere(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    await start_controller(IMPATIENT)
    lost = await start_worker("lost", STAY_RUNNING, heartbeat_s=0.1)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = [await cluster.launch(job_request()), await cluster.launch(job_request(max_retries_preemption=0))]
        await wait_until_async(lambda: len(lost.held) == 2)
        await lost.vanish()
        other = await start_worker("other", heartbeat_s=0.1)
        ended = await cluster.wait(jobs, timeout=60)
        assert [info.status for info in ended] == [S, W]
        task = ended[0].tasks[0]
        assert (task.attempt, task.preemptions, task.failures, task.worker_id) == (2, 1, 0, "other")
        assert f"worker lost was not heard for {IMPATIENT.worker_timeout_s:g} s" in ended[1].error_message
        assert other.starts == [buckets.attempt_key(NS, jobs[0], 0, 2)]
        assert not await lost.end(buckets.attempt_key(NS, jobs[0], 0, 1)), "its word does not count any more"
        assert (await cluster.poll(jobs[0])).status is S
        await wait_until_async(lambda: are_registered(cluster, {"other"}))
        lost.silent = False  # it comes back, hears that it is not known, and registers again
        await wait_until_async(lambda: are_registered(cluster, {"lost", "other"}))
        await check_events(cluster.bus, jobs)


async def test_a_lost_worker_whose_task_is_being_stopped(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    """The wish and the verdict are written at the same time, and one of them is late."""
    await start_controller(IMPATIENT)
    lost = await start_worker("lost", STAY_RUNNING, heartbeat_s=0.1, cpu=64, memory=64 * GIB)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([job_request() for _ in range(30)])
        await wait_until_async(lambda: len(lost.held) == 30)
        await lost.vanish()

        async def stop_later(job_id: JobId, after_s: float) -> None:
            await asyncio.sleep(after_s)  # moments around that of the verdict are what is tried
            await cluster.terminate(job_id)

        pauses = [IMPATIENT.worker_timeout_s - 0.2 + 0.4 * each / len(jobs) for each in range(len(jobs))]
        await asyncio.gather(*(stop_later(job_id, pause) for job_id, pause in zip(jobs, pauses, strict=True)))
        ended = await cluster.wait(jobs, timeout=60)
        assert {info.status for info in ended} == {K}


async def test_a_job_that_is_stopped_when_its_worker_has_just_left_ends_within_a_beat(
    controller: RunningController, cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    left = await start_worker("left", STAY_RUNNING)
    job_id = await cluster.launch(job_request())
    await wait_until_async(lambda: left.held)
    await left.vanish()
    await workers_table(left.bus).delete(left.worker_id)
    await wait_until_async(lambda: left.worker_id not in controller.controller.worker_index.workers)
    await cluster.terminate(job_id, reason="not wanted")
    ended = await cluster.wait(job_id, timeout=LOCAL_TIMING.worker_timeout_s - 5)
    assert (ended.status, ended.error_message) == (K, "not wanted")


async def test_a_job_that_never_fits_is_given_up(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    await start_controller(IMPATIENT)
    await start_worker(heartbeat_s=0.1)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([job_request("large", cpu=100), job_request("small")])
        large, small = await cluster.wait(jobs, timeout=60)
        assert (large.status, small.status) == (U, S)
        assert large.error_message == ("needs 100 CPUs, 1 GiB memory; the largest worker, w1, has 4 CPUs, 8 GiB memory")
