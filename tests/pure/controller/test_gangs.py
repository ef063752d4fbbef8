"""Gangs: what follows from their records, in histories in which everybody acts late, on old news, or not at all."""

import random
from dataclasses import dataclass, field

import pytest
from pydantic import ValidationError

from fluster_bus.messages import (
    Capacity,
    Entrypoint,
    JobId,
    JobRecord,
    JobRequest,
    JobStatus,
    Namespace,
    TaskRecord,
    WorkerId,
)
from fluster_bus.storage.tables import Row
from fluster_services import gangs, job_lifecycle, lifecycle
from fluster_services.controller.state.job_index import JobEntry, JobIndex, JobKey, record_key
from fluster_services.controller.state.reconcile import next_records

NS = Namespace("default")
KEY = JobKey(NS, JobId("g"))
Record = JobRecord | TaskRecord
S, F, K, W, P, B, R = (
    JobStatus.SUCCEEDED,
    JobStatus.FAILED,
    JobStatus.KILLED,
    JobStatus.WORKER_FAILED,
    JobStatus.PENDING,
    JobStatus.BUILDING,
    JobStatus.RUNNING,
)


def _gang(replicas: int, *, failures: int = 0, preemptions: int = 100) -> JobRecord:
    request = JobRequest(
        name="g",
        entrypoint=Entrypoint(command=("true",)),
        replicas=replicas,
        gang=True,
        max_retries_failure=failures,
        max_retries_preemption=preemptions,
    )
    return job_lifecycle.new_job(NS, KEY.job_id, request, order=1, now=0)


# ---- histories ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Hold:
    """What a worker has in its memory about a claim."""

    task: int
    attempt: int
    epoch: int
    worker_id: WorkerId
    is_prepared: bool = False
    is_started: bool = False


