"""The controller on a real server, with workers that do what the test says."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.errors import JobNotFoundError, JobRefusedError
from fluster_bus import subjects
from fluster_bus import submissions as submissions_module
from fluster_bus.bus import Bus
from fluster_bus.errors import ServiceError, StorageError
from fluster_bus.feeds import Feed
from fluster_bus.messages import (
    Capacity,
    Endpoint,
    EndpointId,
    Entrypoint,
    Event,
    JobId,
    JobRecord,
    JobRequest,
    JobStatus,
    Namespace,
    OfferReply,
    ResourceConfig,
    TaskRecord,
    WorkerId,
)
from fluster_bus.messages.workers import Offer
from fluster_bus.registry import Registry
from fluster_bus.roles import Role
from fluster_bus.server import EmbeddedServer
from fluster_bus.streams import ensure_system, records_table, tasks_table
from fluster_bus.tables import Row, sequence_of_ack
from fluster_services.config import LOCAL_TIMING, Timing
from fluster_services.controller import registry_sweep
from fluster_services.controller.books import JobKey
from fluster_services.controller.controller import Controller, ControllerConfig
from fluster_services.controller.event_log import EventLog
from fluster_services.controller.verdicts import RecordUpdate
from tests.component.conftest import ConnectBus, kill_server
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

NS = Namespace("default")
IMPATIENT = Timing(
    heartbeat_s=0.1, fence_after_s=0.3, worker_timeout_s=0.5, kill_grace_s=0.1, unschedulable_after_s=0.3
)
S, F, K, W, U = (
    JobStatus.SUCCEEDED,
    JobStatus.FAILED,
    JobStatus.KILLED,
    JobStatus.WORKER_FAILED,
    JobStatus.UNSCHEDULABLE,
)


class RunningController:
    """A controller on a connection of its own; when the test ends it must still be there."""

    def __init__(self, server: EmbeddedServer, timing: Timing) -> None:
        self._server = server
        self._timing = timing
        self.bus: Bus
        self.controller: Controller
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> RunningController:
        address = self._server.credentials(Role.SERVICE)
        self.bus = await Bus.connect(address, name="controller")
        self.controller = Controller(self.bus, ControllerConfig(address=address, timing=self._timing))
        ready = asyncio.Event()
        self._task = asyncio.create_task(self.controller.run(ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        waiting.cancel()
        if self._task.done():
            await self._task
        assert ready.is_set()
        return self

    async def stop(self) -> None:
        """As a kill is: nothing is finished first."""
        if self._task is None:
            return
        task, self._task = self._task, None
        if task.done():
            await task  # raises what it died of
            raise AssertionError("the controller ended by itself")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.bus._nats.close()
        await self.bus.close()
        self.controller.books.sanity_check()
        self.controller.dispatch.scheduler.sanity_check()


StartController = Callable[..., Awaitable[RunningController]]
StartWorker = Callable[..., Awaitable[ToyWorker]]


@pytest.fixture
async def start_controller(own_server: EmbeddedServer) -> AsyncIterator[StartController]:
    async with AsyncExitStack() as stack:

        async def start(timing: Timing = LOCAL_TIMING) -> RunningController:
            running = await RunningController(own_server, timing).start()
            stack.push_async_callback(running.stop)
            return running

        yield start


@pytest.fixture
async def controller(start_controller: StartController) -> RunningController:
    return await start_controller()


@pytest.fixture
async def start_worker(own_server: EmbeddedServer, connect_bus: ConnectBus) -> StartWorker:
    async def start(
        worker_id: str = "w1",
        plan: Callable[..., Plan] | Plan = SUCCEED,
        *,
        cpu: float = 4,
        memory: int = 8 * GIB,
        heartbeat_s: float = 1.0,
    ) -> ToyWorker:
        bus = await connect_bus(own_server, Role.SERVICE, name=worker_id)
        planned = plan if callable(plan) else lambda _record: plan
        worker = ToyWorker(bus, WorkerId(worker_id), Capacity(cpu=cpu, memory=memory), planned, heartbeat_s)
        return await worker.start()

    return start


@pytest.fixture
async def cluster(own_server: EmbeddedServer, controller: RunningController) -> AsyncIterator[AsyncCluster]:
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        yield cluster


def _request(name: str = "job", *, cpu: float = 1, **fields: object) -> JobRequest:
    return JobRequest(
        name=name,
        entrypoint=Entrypoint(command=("true",)),
        resources=ResourceConfig.with_cpu(cpu),
        retry_backoff_s=0,
        **fields,  # type: ignore[arg-type]
    )


async def _events(bus: Bus) -> list[Event]:
    feed = Feed(
        bus,
        subjects.events_stream(NS),
        subject=subjects.events_of_all(NS),
        watch=subjects.watch_events(NS),
    )
    return [Event.from_json(entry.data) async for entry in feed.stored()]


async def _check_events(bus: Bus, jobs: list[JobId]) -> None:
    """Each transition of each record is told exactly once, and in order."""

    async def told() -> bool:
        """Everything that happened, up to the ends of all jobs."""
        ended = {
            event.job_id for event in await _events(bus) if event.task is None and event.transition.state.finished()
        }
        return set(jobs) <= ended

    await wait_until_async(told)
    records: dict[tuple[str, int | None], list[int]] = {}
    for event in await _events(bus):
        records.setdefault((event.job_id, event.task), []).append(event.transition.number)
    for key, numbers in records.items():
        assert numbers == list(range(1, len(numbers) + 1)), key
    assert {job_id for job_id, _ in records} == set(jobs)


# ---- deadlines and restarts -----------------------------------------------------------------------------


async def test_a_scheduling_timeout_goes_on_however_often_the_controller_is_restarted(
    own_server: EmbeddedServer, start_controller: StartController
) -> None:
    running = await start_controller()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        launched_at = time.monotonic()
        job_id = await cluster.launch(_request(scheduling_timeout_s=2))
        async with asyncio.timeout(10):
            for _ in range(3):
                await cluster.poll(job_id)  # it serves before it is stopped
                await running.stop()
                running = await start_controller()
            info = await cluster.wait(job_id)
        assert info.status is U
        assert time.monotonic() - launched_at >= 2


async def test_a_task_whose_time_is_over_is_given_up_also_when_that_could_not_be_written_at_first(
    cluster: AsyncCluster, controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = controller.controller._verdicts
    write = verdicts.write
    refused: list[Sequence[RecordUpdate]] = []

    async def write_later(namespace: Namespace, updates: Sequence[RecordUpdate]) -> list[int | None]:
        if len(refused) < 2:
            refused.append(updates)
            raise StorageError("the disk is full")
        return await write(namespace, updates)

    monkeypatch.setattr(verdicts, "write", write_later)
    info = await cluster.wait(await cluster.launch(_request(scheduling_timeout_s=0.1)), timeout=10)
    assert (info.status, len(refused)) == (U, 2)


async def test_a_pause_goes_on_however_often_the_controller_is_restarted(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    running = await start_controller()
    worker = await start_worker(plan=FAIL)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        request = _request(max_retries_failure=1).model_copy(update={"retry_backoff_s": 2.0})
        failed_at = time.monotonic()
        job_id = await cluster.launch(request)
        await wait_until_async(lambda: worker.starts)
        async with asyncio.timeout(10):
            while len(worker.starts) < 2:
                await running.stop()
                running = await start_controller()
        info = await cluster.wait(job_id, timeout=10)
        assert (info.status, info.tasks[0].attempt) == (F, 2)
        assert time.monotonic() - failed_at >= 1.4, "spread by a quarter"


# ---- a job's way ----------------------------------------------------------------------------------------


async def test_a_job_from_submit_to_end(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    job_id = await cluster.launch(_request("train"))
    waiting = await cluster.poll(job_id)
    assert (waiting.status, waiting.worker_id, waiting.name) == (JobStatus.PENDING, None, "train")
    worker = await start_worker()
    ended = await cluster.wait(job_id, timeout=10)
    assert (ended.status, ended.worker_id, ended.exit_code, ended.error_message) == (S, "w1", 0, "")
    assert ended.tasks[0].attempt == 1
    assert [job.job_id for job in await cluster.list_jobs()] == [job_id]
    assert await cluster.list_jobs(states=[JobStatus.RUNNING]) == []
    assert worker.starts == [subjects.attempt_key(NS, job_id, 0, 1)]
    await _check_events(cluster.bus, [job_id])


async def test_all_tasks_of_a_job_run(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    await start_worker(cpu=2)
    job_id = await cluster.launch(_request(replicas=5))
    ended = await cluster.wait(job_id, timeout=10)
    assert ended.status is S
    assert [(task.task, task.status) for task in ended.tasks] == [(each, S) for each in range(5)]


async def test_first_come_first_served(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController
) -> None:
    jobs = await cluster.launch_many([_request(f"job{each}") for each in range(20)])

    async def all_wait() -> bool:
        return all(len(info.tasks) == 1 for info in await cluster.list_jobs())

    await wait_until_async(all_wait)
    worker = await start_worker(plan=STAY_RUNNING, cpu=1, memory=GIB)
    dispatch = controller.controller.dispatch
    for _ in jobs:
        # Of offers that are out together the newest may find the room that came just after the oldest was declined.
        await wait_until_async(lambda: worker.held and dispatch.is_idle)
        await worker.end(worker.now_held()[0])
    await cluster.wait(jobs, timeout=10)
    order = [info.job_id for info in reversed(await cluster.list_jobs())]
    assert worker.starts == [subjects.attempt_key(NS, job_id, 0, 1) for job_id in order]


async def test_a_smaller_job_goes_past_one_that_does_not_fit_now(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    worker = await start_worker(plan=lambda record: STAY_RUNNING if record.resources.cpu > 1 else SUCCEED, cpu=4)
    large = await cluster.launch(_request("large", cpu=2))
    await wait_until_async(lambda: len(worker.held) == 1)
    larger = await cluster.launch(_request("larger", cpu=4))
    small = await cluster.launch(_request("small", cpu=1))
    assert (await cluster.wait(small, timeout=10)).status is S
    assert (await cluster.poll(larger)).status is JobStatus.PENDING
    await worker.end(subjects.attempt_key(NS, large, 0, 1))
    await wait_until_async(lambda: subjects.attempt_key(NS, larger, 0, 1) in worker.held)


async def test_sizes_between_two_levels_are_placed_too(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    """No worker with 3 CPUs listens on the class of 4."""
    await start_worker(cpu=3, memory=3 * GIB)
    request = _request().model_copy(update={"resources": ResourceConfig.with_cpu(3, memory="3GiB", disk=0)})
    assert (await cluster.wait(await cluster.launch(request), timeout=10)).status is S


async def test_room_on_another_worker_is_found(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    """Two offers at once may reach the same worker; the other one has room."""
    workers = [await start_worker(f"w{each}", STAY_RUNNING, cpu=1, memory=GIB) for each in range(4)]
    for _ in range(10):
        jobs = await cluster.launch_many([_request() for _ in workers])
        await wait_until_async(
            lambda: all(len(worker.held) == 1 for worker in workers),
            timeout_s=5,
            describe=lambda: [worker.now_held() for worker in workers],
        )
        for worker in workers:
            await worker.end(worker.now_held()[0])
        await cluster.wait(jobs, timeout=5)
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
    await worker._register()
    bus.spawn(worker._beat_forever(), "beats")
    await wait_until_async(_workers_of(cluster))
    # Asking for disk, it is offered by name alone.
    request = _request().model_copy(update={"resources": ResourceConfig.with_cpu(1, disk=1)})
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
    job_id = await cluster.launch(_request(replicas=2))
    if worker is not None:
        await wait_until_async(lambda: len(worker.held) == 2)
    await cluster.terminate(job_id, reason="enough")
    ended = await cluster.wait(job_id, timeout=10)
    assert ended.status is K
    assert "enough" in ended.error_message
    assert {task.status for task in ended.tasks} == {K}
    await cluster.terminate(job_id)
    assert (await cluster.poll(job_id)).status is K
    await _check_events(cluster.bus, [job_id])


async def test_stopping_as_soon_as_it_is_submitted(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    """The wish meets the claim, the start and the end in every order."""
    worker = await start_worker(plan=lambda record: SUCCEED if record.task % 2 else STAY_RUNNING)
    jobs = []
    for _ in range(40):
        job_id = await cluster.launch(_request(replicas=2))
        jobs.append(job_id)
        await cluster.terminate(job_id)
    ended = await cluster.wait(jobs, timeout=20)
    assert {info.status for info in ended} == {K}
    assert worker.held == {}
    await _check_events(cluster.bus, jobs)


async def test_a_record_that_changes_while_others_are_written_is_not_overwritten(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both tasks are to be stopped; one succeeds while the wish for the other is being written."""
    worker = await start_worker(plan=STAY_RUNNING)
    job_id = await cluster.launch(_request(replicas=2))
    first, second = (subjects.attempt_key(NS, job_id, task, 1) for task in (0, 1))
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
        return len(controller.controller.books.held_by(worker.worker_id)) == 1

    await wait_until_async(seen)
    go_on.set()
    ended = await cluster.wait(job_id, timeout=10)
    assert [task.status for task in ended.tasks] == [K, S]
    await _check_events(cluster.bus, [job_id])


