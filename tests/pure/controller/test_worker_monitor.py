"""When workers count as lost: not while the controller itself could hear none. With a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from fluster_bus.messages import (
    Capacity,
    Heartbeat,
    JobStatus,
    OfferReply,
    TaskRecord,
    WorkerId,
)
from fluster_bus.messages.parts.resources import GIB
from fluster_bus.storage.tables import Row
from fluster_services import job_lifecycle, lifecycle
from fluster_services.config import Timing
from fluster_services.controller.scheduling import worker_monitor
from fluster_services.controller.scheduling.dispatch import Dispatch
from fluster_services.controller.scheduling.worker_monitor import WorkerMonitor
from fluster_services.controller.state.job_index import JobIndex, record_key
from fluster_services.controller.state.liveness import Liveness
from fluster_services.controller.state.reports import VMTroubles
from fluster_services.controller.state.worker_index import WorkerIndex
from tests.pure.recorded import recorded_job, registered_worker
from tests.waiting import wait_until_async

W = WorkerId("w")
TIMING = Timing(heartbeat_s=0.02, fence_after_s=90, worker_timeout_s=120)


class Judging:
    """A monitor, one worker that it knows since 0 s, and all else of a controller that it looks at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.looks = 0
        self.sure = asyncio.Event()
        self.sure.set()
        self.while_asleep: dict[int, float] = {}  # {after so many looks: seconds that pass during the next sleep}
        monkeypatch.setattr(worker_monitor, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now))
        self.written: list[TaskRecord] = []
        self.while_written: Callable[[], object] = lambda: None
        self.deleted: list[WorkerId] = []
        self.job_index = JobIndex()
        self.worker_index = WorkerIndex(self.job_index, Liveness(TIMING.worker_timeout_s))
        self.worker_index.on_registered(registered_worker(W, Capacity(cpu=1, memory=GIB)), now=0.0)
        driver: Any = SimpleNamespace(
            now=lambda: self.now, call_later=self._none, on_dispatchable=self._none, on_room=self._none
        )
        self.dispatch = Dispatch(self.job_index, self.worker_index, driver, reserve_after_s=1e9)
        bus: Any = SimpleNamespace(connected=True, on_reconnect=self._none, serve=self._async, subscribe=self._async)
        seat: Any = SimpleNamespace(wait_sure=self._wait_sure, wait_led_since=self.sure.wait)
        workers: Any = SimpleNamespace(delete=self._delete)
        gangs: Any = SimpleNamespace(give_up_misfits=self._async)
        writer: Any = SimpleNamespace(write_verdicts=self._write)
        self.monitor = WorkerMonitor(
            bus,
            seat,
            job_index=self.job_index,
            worker_index=self.worker_index,
            workers=workers,
            vm_troubles=VMTroubles(),
            dispatch=self.dispatch,
            gangs=gangs,
            writer=writer,
            timing=TIMING,
        )

    def _none(self, *_args: object, **_more: object) -> None: ...

    async def _async(self, *_args: object, **_more: object) -> None: ...

    async def _delete(self, worker_id: WorkerId) -> None:
        self.deleted.append(worker_id)

    async def _write(self, verdicts: list[tuple[TaskRecord, int]]) -> None:
        self.written += [record for record, _ in verdicts]
        self.while_written()

    def submit(self, cpu: float) -> TaskRecord:
        job = recorded_job(cpu=cpu)
        (task,) = job_lifecycle.new_tasks(job)
        self.job_index.apply(Row(record_key(job), job, 1))
        key = self.job_index.apply(Row(record_key(task), task, 2))
        assert key is not None
        self.dispatch.on_task(key, task, pause_s=0.0)
        return task

    async def _wait_sure(self) -> None:
        await self.sure.wait()
        self.looks += 1
        passing = self.while_asleep.pop(self.looks, 0.0)
        asyncio.get_running_loop().call_soon(self._pass_time, passing)  # it comes to that when the monitor sleeps

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds

    async def look(self, times: int) -> None:
        """Let it look so many times."""
        judging = asyncio.create_task(self.monitor.run())
        until = self.looks + times
        await wait_until_async(lambda: self.looks >= until or judging.done())
        assert not judging.done(), judging
        await asyncio.sleep(0)
        judging.cancel()

    @property
    def is_alive(self) -> bool:
        return self.worker_index.liveness.is_alive(W)


def judging(test: Callable[[Judging], Coroutine[Any, Any, None]]) -> Callable[[pytest.MonkeyPatch], None]:
    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            await test(Judging(monkeypatch))

        asyncio.run(asyncio.wait_for(main(), 20))

    run.__name__ = test.__name__
    return run