@dataclass
class _Cluster:
    """A bucket, two controllers that read it with delay, and workers."""

    dice: random.Random
    replicas: int
    failures: int = 0
    preemptions: int = 2
    now: float = 0.0
    rows: dict[str, Row[Record]] = field(default_factory=dict)
    history: list[Row[Record]] = field(default_factory=list)
    job_index: list[JobIndex] = field(default_factory=lambda: [JobIndex(), JobIndex()])
    read: list[int] = field(default_factory=lambda: [0, 0])
    holds: list[_Hold] = field(default_factory=list)
    went: dict[int, bool] = field(default_factory=dict)  # {epoch: whether it was go}
    lost: set[tuple[int, int]] = field(default_factory=set)  # {(task, epoch)}
    began: dict[int, set[int]] = field(default_factory=dict)  # {epoch: tasks whose process was started}

    def __post_init__(self) -> None:
        job = _gang(self.replicas, failures=self.failures, preemptions=self.preemptions)
        self.write(job, 0)
        for task in job_lifecycle.new_tasks(job):
            self.write(task, 0)

    @property
    def job(self) -> JobRecord:
        record = self.rows[KEY.job_id].value
        assert isinstance(record, JobRecord)
        return record

    def task(self, number: int) -> Row[TaskRecord]:
        row = self.rows[f"{KEY.job_id}.{number}"]
        assert isinstance(row.value, TaskRecord)
        return Row(row.key, row.value, row.revision)

    @property
    def tasks(self) -> list[TaskRecord]:
        return [self.task(number).value for number in range(self.replicas)]

    def write(self, record: Record | None, expected: int) -> bool:
        if record is None:
            return False
        key = record_key(record)
        before = self.rows.get(key)
        if (before.revision if before is not None else 0) != expected:
            return False
        self._check(before.value if before is not None else None, record)
        self.rows[key] = Row(key, record, len(self.history) + 1)
        self.history.append(self.rows[key])
        return True

    def _check(self, before: Record | None, after: Record) -> None:
        if isinstance(after, JobRecord):
            if isinstance(before, JobRecord) and after.epoch != before.epoch:
                assert after.epoch > before.epoch
                assert after.epoch not in self.went, "an epoch is decided once"
                self.went[after.epoch] = after.is_go
                if after.is_go:
                    # Whose worker was lost a moment ago may be counted on by a controller that does not know it yet.
                    there = [each for each in self.tasks if (each.task, after.epoch) not in self.lost]
                    assert all(each.state is B and each.is_ready and each.epoch == after.epoch for each in there)
            return
        if not isinstance(before, TaskRecord):
            return
        assert after.attempt >= before.attempt
        assert after.epoch >= before.epoch
        charged = after.failures + after.preemptions - before.failures - before.preemptions
        assert charged <= int(after.state in (F, W) and before.restart_requested is None)
        if after.state is P and before.state is B:
            assert after.attempt == before.attempt
            assert not self.went.get(before.epoch, False), "what was said go for is not released"

    # ---- who acts ---------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += 1
        act = self.dice.choice(
            (
                self.catch_up,
                self.decide,
                self.decide,
                self.offer,
                self.offer,
                self.work,
                self.work,
                self.work,
                self.lose,
            )
        )
        act()

    def catch_up(self) -> None:
        which = self.dice.randrange(2)
        until = self.dice.randint(self.read[which], len(self.history))
        for row in self.history[self.read[which] : until]:
            self.job_index[which].apply(row)
        self.read[which] = until

    def catch_up_all(self) -> None:
        for which, job_index in enumerate(self.job_index):
            for row in self.history[self.read[which] :]:
                job_index.apply(row)
            self.read[which] = len(self.history)

    def decide(self, *, is_gathering: bool | None = None) -> bool:
        entry = self.job_index[self.dice.randrange(2)].get(KEY)
        if entry is None:
            return False
        gathering = self.dice.random() < 0.7 if is_gathering is None else is_gathering
        wanted = next_records(entry, now=self.now, parent=None, is_gathering=gathering)
        return sum([self.write(each, entry.revision_of(each)) for each in wanted]) > 0

    def offer(self, number: int | None = None) -> None:
        """By a controller with old news, perhaps after everything has changed."""
        entry = self.job_index[self.dice.randrange(2)].get(KEY)
        if entry is None or entry.job is None or not gangs.is_waiting(entry.job.value, entry.task_records()):
            return
        epoch = max(entry.job.value.epoch, *(each.epoch for each in entry.task_records())) + 1
        skipped = 0.3 if self.dice.random() < 0.3 else 0.0
        for task in range(self.replicas) if number is None else [number]:
            if self.dice.random() < skipped:
                continue
            row = self.task(task)
            worker = WorkerId(f"w{self.dice.randrange(3)}")
            attempt = entry.tasks[task].value.attempt
            claimed = lifecycle.claim(row.value, attempt=attempt, worker_id=worker, now=self.now, epoch=epoch)
            if self.write(claimed, row.revision):
                self.holds.append(_Hold(task, attempt, epoch, worker))

    def work(self) -> None:
        """A worker does the next thing about one of its claims."""
        if not self.holds:
            return
        hold = self.holds.pop(self.dice.randrange(len(self.holds)))
        row = self.task(hold.task)
        record = row.value
        is_mine = record.attempt == hold.attempt and record.worker_id == hold.worker_id and lifecycle.is_held(record)
        if not is_mine:
            return  # its processes are stopped
        decision = gangs.decision(self.job, hold.epoch)
        wish = record.kill_requested or record.restart_requested
        if wish is not None:
            self._end(row, hold, K)
        elif hold.is_started:
            if record.state is B:
                self.write(
                    lifecycle.run(record, attempt=hold.attempt, worker_id=hold.worker_id, now=self.now), row.revision
                )
                self.holds.append(hold)
            else:
                self._end(row, hold, self.dice.choice((S, S, S, F)))
        elif decision is gangs.EpochDecision.OFF:
            self._release(row, hold)
        elif decision is gangs.EpochDecision.GO:
            assert record.is_ready
            self.began.setdefault(hold.epoch, set()).add(hold.task)
            self.holds.append(_Hold(hold.task, hold.attempt, hold.epoch, hold.worker_id, True, True))
        elif not hold.is_prepared:
            if self.dice.random() < 0.05:
                self._end(row, hold, F)
                return
            address = f"{hold.worker_id}:{hold.epoch}" if hold.task == 0 else None
            ready = lifecycle.make_ready(record, attempt=hold.attempt, worker_id=hold.worker_id, gang_address=address)
            assert self.write(ready, row.revision)
            self.holds.append(_Hold(hold.task, hold.attempt, hold.epoch, hold.worker_id, True))
        else:
            if self.dice.random() < 0.03:  # it expires
                self.write(gangs.call_off(self.job, hold.epoch), self.rows[KEY.job_id].revision)
            self.holds.append(hold)

    def _end(self, row: Row[TaskRecord], hold: _Hold, state: JobStatus) -> None:
        ended = lifecycle.end(
            row.value, attempt=hold.attempt, worker_id=hold.worker_id, now=self.now, state=state, reason="so it ended"
        )
        assert self.write(ended, row.revision)

    def _release(self, row: Row[TaskRecord], hold: _Hold) -> None:
        released = lifecycle.release(
            row.value, attempt=hold.attempt, worker_id=hold.worker_id, epoch=hold.epoch, now=self.now, reason="off"
        )
        assert self.write(released, row.revision)

    def lose(self) -> None:
        if self.dice.random() < 0.9:
            return
        number = self.dice.randrange(self.replicas)
        row = self.task(number)
        if lifecycle.is_held(row.value) and row.value.worker_id is not None:
            lost = lifecycle.lose_worker(row.value, worker_id=row.value.worker_id, now=self.now, reason="silent")
            self.write(lost, row.revision)
            self.lost.add((number, row.value.epoch))
            self.holds = [hold for hold in self.holds if hold.task != number]

    def check(self) -> None:
        for epoch in self.began:
            assert self.went[epoch], "nothing starts without a go"
        going = {each.epoch for each in self.tasks if each.state is R and each.restart_requested is None}
        assert len(going) <= 1, "tasks of two rounds do not run together"
        assert sum(each.attempt - 1 for each in self.tasks) <= self.replicas * (
            self.replicas * (self.failures + self.preemptions + 2)
        )


