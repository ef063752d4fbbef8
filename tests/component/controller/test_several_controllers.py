"""Several controllers on one real server: one leads, another follows it, and none that was deposed decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import (
    Capacity,
    Entrypoint,
    Event,
    JobId,
    JobRecord,
    JobRequest,
    JobStatus,
    Namespace,
    TaskRecord,
    WorkerId,
)
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.feeds import Feed
from fluster_bus.storage.streams import fences_table, jobs_table, leaders_table, tasks_table
from fluster_bus.storage.tables import Table, Update
from fluster_services import lifecycle
from fluster_services.config import Timing
from fluster_services.controller.controller import Controller, ControllerConfig
from fluster_services.controller.leading.seat import DeposedError
from tests.component.conftest import ConnectBus, kill_server
from tests.component.toy_worker import GIB, STAY_RUNNING, SUCCEED, Plan, ToyWorker
from tests.insides import nats_client_of
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

NS = Namespace("default")
LEASE_S = 3.0  # a busy machine holds a process up for part of it
TIMING = Timing(heartbeat_s=0.2, fence_after_s=20, worker_timeout_s=30, kill_grace_s=0.1, leader_lease_s=LEASE_S)


class Member:
    """One of several controllers."""

    def __init__(self, server: EmbeddedServer, controller_id: str, *, in_place: bool, timing: Timing) -> None:
        self._address = server.credentials(Role.SERVICE)
        self._config = ControllerConfig(address=self._address, timing=timing, controller_id=controller_id)
        self._in_place = in_place
        self.name = controller_id
        self.ready = asyncio.Event()
        self.bus: Bus
        self.controller: Controller
        self.task: asyncio.Task[None]

    async def start(self) -> Member:
        self.bus = await Bus.connect(self._address, name=self.name)
        self.controller = Controller(self.bus, self._config, in_place=self._in_place)
        self.task = asyncio.create_task(self.controller.run(self.ready.set))
        await wait_until_async(lambda: self.ready.is_set() or self.task.done())
        assert self.ready.is_set(), self.task
        return self

    @property
    def leads(self) -> bool:
        return self.controller.seat.leads and self.controller.namespaces.leads(NS)

    async def vanish(self) -> None:
        """As SIGKILL takes it: nothing is said."""
        await nats_client_of(self.bus).close()
        await self.leave()

    async def leave(self) -> None:
        """As on SIGTERM: it is cancelled, and then its connection closed."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.bus.close()


StartMember = Callable[..., Awaitable[Member]]
StartWorker = Callable[..., Awaitable[ToyWorker]]


@pytest.fixture
async def start(own_server: EmbeddedServer) -> AsyncIterator[StartMember]:
    async with AsyncExitStack() as stack:

        async def start(controller_id: str, *, in_place: bool = True, timing: Timing = TIMING) -> Member:
            member = await Member(own_server, controller_id, in_place=in_place, timing=timing).start()
            stack.push_async_callback(member.leave)
            return member

        yield start


@pytest.fixture
async def start_worker(own_server: EmbeddedServer, connect_bus: ConnectBus) -> StartWorker:
    async def start_worker(worker_id: str = "w1", plan: Plan = SUCCEED) -> ToyWorker:
        bus = await connect_bus(own_server, Role.SERVICE, name=worker_id)
        return await ToyWorker(bus, WorkerId(worker_id), Capacity(cpu=4, memory=8 * GIB), lambda _: plan, 0.2).start()

    return start_worker


def _request(name: str = "job", **fields: Any) -> JobRequest:
    return JobRequest(name=name, entrypoint=Entrypoint(command=("true",)), retry_backoff_s=0, **fields)


async def _holder(bus: Bus) -> str:
    row = await leaders_table(bus).get(buckets.LEADER_KEY)
    return row.value.controller_id if row is not None else ""


async def _run(tasks: Table[TaskRecord], count: int) -> bool:
    return [row.value.state for row in await tasks.rows("*.*")] == [JobStatus.RUNNING] * count


# ---- who leads ------------------------------------------------------------------------------------------


async def test_one_leads_and_the_others_read_along(
    start: StartMember, start_worker: StartWorker, own_server: EmbeddedServer
) -> None:
    first, second = await start("c1"), await start("c2")
    assert (first.leads, second.leads, await _holder(first.bus)) == (True, False, "c1")
    await start_worker()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([_request() for _ in range(20)])
        assert {info.status for info in await cluster.wait(jobs, timeout=60)} == {JobStatus.SUCCEEDED}
        await wait_until_async(
            lambda: (
                sum(
                    isinstance(each, JobRecord) and each.state.finished()
                    for _, each in second.controller.job_index.records()
                )
                == 20
            )
        )
    assert len(second.controller.intake.outcomes) == 0
    assert all(queue.empty() for queue in second.controller.events._queues.values())  # noqa: SLF001 - what waits to be published, before it is
    assert len(second.controller.dispatch.scheduler) == 0