@judging
async def test_one_that_begins_to_lead_gives_all_their_whole_time(it: Judging) -> None:
    it.now = 1_000.0
    await it.look(3)
    assert it.is_alive, "another led until now: this one could not hear it"
    it.now += TIMING.worker_timeout_s
    it.worker_index.take_lost(now=it.now)
    assert not it.is_alive


ASLEEP_S = TIMING.heartbeat_s + TIMING.fence_after_s / 2


@judging
async def test_one_that_was_stopped_judges_nobody_for_what_it_did_not_hear(it: Judging) -> None:
    it.while_asleep = {1: 80.0 - 1e-3, 2: ASLEEP_S + 1e-3}
    await it.look(4)
    assert it.is_alive


@judging
async def test_one_that_was_merely_slow_judges(it: Judging) -> None:
    it.while_asleep = {1: ASLEEP_S - 1e-3, 2: ASLEEP_S - 1e-3, 3: ASLEEP_S - 1e-3}
    await it.look(6)
    assert not it.is_alive


@judging
async def test_a_beat_is_not_acknowledged_before_it_is_known_who_leads(it: Judging) -> None:
    it.sure.clear()
    beat = Heartbeat(worker_id=W, free=Capacity(), attempts=())
    heard = asyncio.create_task(it.monitor.on_heartbeat(beat, ""))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not heard.done(), "a leader that was deposed would keep a worker from its fence"
    it.sure.set()
    assert (await heard).registered


@judging
async def test_who_is_lost_is_taken_from_the_table_and_who_lives_is_not(it: Judging) -> None:
    await it.look(1)
    assert it.deleted == []
    it.worker_index.take_lost(now=TIMING.worker_timeout_s)
    await it.look(1)
    assert set(it.deleted) == {W}, "again at each look, until it is gone from there"
    it.worker_index.on_left(W)
    it.deleted.clear()
    await it.look(1)
    assert it.deleted == []


@judging
async def test_what_no_worker_could_ever_run_is_given_up_after_its_time(it: Judging) -> None:
    it.now = 100.0
    it.submit(cpu=2)
    await it.look(1)
    it.now += TIMING.unschedulable_after_s - 1e-3
    await it.look(1)
    assert it.written == []
    it.now += 1e-3
    await it.look(1)
    assert {record.state for record in it.written} == {JobStatus.UNSCHEDULABLE}


@judging
async def test_what_fits_waits(it: Judging) -> None:
    it.submit(cpu=1)
    await it.look(1)
    it.now += 2 * TIMING.unschedulable_after_s
    await it.look(1)
    assert it.written == []


@judging
async def test_a_job_that_names_what_all_workers_lack_is_refused_at_once(it: Judging) -> None:
    it.submit(cpu=1)
    ((position, need),) = it.dispatch.take()
    asking = it.dispatch.offer(position, need)
    next(asking)
    with pytest.raises(StopIteration):
        asking.send(OfferReply(worker_id=W, accepted=False, unfit=True, reason="worker w has no folder"))
    await it.look(1)
    told = {(record.state, record.transitions[-1].reason) for record in it.written}
    assert told == {(JobStatus.FAILED, "no worker can run it: worker w has no folder")}


@judging
async def test_it_is_refused_also_where_others_are_too_small_for_it(it: Judging) -> None:
    it.worker_index.on_registered(registered_worker(WorkerId("small"), Capacity(cpu=0.5)), now=0.0)
    it.submit(cpu=1)
    ((position, need),) = it.dispatch.take()
    asking = it.dispatch.offer(position, need)
    next(asking)
    with pytest.raises(StopIteration):
        asking.send(OfferReply(worker_id=W, accepted=False, unfit=True, reason="worker w has no folder"))
    await it.look(1)
    assert {record.state for record in it.written} == {JobStatus.FAILED}


def hold(it: Judging) -> None:
    """The worker has claimed a task."""
    task = it.submit(cpu=1)
    held = lifecycle.claim(task, attempt=1, worker_id=W, now=0.0)
    assert held is not None
    it.job_index.apply(Row(record_key(held), held, 3))


@judging
async def test_who_is_back_while_its_tasks_are_given_away_stays_in_the_table(it: Judging) -> None:
    hold(it)
    it.while_written = lambda: it.worker_index.on_beat(W, now=it.now, free=Capacity(cpu=1))
    it.worker_index.take_lost(now=TIMING.worker_timeout_s)
    await it.look(2)
    assert {record.state for record in it.written} == {JobStatus.WORKER_FAILED}
    assert it.deleted == []


@judging
async def test_what_one_held_that_left_is_given_away_and_nothing_is_taken_from_the_table(it: Judging) -> None:
    hold(it)
    it.worker_index.on_left(W)
    await it.look(2)
    assert {record.state for record in it.written} == {JobStatus.WORKER_FAILED}
    assert it.deleted == []