@pytest.mark.parametrize("seed", range(20))
def test_random_histories(seed: int) -> None:
    for number in range(30):
        dice = random.Random(f"{seed}.{number}")
        cluster = _Cluster(dice, replicas=dice.randint(1, 4), failures=dice.randint(0, 2))
        for _ in range(dice.randint(10, 300)):
            cluster.step()
            cluster.check()
        # From here on everybody does what is to be done, and it comes to an end.
        for _ in range(600):
            if cluster.job.state.finished():
                break
            cluster.catch_up_all()
            if cluster.decide(is_gathering=False):
                continue
            for task in range(cluster.replicas):
                cluster.offer(task)
            cluster.work()
            cluster.check()
        assert cluster.job.state.finished(), cluster.tasks
        states = [each.state for each in cluster.tasks]
        assert not any(lifecycle.is_held(each) for each in cluster.tasks)
        assert (cluster.job.state is S) == all(state is S for state in states)
        if cluster.job.state is S:
            assert {each.epoch for each in cluster.tasks} == {max(epoch for epoch, go in cluster.went.items() if go)}


@pytest.mark.parametrize("seed", range(10))
def test_a_kill_at_any_moment_leaves_nothing(seed: int) -> None:
    for number in range(30):
        dice = random.Random(f"kill.{seed}.{number}")
        cluster = _Cluster(dice, replicas=dice.randint(1, 4), failures=2)
        for _ in range(dice.randint(0, 60)):
            cluster.step()
        wanted = job_lifecycle.request_job_kill(cluster.job, reason="enough")
        cluster.write(wanted, cluster.rows[KEY.job_id].revision)
        for _ in range(300):
            cluster.catch_up_all()
            cluster.decide()
            cluster.work()
            cluster.check()
        assert cluster.job.state.finished()
        assert not cluster.holds
        if wanted is not None and any(each.state is not S for each in cluster.tasks):
            assert cluster.job.state is not S