async def test_another_takes_over_when_the_leader_is_gone(
    start: StartMember, start_worker: StartWorker, own_server: EmbeddedServer
) -> None:
    first, second = await start("c1"), await start("c2")
    worker = await start_worker(plan=STAY_RUNNING)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        held = await cluster.launch(_request("held"))
        await wait_until_async(lambda: len(worker.held) == 1)
        await first.vanish()
        assert not second.leads
        later = await cluster.launch(_request("later"))
        await wait_until_async(lambda: len(worker.held) == 2)
        assert second.leads
        for key in worker.now_held():
            assert await worker.end(key)
        infos = await cluster.wait([held, later], timeout=60)
        assert {(info.status, info.tasks[0].attempt) for info in infos} == {(JobStatus.SUCCEEDED, 1)}


async def test_what_the_leader_did_not_tell_any_more_is_told_by_the_next(
    start: StartMember, start_worker: StartWorker, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of jobs that are over, of whose history a controller keeps little."""
    first, second = await start("c1"), await start("c2")

    async def hang(*_args: object) -> None:
        await asyncio.Event().wait()

    await start_worker()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        job_ids = [await cluster.launch(_request("early"))]
        await cluster.wait(job_ids, timeout=60)
        monkeypatch.setattr(first.controller.events, "_append", hang)
        job_ids += await cluster.launch_many([_request() for _ in range(5)])
        await cluster.wait(job_ids, timeout=60)
        await first.vanish()
        await wait_until_async(lambda: second.leads)
        expected: dict[tuple[JobId, int | None], list[int]] = {(job_id, None): [1, 2] for job_id in job_ids}
        expected |= {(job_id, 0): [1, 2, 3, 4] for job_id in job_ids}
        await wait_until_async(lambda: _are_told(cluster.bus, expected))


async def _are_told(bus: Bus, expected: dict[tuple[JobId, int | None], list[int]]) -> bool:
    told: dict[tuple[JobId, int | None], list[int]] = {}
    stream, subject = buckets.events_stream(NS), subjects.events_of_all(NS)
    async for entry in Feed(bus, stream, subject=subject, watch=subjects.watch_events(NS)).stored():
        event = Event.from_json(entry.data)
        told.setdefault((event.job_id, event.task), []).append(event.transition.number)
    return told == expected


async def test_a_leader_that_leaves_hands_over_at_once(start: StartMember) -> None:
    """Not when its lease is over: that would be in an hour."""
    timing = Timing(heartbeat_s=0.2, leader_lease_s=3_600)
    first, second = await start("c1", timing=timing), await start("c2", timing=timing)
    await first.leave()
    await wait_until_async(lambda: second.leads)
    assert await _holder(second.bus) == "c2"


async def test_one_that_is_started_in_the_leaders_place_leads_at_once(start: StartMember) -> None:
    timing = Timing(heartbeat_s=0.2, leader_lease_s=3_600)
    first = await start("c1", timing=timing)
    await first.vanish()
    another = await start("c2", timing=timing)
    assert not another.leads
    again = await start("c1", timing=timing)
    assert (again.leads, another.leads) == (True, False)


async def test_two_under_one_id_do_not_depose_each_other_in_turn(start: StartMember) -> None:
    first = await start("c1")
    second = await start("c1")
    await asyncio.wait([first.task], timeout=60)
    assert _was_deposed(first)
    anew = await start("c1", in_place=False)
    assert (second.leads, anew.leads) == (True, False)


def _was_deposed(member: Member) -> bool:
    error = member.task.exception()
    return isinstance(error, BaseExceptionGroup) and error.subgroup(DeposedError) is not None


async def test_a_restart_of_the_server_changes_nobody(start: StartMember, own_server: EmbeddedServer) -> None:
    first, second = await start("c1"), await start("c2")
    for _ in range(2):
        kill_server(own_server)
        # Longer than the lease, and than the silence after which a follower would try: the time itself is what is tried.
        await asyncio.sleep(1.5 * LEASE_S)
        own_server.start()
        for member in (first, second):
            await member.bus.wait_connected(60)
        async with asyncio.timeout(60):
            await first.controller.seat.wait_sure()
    assert (first.leads, second.leads, first.task.done(), await _holder(first.bus)) == (True, False, False, "c1")


# ---- a leader that was stopped --------------------------------------------------------------------------


def _stop(member: Member, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """It does not renew its seat, and learns of no other: what a stopped process does not do. Returns what continues it."""
    seat = member.controller.seat
    write, on_row, continued = seat._write, seat._on_row, asyncio.Event()  # noqa: SLF001 - a leader that stops is one whose writes and news stay out

    async def write_later() -> None:
        await continued.wait()
        await write()

    monkeypatch.setattr(seat, "_write", write_later)
    monkeypatch.setattr(seat, "_on_row", lambda row: on_row(row) if continued.is_set() else None)
    return continued.set


async def test_a_stopped_leader_can_judge_nothing(
    start: StartMember,
    start_worker: StartWorker,
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = await start("c1"), await start("c2")
    worker = await start_worker(plan=STAY_RUNNING)
    bus = await connect_bus(own_server)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        job_ids = await cluster.launch_many([_request() for _ in range(3)])
        await wait_until_async(lambda: _run(tasks_table(bus, NS), 3))
        _stop(first, monkeypatch)
        await wait_until_async(lambda: second.leads)
        before = await tasks_table(bus, NS).rows("*.*")

        # It waits: for all it knows another leads.
        writing = asyncio.create_task(first.controller.writer.write(before[0].value, before[0].revision))
        judging = asyncio.create_task(first.controller.writer.write_verdicts(_lost(before)))
        done, _ = await asyncio.wait({writing, judging}, timeout=0.3)
        assert not done
        for task in (writing, judging):
            task.cancel()

        # And if it had been stopped right after it made sure, with the verdict on its lips: it is void as a whole.
        async def sure() -> None:
            pass

        monkeypatch.setattr(first.controller.seat, "wait_sure", sure)
        with pytest.raises(DeposedError):
            await first.controller.writer.verdicts.write(NS, [_update(*each) for each in _lost(before)])
        await first.controller.writer.write_verdicts(_lost(before))
        assert await tasks_table(bus, NS).rows("*.*") == before

        for key in worker.now_held():
            assert await worker.end(key)
        infos = await cluster.wait(job_ids, timeout=60)
        assert {(info.status, info.tasks[0].attempt) for info in infos} == {(JobStatus.SUCCEEDED, 1)}


async def test_a_stopped_leader_that_continues_is_over(start: StartMember, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = await start("c1"), await start("c2")
    go_on = _stop(first, monkeypatch)
    await wait_until_async(lambda: second.leads)
    go_on()
    await asyncio.wait([first.task], timeout=60)
    assert _was_deposed(first)
    assert not second.task.done()
    assert await _holder(second.bus) == "c2", "the deposed one did not give back what is not its own"


async def test_requests_reach_the_leader_also_while_a_stopped_one_still_listens(
    start: StartMember, own_server: EmbeddedServer, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await start("c1"), await start("c2")
    _stop(first, monkeypatch)
    await wait_until_async(lambda: second.leads)
    await start_worker()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        for number in range(20):
            job_id = await cluster.launch(_request(f"job{number}"))
            assert (await cluster.wait(job_id, timeout=60)).status is JobStatus.SUCCEEDED
    assert len(first.controller.intake.outcomes) == 0


# ---- verdicts -------------------------------------------------------------------------------------------


def _lost(rows: list[Any]) -> list[Any]:
    found = []
    for row in rows:
        lost = lifecycle.lose_worker(row.value, worker_id=row.value.worker_id, now=1.0, reason="not heard")
        assert lost is not None
        found.append((lost, row.revision))
    return found


def _update(record: Any, revision: int) -> Any:
    return Update(buckets.task_key(record.job_id, record.task), record, revision)


async def test_a_verdict_that_came_too_late_does_not_void_the_others(
    start: StartMember, start_worker: StartWorker, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    leader = await start("c1")
    await start_worker(plan=STAY_RUNNING)
    tasks = tasks_table(await connect_bus(own_server), NS)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        await cluster.launch_many([_request(max_retries_preemption=0) for _ in range(4)])
        await wait_until_async(lambda: _run(tasks, 4))
        rows = await tasks.rows("*.*")
        decided = _lost(rows)
        await tasks.update(rows[1].key, rows[1].value, rows[1].revision)
        await leader.controller.writer.write_verdicts(decided)
        states = {row.key: row.value.state for row in await tasks.rows("*.*")}
        assert [states[row.key] for row in rows] == [
            JobStatus.WORKER_FAILED,
            JobStatus.RUNNING,
            JobStatus.WORKER_FAILED,
            JobStatus.WORKER_FAILED,
        ]


async def test_the_leaders_keys_are_no_jobs(
    start: StartMember, own_server: EmbeddedServer, connect_bus: ConnectBus, caplog: pytest.LogCaptureFixture
) -> None:
    member = await start("c1")
    bus = await connect_bus(own_server)
    fence = await fences_table(bus, NS).get(buckets.LEADER_KEY)
    assert fence is not None
    assert fence.value.controller_id == "c1"
    assert await jobs_table(bus, NS).rows() == []
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        with pytest.raises(Exception, match="invalid job id 'leader'"):
            await cluster.launch(_request(job_id=JobId("leader")))
        assert await cluster.list_jobs() == []
    assert member.leads
    assert "cannot be read" not in caplog.text