async def test_what_has_ended_stays_as_it_ended(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    await start_worker()
    job_id = await cluster.launch(_request())
    assert (await cluster.wait(job_id, timeout=10)).status is S
    await cluster.terminate(job_id)
    assert (await cluster.poll(job_id)).status is S


async def test_stopping_a_job_that_is_not_there(cluster: AsyncCluster) -> None:
    with pytest.raises(JobNotFoundError, match="'nothing'"):
        await cluster.terminate(JobId("nothing"))
    with pytest.raises(JobNotFoundError, match="'nothing'"):
        await cluster.poll(JobId("nothing"))


async def test_a_job_ends_with_its_parent(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    worker = await start_worker(plan=STAY_RUNNING)
    parent = await cluster.launch(_request("parent"))
    child = await cluster.launch(_request("child", parent=parent))
    grandchild = await cluster.launch(_request("grandchild", parent=child))
    await wait_until_async(lambda: len(worker.held) == 3)
    await worker.end(subjects.attempt_key(NS, parent, 0, 1))
    ended = await cluster.wait([parent, child, grandchild], timeout=10)
    assert [info.status for info in ended] == [S, K, K]
    late = await cluster.launch(_request("late", parent=parent))
    assert (await cluster.wait(late, timeout=10)).status is K


# ---- trying again ---------------------------------------------------------------------------------------


async def test_a_task_that_fails_is_tried_again(cluster: AsyncCluster, start_worker: StartWorker) -> None:
    await start_worker(plan=lambda record: SUCCEED if record.attempt == 3 else FAIL)
    ended = await cluster.wait(await cluster.launch(_request(max_retries_failure=2)), timeout=10)
    assert (ended.status, ended.tasks[0].attempt, ended.tasks[0].failures) == (S, 3, 2)
    job_id = await cluster.launch(_request(max_retries_failure=1))
    ended = await cluster.wait(job_id, timeout=10)
    assert (ended.status, ended.tasks[0].attempt) == (F, 2)
    assert ended.error_message == "exit code 1"


async def test_the_tasks_of_a_lost_worker_run_elsewhere(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    await start_controller(IMPATIENT)
    lost = await start_worker("lost", STAY_RUNNING, heartbeat_s=0.1)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = [await cluster.launch(_request()), await cluster.launch(_request(max_retries_preemption=0))]
        await wait_until_async(lambda: len(lost.held) == 2)
        await lost.vanish()
        other = await start_worker("other", heartbeat_s=0.1)
        ended = await cluster.wait(jobs, timeout=10)
        assert [info.status for info in ended] == [S, W]
        task = ended[0].tasks[0]
        assert (task.attempt, task.preemptions, task.failures, task.worker_id) == (2, 1, 0, "other")
        assert "worker lost was not heard for 0.5 s" in ended[1].error_message
        assert other.starts == [subjects.attempt_key(NS, jobs[0], 0, 2)]
        assert not await lost.end(subjects.attempt_key(NS, jobs[0], 0, 1)), "its word does not count any more"
        assert (await cluster.poll(jobs[0])).status is S
        await wait_until_async(lambda: _names(cluster, {"other"}))
        lost.silent = False  # it comes back, is told that it is not known, and registers again
        await wait_until_async(lambda: _names(cluster, {"lost", "other"}))
        await _check_events(cluster.bus, jobs)


async def _names(cluster: AsyncCluster, expected: set[str]) -> bool:
    return {worker.info.worker_id for worker in await cluster.list_workers()} == expected


async def test_a_lost_worker_whose_task_is_being_stopped(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    """The wish and the verdict are written at the same time, and one of them is late."""
    await start_controller(IMPATIENT)
    lost = await start_worker("lost", STAY_RUNNING, heartbeat_s=0.1, cpu=64, memory=64 * GIB)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([_request() for _ in range(30)])
        await wait_until_async(lambda: len(lost.held) == 30)
        await lost.vanish()

        async def stop_later(job_id: JobId, after_s: float) -> None:
            await asyncio.sleep(after_s)
            await cluster.terminate(job_id)

        pauses = [0.3 + 0.4 * each / len(jobs) for each in range(len(jobs))]
        await asyncio.gather(*(stop_later(job_id, pause) for job_id, pause in zip(jobs, pauses, strict=True)))
        ended = await cluster.wait(jobs, timeout=10)
        assert {info.status for info in ended} == {K}


async def test_a_job_that_never_fits_is_given_up(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    await start_controller(IMPATIENT)
    await start_worker(heartbeat_s=0.1)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([_request("large", cpu=100), _request("small")])
        large, small = await cluster.wait(jobs, timeout=10)
        assert (large.status, small.status) == (U, S)
        assert large.error_message == ("needs 100 CPUs, 1 GiB memory; the largest worker, w1, has 4 CPUs, 8 GiB memory")


# ---- what is refused ------------------------------------------------------------------------------------


async def test_an_id_that_is_taken(cluster: AsyncCluster) -> None:
    job_id = JobId("mine")
    assert await cluster.launch(_request(job_id=job_id)) == job_id
    with pytest.raises(JobRefusedError, match="'mine' exists already"):
        await cluster.launch(_request(job_id=job_id))
    raw = _request("another", job_id=job_id)
    for _ in range(10):
        answer = await cluster.bus.request(subjects.jobs_submit(NS), raw.to_json())
        assert b"error" not in answer.data
    bus = cluster.bus
    await wait_until_async(lambda: _refusals(bus, 11))
    with pytest.raises(JobRefusedError, match="'mine' exists already"):
        await cluster.launch(raw)
    assert len(await cluster.list_jobs()) == 1
    await cluster.terminate(job_id)
    await cluster.wait(job_id, timeout=10)
    await wait_until_async(lambda: _job_events(bus, job_id, [1, 2]))


async def test_a_submission_that_the_stream_stored_twice_is_one(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController
) -> None:
    worker = await start_worker()
    sent = _request("train", job_id=JobId("mine"), submission="3f2a").to_json()
    places = []
    for _ in range(2):
        answer = await cluster.bus.request(subjects.jobs_submit(NS), sent)
        places.append(sequence_of_ack(answer, "submit"))
        looked_at = controller.controller.intake.wait_looked_at(JobKey(NS, JobId("mine")), places[-1])
        assert await looked_at is None, "it is not refused"
        assert (await cluster.wait(JobId("mine"), timeout=10)).status is S
    assert places[0] < places[1]
    assert len(worker.starts) == 1


async def test_a_refusal_does_not_hide_what_becomes_of_the_job_that_has_the_id(
    start_controller: StartController, own_server: EmbeddedServer, start_worker: StartWorker
) -> None:
    first = await start_controller()
    worker = await start_worker(plan=STAY_RUNNING)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        await cluster.launch(_request("other"))
        job_id = await cluster.launch(_request(job_id=JobId("mine")))
        with pytest.raises(JobRefusedError, match="exists already"):
            await cluster.launch(_request("another", job_id=job_id))
        await wait_until_async(lambda: _refusals(first.bus, 1))
        await wait_until_async(lambda: len(worker.held) == 2)
        await first.stop()
        second = await start_controller()
        for key in worker.now_held():
            await worker.end(key)
        assert (await cluster.wait(job_id, timeout=10)).status is S
        await wait_until_async(lambda: _job_events(second.bus, job_id, [1, 2]))


async def test_a_controller_that_comes_later_tells_of_a_job_that_has_the_id_of_one_that_was_removed(
    start_controller: StartController,
    own_server: EmbeddedServer,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = await start_controller()
    await start_worker()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        job_id = await cluster.launch(_request(job_id=JobId("mine")))
        assert (await cluster.wait(job_id, timeout=10)).status is S
        await wait_until_async(lambda: _job_events(first.bus, job_id, [1, 2]))
        table = records_table(first.bus, NS)
        for row in [*await table.rows(subjects.task_key_of_any(job_id)), *await table.rows(job_id)]:
            await table.delete(row.key)
        await first.stop()
        # Looked at on its way: the server forgets what it dropped as doubled only after minutes.
        told: list[int] = []

        async def append(_log: EventLog, _namespace: Namespace, events: list[Event]) -> None:
            told.extend(event.transition.number for event in events if event.task is None)

        monkeypatch.setattr(EventLog, "_append", append)
        await start_controller()
        await cluster.launch(_request(job_id=job_id, cpu=2))
        assert (await cluster.wait(job_id, timeout=10)).status is S
        await wait_until_async(lambda: told == [1, 2], describe=lambda: told)


async def test_a_worker_that_declines_what_it_said_it_has_room_for_is_asked_again(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    worker = await start_worker(cpu=3)  # no level: the offer is made by name
    look, looks = worker.claims.look, 0

    async def look_late(namespace: Namespace, job_id: str, task: int) -> Row[TaskRecord] | None:
        """As a server does that is behind the others: the first time the record is not there yet."""
        nonlocal looks
        looks += 1
        return await look(namespace, job_id, task) if looks > 1 else None

    worker.claims.look = look_late  # type: ignore[method-assign]
    job_id = await cluster.launch(_request(cpu=3))
    assert (await cluster.wait(job_id, timeout=10)).status is S


async def _refusals(bus: Bus, count: int) -> bool:
    return sum(event.transition.reason.startswith("refused") for event in await _events(bus)) == count


async def _job_events(bus: Bus, job_id: str, numbers: list[int]) -> bool:
    told = [event for event in await _events(bus) if event.job_id == job_id and event.task is None]
    return [event.transition.number for event in told if "refused" not in event.transition.reason] == numbers


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense",
        b"",
        b'{"name": "a.b", "entrypoint": {"command": ["true"]}}',
        b'{"name": "job", "entrypoint": {"callable": "f", "args": 5}}',
        b'{"name": "job", "entrypoint": {"command": ["true"]}, "resources": {"memory": 1e999}}',
        b'{"name": "job", "job_id": "job", "entrypoint": {"command": ["' + b"x" * (8_300_000) + b'"]}}',
        b'{"name": "job", "entrypoint": {"command": ["true"]}, "ports": ["' + b"x" * 1_000_000 + b'"]}',
    ],
    ids=["no JSON", "empty", "bad name", "callable", "infinite", "huge", "long value"],
)
async def test_what_is_no_job_is_refused_with_an_event(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController, data: bytes
) -> None:
    await cluster.bus.request(subjects.jobs_submit(NS), data)
    await wait_until_async(lambda: _refusals(cluster.bus, 1))
    (refused,) = await _events(cluster.bus)
    assert refused.transition.state is F
    assert len(refused.transition.reason) < 20_000
    await wait_until_async(lambda: _nothing_left(controller.bus))
    await start_worker()
    job_id = await cluster.launch(_request())
    assert (await cluster.wait(job_id, timeout=10)).status is S, "the next one is not held up"


async def _nothing_left(bus: Bus) -> bool:
    return (await bus.jetstream.stream_info(subjects.SUBMIT_STREAM)).state.messages == 0


async def test_a_namespace_that_the_cluster_does_not_have(
    own_server: EmbeddedServer, controller: RunningController, cluster: AsyncCluster
) -> None:
    with pytest.raises(ServiceError, match="no namespace 'nowhere'; it has default"):
        await AsyncCluster.connect(own_server.credentials(Role.OPERATOR), namespace="nowhere")
    async with await AsyncCluster.connect(own_server.credentials(Role.OPERATOR)) as operator:
        for namespace in ("nowhere", "sys", "a$b"):
            subject = subjects.jobs_submit(NS).replace(NS, namespace)
            await operator.bus.request(subject, _request().to_json())
        await wait_until_async(lambda: _nothing_left(controller.bus))
    assert await cluster.list_jobs() == []


async def test_garbage_in_the_registry_stops_nobody(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    """Jobs may write to it."""
    job = await connect_bus(own_server, Role.JOB, NS)
    bucket = subjects.endpoints_bucket(NS)
    foreign = Endpoint.model_construct(
        endpoint_id=EndpointId("*"), name="calc", address="x", namespace=NS, job_id=JobId("a.>"), task=-1
    )
    for key, data in (("calc.-.0.0.e1", b"nonsense"), ("odd", b"{}"), ("calc.-.0.0.e2", foreign.to_json())):
        await job.request(subjects.bucket_key(bucket, key), data)
    registry = Registry(job, NS)
    good = await registry.register(registry.endpoint("calc", "here"))
    stale = await registry.register(registry.endpoint("calc", "there", job_id=JobId("nobody")))
    await wait_until_async(lambda: _registered(registry, "there", there=False))
    assert stale not in await cluster.lookup_endpoints("calc")
    assert good in await cluster.lookup_endpoints("calc")
    await start_worker()
    assert (await cluster.wait(await cluster.launch(_request()), timeout=10)).status is S


# ---- endpoints ------------------------------------------------------------------------------------------


async def _registered(registry: Registry, address: str, *, there: bool) -> bool:
    return any(endpoint.address == address for endpoint in await registry.list()) == there


async def test_endpoints_of_an_attempt_go_with_it(
    cluster: AsyncCluster, start_worker: StartWorker, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    worker = await start_worker(plan=STAY_RUNNING)
    job_id = await cluster.launch(_request(max_retries_failure=1))
    await wait_until_async(lambda: len(worker.held) == 1)
    registry = Registry(await connect_bus(own_server, Role.JOB, NS), NS)
    for address in ("one", "two"):
        await registry.register(registry.endpoint("calc", address, job_id=job_id, task=0, attempt=1))
    early = await registry.register(registry.endpoint("calc", "early", job_id=job_id, task=0, attempt=2))
    assert len(await cluster.lookup_endpoints("calc")) == 3
    await worker.end(subjects.attempt_key(NS, job_id, 0, 1), F)
    for address in ("one", "two"):
        await wait_until_async(lambda: _registered(registry, address, there=False))  # noqa: B023
    await wait_until_async(lambda: worker.now_held() == [subjects.attempt_key(NS, job_id, 0, 2)])
    assert await cluster.lookup_endpoints("calc") == [early]
    await worker.end(subjects.attempt_key(NS, job_id, 0, 2))
    await wait_until_async(lambda: _registered(registry, "early", there=False))


async def test_a_lease_that_is_not_renewed_ends(
    own_server: EmbeddedServer,
    start_controller: StartController,
    connect_bus: ConnectBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_sweep, "_TICK_S", 0.02)
    await start_controller()
    registry = Registry(await connect_bus(own_server, Role.JOB, NS), NS)
    made = [registry.endpoint("calc", address) for address in ("renewed", "left")]
    renewed, left = (endpoint.model_copy(update={"lease_s": 0.3}) for endpoint in made)
    for endpoint in (renewed, left):
        await registry.register(endpoint)

    async def gone() -> bool:
        await registry.register(renewed)
        return await registry.lookup("calc") == [renewed]

    await wait_until_async(gone)
    await wait_until_async(lambda: _registered(registry, "renewed", there=False))


async def test_a_controller_that_was_stopped_does_not_judge_leases(
    own_server: EmbeddedServer,
    start_controller: StartController,
    connect_bus: ConnectBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It heard no renewals, since it heard nothing at all."""
    monkeypatch.setattr(registry_sweep, "_TICK_S", 0.02)
    monkeypatch.setattr(registry_sweep, "_LATE_S", 0.1)
    controller = await start_controller()
    registry = Registry(await connect_bus(own_server, Role.JOB, NS), NS)
    endpoint = registry.endpoint("calc", "here").model_copy(update={"lease_s": 0.3})
    await registry.register(endpoint)
    seen = controller.controller.registry._namespaces[NS].endpoints
    await wait_until_async(lambda: len(seen) == 1)
    time.sleep(0.5)  # noqa: ASYNC251 - as a stopped process does
    stale = controller.controller.registry._namespaces[NS].stale
    await asyncio.sleep(0.1)
    assert stale.empty()
    assert await registry.lookup("calc") == [endpoint]
    await wait_until_async(lambda: _registered(registry, "here", there=False))


async def test_the_registry_by_request(cluster: AsyncCluster) -> None:
    """For clients without the right to write it."""
    endpoint = Registry(cluster.bus, NS).endpoint("calc", "here")
    from fluster_bus.messages import Done, EndpointList, EndpointQuery, UnregisterRequest

    def verb(name: str) -> str:
        return subjects.endpoints_verb(NS, name)

    assert await cluster.bus.ask(verb("register"), endpoint, Endpoint) == endpoint
    for query in (EndpointQuery(name="calc"), EndpointQuery(prefix="ca"), EndpointQuery()):
        found = await cluster.bus.ask(verb("lookup"), query, EndpointList)
        assert found.endpoints == (endpoint,)
    elsewhere = endpoint.model_copy(update={"namespace": Namespace("other")})
    with pytest.raises(ServiceError, match="'other'"):
        await cluster.bus.ask(verb("register"), elsewhere, Endpoint)
    await cluster.bus.ask(verb("unregister"), UnregisterRequest(endpoint_id=endpoint.endpoint_id), Done)
    assert (await cluster.bus.ask(verb("list"), EndpointQuery(), EndpointList)).endpoints == ()


# ---- restarts -------------------------------------------------------------------------------------------


async def test_a_job_submitted_without_a_controller(
    own_server: EmbeddedServer, start_controller: StartController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions_module, "_ACK_WAIT_S", 1)
    controller = await start_controller()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        await controller.stop()
        job_id = await cluster.launch(_request())
        polling = asyncio.create_task(cluster.poll(job_id))
        await start_controller()
        assert (await polling).status is JobStatus.PENDING
        await cluster.terminate(job_id)
        assert (await cluster.wait(job_id, timeout=10)).status is K


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
                [_request(f"job{each}", max_retries_failure=2, replicas=1 + each % 2) for each in range(100)]
            )
        )
        for _ in range(6):
            await asyncio.sleep(dice.uniform(0, 0.25))
            await controller.stop()
            controller = await start_controller()
        jobs = await submitting
        ended = await cluster.wait(jobs, timeout=40)
        assert len(ended) == 100
        assert {info.status for info in ended} <= {S, F, K}
        assert started_at_most_once(*workers)
        for info in ended:
            assert all(task.attempt <= 3 for task in info.tasks)
        await _check_events(cluster.bus, jobs)
        # Once more from nothing: a controller that has only the records tells nothing twice.
        told = Counter((event.job_id, event.task, event.transition.number) for event in await _events(cluster.bus))
        await controller.stop()
        await start_controller()
        job_id = await cluster.launch(_request("last"))
        await cluster.wait(job_id, timeout=10)
        await _check_events(cluster.bus, [*jobs, job_id])
        again = Counter((event.job_id, event.task, event.transition.number) for event in await _events(cluster.bus))
        assert max(again.values()) == 1
        assert told.keys() <= again.keys()


@pytest.mark.slow
async def test_a_restart_of_the_bus_loses_no_healthy_worker(
    own_server: EmbeddedServer, start_worker: StartWorker, start_controller: StartController
) -> None:
    await start_controller(IMPATIENT)
    workers = [await start_worker(f"w{each}", STAY_RUNNING, heartbeat_s=0.1) for each in range(2)]
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([_request() for _ in range(4)])
        await wait_until_async(lambda: sum(len(worker.held) for worker in workers) == 4)
        for _ in range(3):
            kill_server(own_server)
            await asyncio.sleep(0.7)  # longer than any worker may be silent: the time itself is what is tried
            own_server.start()
            await cluster.bus.wait_connected(10)
            await wait_until_async(lambda: _names(cluster, {"w0", "w1"}))
        for worker in workers:
            for key in worker.now_held():
                assert await worker.end(key)
        ended = await cluster.wait(jobs, timeout=10)
        assert {(info.status, info.tasks[0].attempt) for info in ended} == {(S, 1)}
        await _check_events(cluster.bus, jobs)


async def test_the_server_goes_while_jobs_run_through(
    own_server: EmbeddedServer,
    start_worker: StartWorker,
    controller: RunningController,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = [await start_worker(f"w{each}", cpu=3, memory=3 * GIB) for each in range(2)]
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([_request(f"job{each}") for each in range(100)])
        for _ in range(2):
            kill_server(own_server)
            await wait_until_async(lambda: not cluster.bus.connected)
            own_server.start()
            await wait_until_async(lambda: cluster.bus.connected)
        ended = await cluster.wait(jobs, timeout=30)
        assert Counter(info.status for info in ended) == {S: 100}
        assert started_at_most_once(*workers)
        await _check_events(cluster.bus, jobs)


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
    create = first.controller.intake._create

    async def create_two(record: object) -> None:
        if wrote.is_set():
            await asyncio.Event().wait()
        await create(record)  # type: ignore[arg-type]
        if getattr(record, "task", None) == 0:
            wrote.set()

    monkeypatch.setattr(first.controller.intake, "_create", create_two)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        submitting = asyncio.create_task(cluster.launch(_request(replicas=3)))
        await wrote.wait()
        await first.stop()
        await start_worker()
        await start_controller()
        job_id = await submitting
        ended = await cluster.wait(job_id, timeout=10)
        assert (ended.status, len(ended.tasks)) == (S, 3)
        bus = await connect_bus(own_server)
        assert len(await tasks_table(bus, NS).rows(f"{job_id}.*")) == 3
        await _check_events(cluster.bus, [job_id])