# ---- rules, one by one --------------------------------------------------------------------------------------


def _entry(job: JobRecord, tasks: list[TaskRecord]) -> JobEntry:
    rows = {each.task: Row(record_key(each), each, number) for number, each in enumerate(tasks, 2)}
    return JobEntry(Row(record_key(job), job, 1), rows)


def _next(job: JobRecord, tasks: list[TaskRecord], *, is_gathering: bool = False) -> list[Record]:
    return next_records(_entry(job, tasks), now=9, parent=None, is_gathering=is_gathering)


def _held(task: TaskRecord, *, epoch: int = 1, is_ready: bool = True) -> TaskRecord:
    worker = WorkerId(f"w{task.task}")
    held = lifecycle.claim(task, attempt=task.attempt, worker_id=worker, now=1, epoch=epoch)
    assert held is not None
    if not is_ready:
        return held
    address = "w0:1234" if task.task == 0 else None
    ready = lifecycle.make_ready(held, attempt=task.attempt, worker_id=worker, gang_address=address)
    assert ready is not None
    return ready


def _running(replicas: int, *, failures: int = 0) -> tuple[JobRecord, list[TaskRecord]]:
    job = _gang(replicas, failures=failures)
    tasks = [_held(task) for task in job_lifecycle.new_tasks(job)]
    (go,) = _next(job, tasks)
    assert isinstance(go, JobRecord)
    ran = [lifecycle.run(each, attempt=1, worker_id=WorkerId(f"w{each.task}"), now=2) for each in tasks]
    return go, [each for each in ran if each is not None]


def _ended(task: TaskRecord, state: JobStatus) -> TaskRecord:
    assert task.worker_id is not None
    ended = lifecycle.end(task, attempt=task.attempt, worker_id=task.worker_id, now=3, state=state, reason="so")
    assert ended is not None
    return ended


def test_when_all_are_ready_the_job_says_go_and_where_the_first_is() -> None:
    job = _gang(3)
    tasks = [_held(task) for task in job_lifecycle.new_tasks(job)]
    (go,) = _next(job, tasks)
    assert isinstance(go, JobRecord)
    assert (go.epoch, go.is_go, go.gang_address) == (1, True, "w0:1234")
    assert gangs.decision(go, 1) is gangs.EpochDecision.GO
    assert gangs.call_off(go, 1) is None, "who is late finds it decided"


def test_while_one_prepares_the_others_wait_without_a_decision() -> None:
    job = _gang(2)
    first, second = job_lifecycle.new_tasks(job)
    assert _next(job, [_held(first), _held(second, is_ready=False)]) == []


def test_a_hold_alone_is_called_off_unless_offers_are_out() -> None:
    job = _gang(2)
    first, second = job_lifecycle.new_tasks(job)
    assert _next(job, [_held(first), second], is_gathering=True) == []
    (off,) = _next(job, [_held(first), second])
    assert isinstance(off, JobRecord)
    assert (off.epoch, off.is_go) == (1, False)
    assert gangs.decision(off, 1) is gangs.EpochDecision.OFF


def test_holds_of_two_epochs_are_called_off_together() -> None:
    """A controller gathered for the second of them before it had read all holds of the first."""
    job = _gang(2)
    first, second = job_lifecycle.new_tasks(job)
    (off,) = _next(job, [_held(first, epoch=2), _held(second, epoch=3)])
    assert isinstance(off, JobRecord)
    assert (off.epoch, off.is_go) == (3, False)


def test_a_gathering_ends_when_a_task_is_not_there_to_be_offered() -> None:
    job = _gang(3)
    first, second, third = job_lifecycle.new_tasks(job)
    (off,) = _next(job, [_held(first), second, _ended(_held(third), W)], is_gathering=True)
    assert isinstance(off, JobRecord)
    assert (off.epoch, off.is_go) == (1, False)


