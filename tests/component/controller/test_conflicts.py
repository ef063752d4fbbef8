"""A job id that exists already: kept or replaced, with a real server, a real controller, and toy workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.cluster.jobs.job_states import JobStates
from fluster.cluster.jobs.submissions import Submissions
from fluster.errors import JobRefusedError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, JobStatus, RecordChanged, TaskError, TaskRecord
from fluster_bus.messages.records import Replacement
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage import submissions as submissions_module
from fluster_bus.storage.streams import jobs_table, records_table, tasks_table
from fluster_services.controller.state.job_index import JobKey
from tests.component.controllers import (
    NS,
    F,
    K,
    RunningController,
    S,
    StartController,
    StartWorker,
    job_request,
    published_events,
)
from tests.component.toy_worker import FAIL, STAY_RUNNING, SUCCEED, Plan, ToyWorker, started_at_most_once
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


MINE = JobId("mine")


def _key(attempt: int, task: int = 0, job_id: JobId = MINE) -> str:
    return buckets.attempt_key(NS, job_id, task, attempt)


async def _check_told(bus: Bus, *ends: JobStatus) -> None:
    """The ends of the jobs that had the id, in order, and every transition of their records once."""

    async def told() -> bool:
        return len(
            [each for each in await published_events(bus) if each.task is None and each.transition.state.finished()]
        ) >= len(ends)

    await wait_until_async(told)
    seen: dict[int | None, list[int]] = {}
    states = []
    for event in await published_events(bus):
        if event.job_id == MINE:
            seen.setdefault(event.task, []).append(event.transition.number)
            if event.task is None and event.transition.state.finished():
                states.append(event.transition.state)
    assert tuple(states) == ends
    for task, numbers in seen.items():
        assert numbers == sorted(set(numbers)), task


async def test_the_job_that_is_there_is_kept(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    worker = await start_worker(plan=STAY_RUNNING)
    keep = job_request("keep", job_id=MINE, on_conflict="keep", cpu=2)
    assert await cluster.launch(keep) == MINE, "also when it is the first"
    await wait_until_async(lambda: len(worker.held) == 1)
    assert await cluster.launch(keep.model_copy(update={"name": "other"})) == MINE
    assert (await cluster.poll(MINE)).name == "keep"
    await worker.end(_key(1))
    assert (await cluster.wait(MINE, timeout=60)).status is S
    await cluster.launch(keep)
    info = await cluster.wait(MINE, timeout=60)
    assert (info.status, info.tasks[0].attempt) == (S, 1)
    assert worker.starts == [_key(1)]
    with pytest.raises(JobRefusedError, match="'mine' exists already in namespace 'default', and ended as SUCCEEDED"):
        await cluster.launch(job_request(job_id=MINE))


async def test_a_job_that_failed_is_not_kept(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    worker = await start_worker(plan=lambda record: FAIL if record.attempt == 1 else SUCCEED)
    keep = job_request(job_id=MINE, on_conflict="keep")
    await cluster.launch(keep)
    assert (await cluster.wait(MINE, timeout=60)).status is F
    await cluster.launch(keep)
    info = await cluster.wait(MINE, timeout=60)
    assert (info.status, info.first_attempt, info.tasks[0].attempt, info.tasks[0].failures) == (S, 2, 2, 0)
    assert worker.starts == [_key(1), _key(2)]
    await _check_told(cluster.bus, F, S)


async def test_a_job_is_replaced_when_it_is_gone_with_what_it_launched(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController
) -> None:
    worker = await start_worker(plan=STAY_RUNNING, cpu=8)
    held_back: asyncio.Event = asyncio.Event()
    obey = worker.on_record_changed

    async def obey_later(*arguments: object) -> None:
        await held_back.wait()
        await obey(*arguments)  # type: ignore[arg-type]

    await worker.bus.subscribe(subjects.worker_verb(worker.worker_id, "look"), obey_later)
    worker.claims.look, look = _stubborn(worker, held_back), worker.claims.look  # type: ignore[method-assign]
    await cluster.launch(job_request("old", job_id=MINE, replicas=3))
    child = await cluster.launch(job_request("child", parent=MINE))
    await wait_until_async(lambda: len(worker.held) == 4)
    replacing = asyncio.create_task(cluster.launch(job_request("new", job_id=MINE, on_conflict="replace", replicas=2)))
    intake = controller.controller.intake
    await wait_until_async(lambda: intake.parked.submissions)
    async with await AsyncCluster.connect(cluster.bus.address) as other:
        assert (await other.poll(MINE)).name == "old"
    held_back.set()
    worker.claims.look = look  # type: ignore[method-assign]
    for key in [each for each in worker.now_held() if "mine" in each]:
        await worker.end(key, K, "stopped")
    await wait_until_async(lambda: JobKey(NS, child) in intake.parked.blocking)
    assert intake.parked.submissions, "its child has not ended"
    await worker.end(_key(1, 0, child), K, "stopped")
    assert await replacing == MINE
    await wait_until_async(lambda: worker.now_held() == [_key(2, 0), _key(2, 1)])
    assert intake.parked.submissions == {}
    assert (await cluster.wait(child, timeout=60)).status is K
    for task in (0, 1):
        await worker.end(_key(2, task))
    info = await cluster.wait(MINE, timeout=60)
    assert (info.status, info.name, info.first_attempt, len(info.tasks)) == (S, "new", 2, 2)
    rows = await tasks_table(controller.bus, NS).rows(buckets.task_key_of_any(MINE))
    assert sorted((row.value.task, row.value.attempt) for row in rows) == [(0, 2), (1, 2)]
    assert started_at_most_once(worker)


def _stubborn(worker: ToyWorker, free: asyncio.Event) -> Any:
    """Records without the wish that their task be stopped, until it is `free`."""
    look = worker.claims.look

    async def without_wish(*arguments: object) -> object:
        row = await look(*arguments)  # type: ignore[arg-type]
        if row is not None and not free.is_set():
            object.__setattr__(row, "value", row.value.model_copy(update={"kill_requested": None}))
        return row

    return without_wish


async def test_who_waits_for_a_job_waits_for_its_replacement(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    def plan(record: TaskRecord) -> Plan:
        return STAY_RUNNING if record.job_id == MINE and record.attempt < 3 else SUCCEED

    worker = await start_worker(plan=plan)
    await cluster.launch(job_request(job_id=MINE))
    waiting = asyncio.create_task(cluster.wait(MINE, timeout=60))
    after = await cluster.launch(job_request(after=(MINE,)))
    await wait_until_async(lambda: worker.now_held() == [_key(1)])
    replace = job_request("new", job_id=MINE, on_conflict="replace")
    await cluster.launch(replace)
    await wait_until_async(lambda: worker.now_held() == [_key(2)])
    assert not waiting.done()
    await cluster.launch(replace)
    info = await waiting
    assert (info.status, info.tasks[0].attempt) == (S, 3)
    assert (await cluster.wait(after, timeout=60)).status is S
    await cluster.launch(replace)
    assert (await cluster.wait(MINE, timeout=60)).tasks[0].attempt == 4


async def test_of_many_that_replace_a_job_the_last_remains(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    def plan(record: TaskRecord) -> Plan:
        return STAY_RUNNING if record.task == 0 else SUCCEED

    worker = await start_worker(plan=plan, cpu=8)
    await cluster.launch(job_request("first", job_id=MINE, replicas=2))
    names = [f"job{each}" for each in range(30)]
    submissions = Submissions(cluster.bus, cluster.namespace, JobStates(cluster.bus, cluster.namespace), None)
    places = [
        await submissions.submit(job_request(name, job_id=MINE, on_conflict="replace", replicas=1 + each % 3))
        for each, name in enumerate(names)
    ]
    cluster._states.expect({MINE: places[-1]})  # noqa: SLF001 - as a client that heard of its last submission alone

    async def last() -> bool:
        info = await cluster.poll(MINE)
        return info.name == "job29" and info.status is JobStatus.RUNNING

    await wait_until_async(last)
    await wait_until_async(lambda: len(worker.held) == 1)
    await worker.end(worker.now_held()[0])
    info = await cluster.wait(MINE, timeout=60)
    assert (info.status, info.name, len(info.tasks)) == (S, "job29", 3)
    assert started_at_most_once(worker)


async def test_the_replacement_can_be_stopped_before_it_is_there(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController
) -> None:
    worker = await start_worker(plan=STAY_RUNNING)
    worker.claims.look = _stubborn(worker, asyncio.Event())  # type: ignore[method-assign]
    await cluster.launch(job_request("old", job_id=MINE))
    await wait_until_async(lambda: len(worker.held) == 1)
    replacing = asyncio.create_task(cluster.launch(job_request("new", job_id=MINE, on_conflict="replace")))
    await wait_until_async(lambda: controller.controller.intake.parked.submissions)
    async with await AsyncCluster.connect(cluster.bus.address) as other:
        await other.terminate(MINE, reason="enough")
    await worker.end(_key(1), K, "stopped")
    await replacing
    info = await cluster.wait(MINE, timeout=60)
    assert (info.status, info.name, info.error_message) == (K, "new", "enough")


async def test_a_circle_is_refused_and_the_job_that_was_there_stays_as_it_is(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    await cluster.launch(job_request(job_id=MINE))
    after = await cluster.launch(job_request(after=(MINE,)))
    with pytest.raises(JobRefusedError, match="that job waits for 'mine' itself"):
        await cluster.launch(job_request(job_id=MINE, on_conflict="replace", after=(after,)))
    await start_worker()
    assert [info.status for info in await cluster.wait([MINE, after], timeout=60)] == [S, S]


@pytest.mark.parametrize("moment", ["marked", "written", "first task"])
async def test_a_controller_that_dies_in_the_middle_of_it(
    own_server: EmbeddedServer,
    start_controller: StartController,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    monkeypatch.setattr(submissions_module, "_ACK_WAIT_S", 1)
    dying = await start_controller()
    reached = asyncio.Event()
    writer = dying.controller.writer
    write, record_task = writer.write, writer.record_task

    async def stop_here() -> None:
        reached.set()
        await asyncio.Event().wait()

    async def write_until(record: object, revision: int) -> bool:
        done = await write(record, revision)  # type: ignore[arg-type]
        if moment == "marked" and getattr(record, "replacement", None) is not None:
            await stop_here()
        if moment == "written" and getattr(record, "earlier", None):
            await stop_here()
        return done

    async def record_until(task: TaskRecord) -> None:
        await record_task(task)
        if moment == "first task" and task.attempt > 1:
            await stop_here()

    monkeypatch.setattr(writer, "write", write_until)
    monkeypatch.setattr(writer, "record_task", record_until)
    worker = await start_worker(plan=lambda record: STAY_RUNNING if record.attempt == 1 else SUCCEED, cpu=8)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        await cluster.launch(job_request("old", job_id=MINE, replicas=4))
        await wait_until_async(lambda: len(worker.held) == 4)
        replacing = asyncio.create_task(
            cluster.launch(job_request("new", job_id=MINE, on_conflict="replace", replicas=2))
        )
        await reached.wait()
        await dying.stop()
        running = await start_controller()
        for task in range(4):
            # The wish may have been written without the worker hearing of it: a real worker reads its claims again now and then.
            look = RecordChanged(namespace=NS, job_id=MINE, task=task)
            await worker.on_record_changed(Delivery("look", look.to_json()))
        await replacing
        info = await cluster.wait(MINE, timeout=60)
        assert (info.status, info.name, len(info.tasks)) == (S, "new", 2)
        assert {task.attempt for task in info.tasks} == {2}
        assert started_at_most_once(worker)
        await _check_told(cluster.bus, K, S)

        async def clean() -> bool:
            rows = await records_table(running.bus, NS).rows()
            return sorted(row.key for row in rows) == [MINE, f"{MINE}.0", f"{MINE}.1"]

        await wait_until_async(clean)


async def test_the_end_of_the_old_job_is_kept_whole_when_its_replacement_is_stopped(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController
) -> None:
    await start_worker(plan=FAIL)
    await cluster.launch(job_request(job_id=MINE, cpu=2))
    assert (await cluster.wait(MINE, timeout=60)).status is F
    table, job_index = jobs_table(controller.bus, NS), controller.controller.job_index
    row = await table.get(MINE)
    assert row is not None
    error = TaskError(type="ValueError", message="no", traceback="t" * 5_000, pickled=b"p" * 5_000)
    ended = row.value.model_copy(update={"error": error, "replacement": Replacement(order=row.value.order + 1)})
    revision = await table.update(MINE, ended, row.revision)
    await wait_until_async(lambda: job_index.has_seen(NS, MINE, revision))
    await cluster.terminate(MINE, reason="enough")
    row = await table.get(MINE)
    assert row is not None
    assert row.value.replacement == Replacement(order=ended.order + 1, kill_requested="enough")
    assert row.value.model_copy(update={"replacement": ended.replacement}) == ended
