"""Records of finished jobs go in time, with all that belongs to them; the history stays."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.errors import JobNotFoundError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import ObjectNotFoundError
from fluster_bus.core.roles import Role
from fluster_bus.messages import (
    Capacity,
    Entrypoint,
    EnvironmentConfig,
    JobId,
    JobRecord,
    JobRequest,
    JobStatus,
    Namespace,
    ResourceConfig,
    TaskError,
    TaskResult,
    WorkerId,
)
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.feeds import Feed
from fluster_bus.storage.stored_messages import ResultStore, SecretStore
from fluster_bus.storage.streams import jobs_table, records_table
from fluster_services import job_lifecycle
from fluster_services.config import LOCAL_TIMING, RecordLimits
from fluster_services.controller.controller import Controller, ControllerConfig
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.sweeps import retention
from tests.component.conftest import ConnectBus
from tests.component.toy_worker import STAY_RUNNING, SUCCEED, Plan, ToyWorker
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

NS = Namespace("default")
AT_ONCE = RecordLimits(kept_s=0.2, sure_after_s=0, kept_at_least_s=0, sweep_s=0.02)
THREE = RecordLimits(max_finished=3, kept_at_least_s=0, sweep_s=0.02)
NEVER = RecordLimits(sweep_s=0.02)


@asynccontextmanager
async def controller(
    server: EmbeddedServer, limits: RecordLimits, *, controller_id: str = "controller"
) -> AsyncIterator[Controller]:
    """A controller that is gone afterwards, as after a kill."""
    address = server.credentials(Role.SERVICE)
    bus = await Bus.connect(address, name="controller")
    running = Controller(
        bus, ControllerConfig(address, timing=LOCAL_TIMING, records=limits, controller_id=controller_id)
    )
    ready = asyncio.Event()
    task = asyncio.create_task(running.run(ready.set))
    task.add_done_callback(lambda _task: ready.set())
    await ready.wait()
    assert not task.done(), task
    try:
        yield running
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.close()
        running.job_index.sanity_check()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def _request(name: str = "job", **fields: object) -> JobRequest:
    entrypoint = Entrypoint(command=("true",))
    return JobRequest(name=name, entrypoint=entrypoint, resources=ResourceConfig.with_cpu(1), **fields)  # type: ignore[arg-type]


async def _start_worker(bus: Bus, plan: Plan = SUCCEED) -> ToyWorker:
    return await ToyWorker(bus, WorkerId("w1"), Capacity(cpu=8, memory=64 << 30), lambda _record: plan, 1.0).start()


async def _connect(server: EmbeddedServer, stack: AsyncExitStack) -> AsyncCluster:
    return await stack.enter_async_context(await AsyncCluster.connect(server.credentials(Role.CLIENT, NS)))


async def _keys(bus: Bus) -> list[str]:
    return sorted(row.key for row in await records_table(bus, NS).rows())


async def _messages(bus: Bus) -> int:
    stream = buckets.bucket_stream(buckets.jobs_bucket(NS))
    return (await bus.jetstream.stream_info(stream)).state.messages


async def test_a_finished_job_goes_with_its_tasks_results_and_marks(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_MARK_KEPT_S", 0.0)
    bus = await connect_bus(own_server, Role.SERVICE)
    running = await stack.enter_async_context(controller(own_server, AT_ONCE))
    await _start_worker(bus)
    cluster = await _connect(own_server, stack)
    empty = await _messages(bus)  # who leads stands there, too
    job_id = await cluster.launch(_request(replicas=3))
    await ResultStore(bus, NS).put(job_id, 0, 1, [b"12345"])  # as if it had heard in time

    async def is_gone() -> bool:
        return await _messages(bus) == empty and not await _keys(bus)

    await wait_until_async(is_gone)
    with pytest.raises(JobNotFoundError):
        await cluster.poll(job_id)
    assert await cluster.list_jobs() == []
    assert running.job_index.keys() == []
    assert running.events._seen == {}  # noqa: SLF001 - bounded memory
    feed = Feed(bus, buckets.events_stream(NS), subject=subjects.events(NS, job_id), watch=subjects.watch_events(NS))
    assert len([entry async for entry in feed.stored()]) == 2 + 3 * 4  # what happened stays


async def test_results_go_with_their_job(bus: Bus, namespace: Namespace) -> None:
    store = ResultStore(bus, namespace)
    await store.put("a", 0, 1, [b"12345"])
    await store.put("a-2", 0, 1, [b"12345"])
    await store.remove("a")
    with pytest.raises(ObjectNotFoundError):
        await store.get("a", 0, 1, 5)
    assert await store.get("a-2", 0, 1, 5) == b"12345"


async def test_an_id_can_be_used_again(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    await stack.enter_async_context(controller(own_server, AT_ONCE))
    await _start_worker(bus)
    cluster = await _connect(own_server, stack)
    for _ in range(3):
        await cluster.launch(_request(job_id=JobId("same")))

        async def is_gone() -> bool:
            return await jobs_table(bus, NS).get("same") is None

        await wait_until_async(is_gone)


async def test_of_too_many_the_oldest_go_and_what_runs_stays(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    running = await stack.enter_async_context(controller(own_server, THREE))
    worker = await _start_worker(bus, STAY_RUNNING)
    cluster = await _connect(own_server, stack)
    first = await cluster.launch(_request("first"))
    jobs = []
    for number in range(6):
        jobs.append(await cluster.launch(_request(f"job{number}")))
        attempt, job = buckets.attempt_key(NS, jobs[-1], 0, 1), JobKey(NS, jobs[-1])
        await wait_until_async(functools.partial(worker.held.__contains__, attempt))
        await worker.end(attempt)
        await wait_until_async(functools.partial(_has_ended, running, job))

    async def left() -> bool:
        return {job.job_id for job in await cluster.list_jobs()} == {first, *jobs[3:]}

    await wait_until_async(left)
    assert (await cluster.poll(first)).status is JobStatus.RUNNING


def _has_ended(running: Controller, key: JobKey) -> bool:
    entry = running.job_index.get(key)
    return entry is None or (entry.job is not None and entry.job.value.state.finished())


async def test_a_parent_stays_until_its_children_have_ended(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    await stack.enter_async_context(controller(own_server, AT_ONCE))
    worker = await _start_worker(bus, STAY_RUNNING)
    cluster = await _connect(own_server, stack)
    parent = await cluster.launch(_request("parent"))
    await wait_until_async(lambda: buckets.attempt_key(NS, parent, 0, 1) in worker.held)
    child = await cluster.launch(_request("child", parent=parent))
    await wait_until_async(lambda: buckets.attempt_key(NS, child, 0, 1) in worker.held)
    await worker.end(buckets.attempt_key(NS, parent, 0, 1))

    async def both_gone() -> bool:
        return await _keys(bus) == []

    await wait_until_async(both_gone)
    feed = Feed(bus, buckets.events_stream(NS), subject=subjects.events(NS, child), watch=subjects.watch_events(NS))
    assert any(b"its parent" in entry.data for entry in [entry async for entry in feed.stored()])


async def test_a_sweep_that_was_cut_short_is_taken_up_again(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    async with controller(own_server, NEVER):
        await _start_worker(bus)
        async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
            job_id = await cluster.launch(_request(replicas=2))
            await cluster.wait(job_id, timeout=60)
    await records_table(bus, NS).delete(buckets.task_key(job_id, 0))
    running = await stack.enter_async_context(controller(own_server, AT_ONCE))

    async def is_gone() -> bool:
        return await _keys(bus) == []

    await wait_until_async(is_gone)
    await wait_until_async(lambda: running.job_index.keys() == [])


async def test_a_job_that_takes_the_id_of_one_that_is_just_removed_stays(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    running = await stack.enter_async_context(controller(own_server, NEVER))
    worker = await _start_worker(bus, STAY_RUNNING)
    cluster = await _connect(own_server, stack)
    job_id = JobId("mine")
    await cluster.launch(_request("old", job_id=job_id))
    await wait_until_async(lambda: worker.held)
    row = worker.held.pop(buckets.attempt_key(NS, job_id, 0, 1))
    worker.ledger.release(buckets.attempt_key(NS, job_id, 0, 1))
    await worker.claims.end(row, JobStatus.SUCCEEDED, "exit code 0", exit_code=0, result=TaskResult(size=5))
    await cluster.wait(job_id, timeout=60)
    remove = ResultStore.remove

    async def remove_late(store: ResultStore, job: str) -> None:
        await cluster.launch(_request("new", job_id=job_id, on_conflict="replace"))
        await wait_until_async(lambda: worker.held)
        await remove(store, job)

    monkeypatch.setattr(ResultStore, "remove", remove_late)
    await running.retention.removed(JobKey(NS, job_id))
    assert (await cluster.poll(job_id)).name == "new"
    assert await _keys(bus) == ["mine", "mine.0"]
    await worker.end(worker.now_held()[0])
    assert (await cluster.wait(job_id, timeout=60)).status is JobStatus.SUCCEEDED


async def test_an_id_whose_records_are_half_removed_is_taken_when_they_all_are(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    """What its tasks have told and tried, and the next could go on from, is not known any more."""
    bus = await connect_bus(own_server, Role.SERVICE)
    await stack.enter_async_context(controller(own_server, NEVER))
    await _start_worker(bus)
    cluster = await _connect(own_server, stack)
    job_id = JobId("mine")
    await cluster.launch(_request("old", job_id=job_id, replicas=2))
    await cluster.wait(job_id, timeout=60)
    await records_table(bus, NS).delete(buckets.task_key(job_id, 0))
    await cluster.launch(_request("new", job_id=job_id, replicas=2, on_conflict="replace"))
    info = await cluster.wait(job_id, timeout=60)
    assert (info.name, info.status, [task.attempt for task in info.tasks]) == ("new", JobStatus.SUCCEEDED, [1, 1])
    row = await jobs_table(bus, NS).get(job_id)
    assert row is not None
    assert (row.value.earlier, row.value.told_before) == ((), 0)


async def test_another_controller_hears_of_it(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    """It stands by and watches the records, so it keeps no more in memory than the one that leads and sweeps."""
    bus = await connect_bus(own_server, Role.SERVICE)
    await stack.enter_async_context(controller(own_server, AT_ONCE))
    other = await stack.enter_async_context(controller(own_server, NEVER, controller_id="other"))
    await _start_worker(bus, STAY_RUNNING)
    cluster = await _connect(own_server, stack)
    job_id = await cluster.launch(_request(replicas=2))
    await wait_until_async(lambda: other.job_index.keys() != [])
    await cluster.terminate(job_id)
    await wait_until_async(lambda: other.job_index.keys() == [])
    assert other.retention.planned == 0


# ---- what is kept in memory ---------------------------------------------------------------------------------


def _large(name: str = "large", **fields: object) -> JobRequest:
    entrypoint = Entrypoint(callable=len, args=(b"x" * 100_000,))
    return JobRequest(name=name, entrypoint=entrypoint, resources=ResourceConfig.with_cpu(1), **fields)  # type: ignore[arg-type]


async def test_a_large_callable_is_in_the_record_until_the_job_has_finished(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    running = await stack.enter_async_context(controller(own_server, NEVER))
    worker = await _start_worker(bus, STAY_RUNNING)
    cluster = await _connect(own_server, stack)
    table = jobs_table(bus, NS)
    job_id = await cluster.launch(_large(replicas=2))
    await wait_until_async(lambda: len(worker.held) == 2)
    entry = running.job_index.get(JobKey(NS, job_id))
    assert entry is not None
    assert entry.job is not None
    assert len(entry.job.value.to_json()) < 1_000

    async def stored() -> int:
        row = await table.get(job_id)
        assert row is not None
        return len(row.value.to_json())

    assert await stored() > 100_000
    await cluster.terminate(job_id)  # which is written into the record
    info = await cluster.wait(job_id, timeout=60)
    assert info.status is JobStatus.KILLED
    assert await stored() < 1_500


async def test_a_kill_wish_leaves_the_callable_in_the_record(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    running = await stack.enter_async_context(controller(own_server, NEVER))
    await _start_worker(bus, STAY_RUNNING)
    cluster = await _connect(own_server, stack)
    job_id = await cluster.launch(_large())
    entry = running.job_index.get(JobKey(NS, job_id))
    assert entry is not None
    assert entry.job is not None
    wish = job_lifecycle.request_job_kill(entry.job.value, reason="enough")
    assert wish is not None
    whole = await running.writer.whole(wish, entry.job.revision)
    assert isinstance(whole, JobRecord)
    assert whole.kill_requested == "enough"
    assert len(whole.to_json()) > 100_000
    assert await running.writer.whole(wish, entry.job.revision - 1) is None  # another writer was first


async def test_a_large_exception_is_told_whole(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    running = await stack.enter_async_context(controller(own_server, NEVER))
    worker = await _start_worker(bus, STAY_RUNNING)
    cluster = await _connect(own_server, stack)
    job_id = await cluster.launch(_request())
    key = buckets.attempt_key(NS, job_id, 0, 1)
    await wait_until_async(lambda: key in worker.held)
    error = TaskError(type="ValueError", message="no", traceback="t" * 10_000, pickled=b"\x80" * 100_000)
    row = await worker.claims.look(NS, job_id, 0)
    assert row is not None
    assert await worker.claims.end(row, JobStatus.FAILED, "it raised", exit_code=1, error=error)
    assert (await cluster.wait(job_id, timeout=60)).error == error
    entry = running.job_index.get(JobKey(NS, job_id))
    assert entry is not None
    assert entry.job is not None
    assert len(entry.job.value.to_json()) < 1_500
    assert entry.task_records()[0].error is None
    assert (await cluster.list_jobs())[0].error is None


async def test_the_end_of_a_job_that_was_replaced_takes_nothing_from_the_one_that_has_its_id_now(
    own_server: EmbeddedServer, connect_bus: ConnectBus, stack: AsyncExitStack
) -> None:
    running = await stack.enter_async_context(controller(own_server, THREE))
    cluster = await _connect(own_server, stack)
    job_id = JobId("mine")
    plans = iter([SUCCEED, STAY_RUNNING, *[SUCCEED] * 6])
    bus = await connect_bus(own_server, Role.SERVICE)
    worker = ToyWorker(bus, WorkerId("w1"), Capacity(cpu=8, memory=64 << 30), lambda _record: next(plans), 1.0)
    await worker.start()
    await cluster.launch(_request(job_id=job_id))
    await cluster.wait(job_id, timeout=60)
    await cluster.launch(_request(job_id=job_id, on_conflict="replace"))
    await wait_until_async(lambda: len(worker.held) == 1)
    others = await cluster.launch_many([_request() for _ in range(6)])

    async def swept() -> bool:
        return len(await cluster.list_jobs()) == 4

    await wait_until_async(swept)
    assert (await cluster.poll(job_id)).status is JobStatus.RUNNING
    assert {info.job_id for info in await cluster.list_jobs()} - {job_id} < set(others)
    await worker.end(worker.now_held()[0])
    assert (await cluster.wait(job_id, timeout=60)).tasks[0].attempt == 2
    assert JobKey(NS, job_id) in running.job_index.keys()  # noqa: SIM118 - a method of the index


# ---- secrets --------------------------------------------------------------------------------------------

EAGER = RecordLimits(secrets_sweep_s=0.02, secrets_orphaned_s=0.1)


async def test_secrets_that_a_dead_controller_left_go_and_those_of_a_job_stay(
    own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(own_server, Role.SERVICE)
    store = SecretStore(bus, NS)
    async with controller(own_server, NEVER):
        async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS), NS) as cluster:
            environment = EnvironmentConfig(secrets=["PATH"])
            job_id = await cluster.launch(_request(environment=environment))
        (wanted,) = await store.names()
        await store.put("of-a-job-that-is-over", {"A": "1"})
    async with controller(own_server, EAGER):
        await wait_until_async(lambda: _only(store, wanted))
        async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS), NS) as cluster:
            await cluster.terminate(job_id)
        await wait_until_async(lambda: _only(store))


async def _only(store: SecretStore, *names: str) -> bool:
    return await store.names() == set(names)