def test_a_release_costs_nothing_and_an_epoch_is_not_used_twice() -> None:
    (task,) = job_lifecycle.new_tasks(_gang(1))
    held = _held(task)
    released = lifecycle.release(held, attempt=1, worker_id=WorkerId("w0"), epoch=1, now=2, reason="off")
    assert released is not None
    assert (released.state, released.attempt, released.failures, released.preemptions) == (P, 1, 0, 0)
    assert (released.worker_id, released.is_ready, released.gang_address, released.started_at) == (
        None,
        False,
        None,
        None,
    )
    assert lifecycle.claim(released, attempt=1, worker_id=WorkerId("w0"), now=3, epoch=1) is None
    assert lifecycle.claim(released, attempt=1, worker_id=WorkerId("w0"), now=3, epoch=2) is not None
    assert lifecycle.claim(released, attempt=1, worker_id=WorkerId("w0"), now=3) is None, "not without an epoch"


def test_a_task_that_fails_restarts_the_gang_and_is_charged_alone() -> None:
    job, (first, second, third) = _running(3, failures=1)
    failed, done = _ended(second, F), _ended(third, S)
    (asked,) = _next(job, [first, failed, done])
    assert isinstance(asked, TaskRecord)
    assert asked.restart_requested == "its gang starts again: task 1 ended as FAILED"
    assert lifecycle.is_to_be_stopped(asked)
    assert _next(job, [asked, failed, done]) == [], "they wait for its end"
    again = _next(job, [_ended(asked, F), failed, done])
    told = [(each.task, each.state, each.attempt, each.failures) for each in again if isinstance(each, TaskRecord)]
    assert told == [(0, P, 2, 0), (1, P, 2, 1), (2, P, 2, 0)]
    assert gangs.is_waiting(job, [each for each in again if isinstance(each, TaskRecord)])


@pytest.mark.parametrize("ends", [(5.0, 4.0), (None, 4.0), (4.0, 4.0)])
def test_a_restart_names_the_task_that_ended_first(ends: tuple[float | None, float]) -> None:
    job, (first, second, third) = _running(3, failures=2)
    failed = [
        _ended(each, F).model_copy(update={"finished_at": at}) for each, at in zip((first, second), ends, strict=True)
    ]
    (asked,) = _next(job, [*failed, third])
    assert isinstance(asked, TaskRecord)
    assert asked.restart_requested == f"its gang starts again: task {int(ends[0] == 5.0)} ended as FAILED"


def test_a_restart_is_not_named_after_those_that_succeeded_or_that_it_stopped_itself() -> None:
    job, (first, second, third) = _running(3, failures=1)
    stopped = _ended(first.model_copy(update={"restart_requested": "its gang starts again: …"}), F)
    for innocent in (stopped, _ended(first, S)):
        (asked,) = _next(job, [innocent, _ended(second, F), third])
        assert isinstance(asked, TaskRecord)
        assert asked.restart_requested == "its gang starts again: task 1 ended as FAILED"


def test_a_gang_waits_when_all_of_it_is_there_and_unwanted_by_none() -> None:
    job = _gang(2)
    first, second = job_lifecycle.new_tasks(job)
    assert gangs.is_waiting(job, [first, second])
    assert not gangs.is_waiting(job, [first])
    assert not gangs.is_waiting(job, [first, _held(second)])
    assert not gangs.is_waiting(job, [first, second.model_copy(update={"kill_requested": "why"})])
    assert not gangs.is_waiting(job.model_copy(update={"kill_requested": "why"}), [first, second])
    assert not gangs.is_waiting(job.model_copy(update={"state": F}), [first, second])


def test_a_gang_has_started_from_the_go_until_all_of_it_waits_again() -> None:
    job = _gang(2)
    first, second = job_lifecycle.new_tasks(job)
    assert not gangs.has_started(job, [first, second])
    assert not gangs.has_started(job, [_held(first), _held(second)])
    off = gangs.call_off(job, 1)
    assert off is not None
    assert not gangs.has_started(off, [_held(first), _held(second)]), "they are on their way back"
    go, running = _running(2)
    assert gangs.has_started(go, running)
    assert gangs.has_started(go, [_ended(running[0], S), running[1]])
    again = [lifecycle.restart(_ended(each, W), now=4) for each in running]
    waiting = [each for each in again if each is not None]
    assert gangs.has_started(go, [running[0], waiting[1]])
    assert not gangs.has_started(go, waiting)
    assert not gangs.has_started(go, [_held(waiting[0], epoch=2), waiting[1]]), "it is gathered anew"


def test_the_reason_for_the_end_of_all_is_the_first_task_that_cannot_go_on() -> None:
    _, (first, second, third) = _running(3)
    for tasks in ([first, _ended(second, F), _ended(third, F)], [_ended(third, F), _ended(second, F), first]):
        assert gangs.why_stop(tasks) == "task 1 of its gang ended as FAILED"


def test_a_restart_that_was_interrupted_is_carried_on() -> None:
    job, (first, second) = _running(2)
    lost = _ended(second, W)
    waiting = lifecycle.restart(lost, now=4)
    assert waiting is not None
    (again,) = _next(job, [_ended(first, S), waiting])
    assert isinstance(again, TaskRecord)
    assert (again.task, again.state, again.attempt) == (0, P, 2)


def test_without_budget_the_others_are_stopped_for_good() -> None:
    job, (first, second) = _running(2)
    (killed,) = _next(job, [first, _ended(second, F)])
    assert isinstance(killed, TaskRecord)
    assert killed.kill_requested == "task 1 of its gang ended as FAILED"
    (end,) = _next(job, [_ended(killed, K), _ended(second, F)])
    assert (end.state, end.task if isinstance(end, TaskRecord) else None) == (F, None)


def test_success_is_that_of_all() -> None:
    job, (first, second) = _running(2)
    assert _next(job, [_ended(first, S), second]) == []
    (end,) = _next(job, [_ended(first, S), _ended(second, S)])
    assert end.state is S


def test_tasks_are_assigned_first_fit_and_several_may_share_a_worker() -> None:
    need = Capacity(cpu=2, memory=1)
    workers = [("a", Capacity(cpu=5, memory=9)), ("b", Capacity(cpu=1, memory=9)), ("c", Capacity(cpu=4, memory=1))]
    assert gangs.assign(need, 3, workers) == ["a", "a", "c"]
    assert gangs.assign(need, 4, workers) == ["a", "a", "c"]
    assert gangs.assign(need, 1, workers) == ["a"]


def test_a_gang_puts_up_with_no_failed_task() -> None:
    with pytest.raises(ValidationError, match="max_task_failures=1 makes no sense with gang=True"):
        JobRequest(name="g", entrypoint=Entrypoint(command=("true",)), gang=True, replicas=2, max_task_failures=1)


def test_holds_of_an_epoch_that_is_over_do_not_start_by_the_go_of_a_later_one() -> None:
    go = _gang(2).model_copy(update={"epoch": 2, "is_go": True})
    assert [gangs.decision(go, epoch) for epoch in (1, 2, 3)] == [gangs.EpochDecision.OFF, gangs.EpochDecision.GO, None]
    off = go.model_copy(update={"is_go": False})
    assert [gangs.decision(off, epoch) for epoch in (1, 2, 3)] == [
        gangs.EpochDecision.OFF,
        gangs.EpochDecision.OFF,
        None,
    ]


def test_what_runs_of_an_epoch_before_the_one_that_was_called_off_is_stopped_and_a_hold_is_not() -> None:
    """A gang's restart that a hold of the next epoch came into, which was then called off."""
    go, (first, second, third) = _running(3, failures=1)
    off = go.model_copy(update={"epoch": 2, "is_go": False, "gang_address": None})
    ended = _ended(third, W)
    held = second.model_copy(update={"state": B, "epoch": 2, "started_at": None})
    stopped = gangs.next_records(off, [first, held, ended], now=9, is_gathering=False)
    assert [(each.task, bool(each.restart_requested)) for each in stopped if isinstance(each, TaskRecord)] == [
        (0, True)
    ]
    again = gangs.next_records(go, [first, second, ended], now=9, is_gathering=False)
    assert [each.task for each in again if isinstance(each, TaskRecord)] == [0, 1], (
        "all that were told to go are stopped"
    )
