"""What follows from the records of a job, whichever controller reads them, whenever, and however much of them."""

import random

import pytest

from fluster_bus.messages import Endpoint, EndpointId, JobId, JobRecord, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_bus.messages.parts.arrays import TaskArray
from fluster_bus.storage.tables import Row
from fluster_services import job_lifecycle, lifecycle
from fluster_services.controller.state.job_index import JobEntry, JobIndex, JobKey, record_key
from fluster_services.controller.state.reconcile import is_stale, missing_tasks, next_records, why_attempt_is_over
from tests.pure.controller.test_job_index import NS, job_record, row
from tests.pure.recorded import recorded_job

KEY = JobKey(NS, JobId("a"))
Record = JobRecord | TaskRecord
ENDS = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.KILLED, JobStatus.WORKER_FAILED)


class _Store:
    """The bucket: every change a compare-and-set, every revision remembered."""

    def __init__(self) -> None:
        self.rows: dict[str, Row[Record]] = {}
        self.history: list[Row[Record]] = []

    def write(self, record: Record, expected: int) -> bool:
        key = record_key(record)
        present = self.rows[key].revision if key in self.rows else 0
        if present != expected:
            return False
        self.rows[key] = row(record, len(self.history) + 1)
        self.history.append(self.rows[key])
        return True


def _revision(job_index: JobIndex, record: Record) -> int:
    entry = job_index.get(KEY)
    assert entry is not None
    known = entry.tasks.get(record.task) if isinstance(record, TaskRecord) else entry.job
    return known.revision if known is not None else 0


def _settle(store: _Store, job_index: JobIndex, *, parent: JobRecord | None = None) -> int:
    """Write what follows until nothing does; how many writes that took."""
    writes = 0
    while True:
        entry = job_index.get(KEY)
        wanted = next_records(entry, now=9, parent=parent) if entry is not None else []
        if not wanted:
            return writes
        for record in wanted:
            assert store.write(record, _revision(job_index, record)), "decided from the newest records"
            job_index.apply(store.rows[record_key(record)])
            writes += 1
        assert writes < 100, "it does not end"


def _lived(dice: random.Random) -> _Store:
    """A job in the middle of its life: workers, kill wishes and controllers have written, and no controller has settled it."""
    store = _Store()
    job = job_record("a", replicas=dice.randint(1, 3))
    store.write(job, 0)
    for task in job_lifecycle.new_tasks(job):
        store.write(task, 0)
    for step in range(dice.randint(0, 25)):
        key = dice.choice(list(store.rows))
        known = store.rows[key]
        after = _random_change(known.value, float(step), dice)
        if after is not None:
            store.write(after, known.revision)
    return store


def _random_change(record: Record, now: float, dice: random.Random) -> Record | None:
    if isinstance(record, JobRecord):
        return job_lifecycle.request_job_kill(record, reason="enough") if dice.random() < 0.1 else None
    worker = WorkerId(dice.choice(("w1", "w2")))
    if record.state is JobStatus.PENDING:
        return lifecycle.claim(record, attempt=record.attempt, worker_id=worker, now=now)
    if lifecycle.is_held(record) and record.worker_id is not None:
        return lifecycle.end(
            record,
            attempt=record.attempt,
            worker_id=record.worker_id,
            now=now,
            state=dice.choice(ENDS),
            reason="ended",
        )
    return lifecycle.retry(record, now=now)


def _read(rows: list[Row[Record]]) -> JobIndex:
    job_index = JobIndex()
    for each in rows:
        job_index.apply(each)
    return job_index


def _states(store: _Store) -> dict[str, JobStatus]:
    return {key: each.value.state for key, each in store.rows.items()}


def _content(store: _Store) -> dict[str, Record]:
    return {key: each.value for key, each in store.rows.items()}


@pytest.mark.parametrize("seed", range(20))
def test_whoever_reads_the_history_in_whatever_order_ends_with_the_same_records(seed: int) -> None:
    for number in range(20):
        ends = []
        for reader in range(4):
            store = _lived(random.Random(f"{seed}.{number}"))
            dice = random.Random(reader)
            rows = store.history if reader == 0 else dice.sample(store.history, len(store.history))
            job_index = _read(rows)
            _settle(store, job_index)
            job_index.sanity_check()
            assert _settle(store, job_index) == 0, "asked again, nothing follows"
            assert _settle(store, _read(store.history)) == 0, "nor for a controller that starts now"
            ends.append(_content(store))
        assert all(end == ends[0] for end in ends)


@pytest.mark.parametrize("seed", range(20))
def test_a_controller_that_has_read_only_part_does_no_harm(seed: int) -> None:
    """Its writes either fit what is there or are refused; once it has read the rest, the end is the same."""
    for number in range(20):
        expected = _lived(random.Random(f"{seed}.{number}"))
        _settle(expected, _read(expected.history))
        store = _lived(random.Random(f"{seed}.{number}"))
        dice = random.Random(number)
        job_index = _read(store.history[: dice.randint(1, len(store.history))])
        entry = job_index.get(KEY)
        assert entry is not None
        for record in next_records(entry, now=9, parent=None):
            store.write(record, _revision(job_index, record))
        late = _read(store.history)
        _settle(store, late)
        # It may have tried a task again that was to be killed: another attempt is in the index, with the same end.
        assert _states(store) == _states(expected)


def _entry(job: JobRecord, *tasks: TaskRecord) -> JobEntry:
    job_index = _read([row(job, 1), *(row(task, number) for number, task in enumerate(tasks, start=2))])
    entry = job_index.get(JobKey(NS, job.job_id))
    assert entry is not None
    return entry


def test_a_job_whose_tasks_are_still_being_written_does_not_end() -> None:
    job = job_record("a", replicas=2)
    killed = job_lifecycle.request_job_kill(job, reason="enough")
    assert killed is not None
    first = job_lifecycle.new_tasks(job)[0]
    assert next_records(_entry(killed), now=9, parent=None) == []
    (wanted,) = next_records(_entry(killed, first), now=9, parent=None)
    assert isinstance(wanted, TaskRecord)
    assert wanted.state is JobStatus.KILLED
    assert next_records(_entry(killed, wanted), now=9, parent=None) == []


def test_a_job_is_released_when_what_it_runs_after_has_ended() -> None:
    first = recorded_job("a")
    entry = _entry(recorded_job("b", after=("a",)))
    assert next_records(entry, now=9, parent=None, after={first.job_id: first}) == []
    done = first.model_copy(update={"state": JobStatus.SUCCEEDED})
    for known in ({done.job_id: done}, None):  # what has no record is over
        (released,) = next_records(entry, now=9, parent=None, after=known)
        assert isinstance(released, JobRecord)
        assert (released.state, released.released) == (JobStatus.PENDING, True)


def test_a_job_ends_when_its_parent_does() -> None:
    parent, child = job_record("p"), job_record("a", parent="p")
    task = job_lifecycle.new_tasks(child)[0]
    assert next_records(_entry(child, task), now=9, parent=parent) == []
    done = parent.model_copy(update={"state": JobStatus.SUCCEEDED})
    (wanted,) = next_records(_entry(child, task), now=9, parent=done)
    assert isinstance(wanted, JobRecord)
    assert wanted.kill_requested == "its parent p ended as SUCCEEDED"
    store = _Store()
    store.write(child, 0)
    store.write(task, 0)
    _settle(store, _read(store.history), parent=done)
    assert {record.state for record in _content(store).values()} == {JobStatus.KILLED}


def _failed(task: TaskRecord) -> TaskRecord:
    claimed = lifecycle.claim(task, attempt=task.attempt, worker_id=WorkerId("w"), now=1, epoch=int(task.gang))
    assert claimed is not None
    failed = lifecycle.lose_worker(claimed, worker_id=WorkerId("w"), now=2, reason="lost")
    assert failed is not None
    return failed


@pytest.mark.parametrize("launched_in", [1, 2, 7])
def test_a_job_ends_with_the_attempt_that_launched_it(launched_in: int) -> None:
    parent, child = job_record("p"), job_record("a", parent="p")
    request = child.request.model_copy(update={"parent_task": 0, "parent_attempt": launched_in})
    child = child.model_copy(update={"request": request})
    first = job_lifecycle.new_tasks(parent)[0]
    second = lifecycle.retry(_failed(first), now=3)
    assert second is not None
    lives = {}
    for name, launcher in {"first": first, "failed": _failed(first), "second": second}.items():
        wanted = next_records(_entry(child, *job_lifecycle.new_tasks(child)), now=9, parent=parent, launcher=launcher)
        lives[name] = not wanted
        assert not wanted or wanted[0].kill_requested == f"attempt {launched_in} of its parent p has ended"
    assert lives == {"first": True, "failed": False, "second": launched_in >= 2}


@pytest.mark.parametrize("gang", [False, True])
def test_the_next_attempt_waits_for_what_the_last_one_launched(gang: bool) -> None:
    job = job_record("a", replicas=2)
    job = job.model_copy(update={"request": job.request.model_copy(update={"gang": gang}), "epoch": int(gang)})
    tasks = [_failed(task) for task in job_lifecycle.new_tasks(job)]
    entry = _entry(job, *tasks)

    def begun(with_children: set[int]) -> list[int]:
        wanted = next_records(entry, now=9, parent=None, with_children=with_children)
        return [each.task for each in wanted if isinstance(each, TaskRecord) and each.attempt == 2]

    assert begun(set()) == [0, 1]
    assert begun({1}) == ([] if gang else [0])
    killed = next_records(_entry(job.model_copy(update={"kill_requested": "enough"}), *tasks), now=9, parent=None)
    assert [each.state for each in killed] == [JobStatus.KILLED] * 2


@pytest.mark.parametrize("gang", [False, True], ids=["tasks", "gang"])
def test_a_task_is_stopped_also_while_what_it_launched_goes_on(gang: bool) -> None:
    """Only its next attempt would wait for the end of that."""
    job = job_record("a", replicas=2)
    job = job.model_copy(update={"request": job.request.model_copy(update={"gang": gang}), "epoch": 1, "is_go": gang})
    lost, other = (_failed(task) for task in job_lifecycle.new_tasks(job))
    held = lifecycle.claim(
        job_lifecycle.new_tasks(job)[1], attempt=1, worker_id=WorkerId("w"), now=1, epoch=1 if gang else 0
    )
    assert held is not None
    if gang:
        (wanted,) = next_records(_entry(job, lost, held), now=9, parent=None, with_children={0, 1})
        assert isinstance(wanted, TaskRecord)
        assert wanted.restart_requested == "its gang starts again: task 0 ended as WORKER_FAILED"
        (called_off,) = next_records(
            _entry(job.model_copy(update={"epoch": 0}), lost, held), now=9, parent=None, with_children={0, 1}
        )
        assert isinstance(called_off, JobRecord)
        assert (called_off.epoch, called_off.is_go) == (1, False)
    asked = job.model_copy(update={"kill_requested": "enough"})
    stopped = next_records(_entry(asked, other, held), now=9, parent=None, with_children={0, 1})
    assert [(each.task, each.kill_requested) for each in stopped if isinstance(each, TaskRecord)] == [(1, "enough")]


def _run(task: TaskRecord, state: JobStatus) -> TaskRecord:
    """The task as it is once that has come of its first attempt."""
    if state is JobStatus.PENDING:
        return task
    if state is JobStatus.UNSCHEDULABLE:
        given_up = lifecycle.give_up(task, now=1, reason="too large")
        assert given_up is not None
        return given_up
    claimed = lifecycle.claim(task, attempt=1, worker_id=WorkerId("w"), now=1)
    assert claimed is not None
    if state is JobStatus.BUILDING:
        return claimed
    ended = lifecycle.end(claimed, attempt=1, worker_id=WorkerId("w"), now=2, state=state, reason="it ended")
    assert ended is not None
    return ended


@pytest.mark.parametrize("seed", range(5))
def test_a_job_is_stopped_when_more_tasks_have_failed_for_good_than_it_puts_up_with(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(200):
        allowed, is_array = dice.randint(0, 2), dice.random() < 0.5
        count = dice.randint(2, 5)
        request = job_record("a", replicas=count).request.model_copy(
            update={
                "max_task_failures": allowed,
                "array": TaskArray(first=0, last=count - 1) if is_array else None,
                "max_retries_failure": dice.choice((0, 1)),
                "max_retries_preemption": 0,
            }
        )
        job = job_lifecycle.new_job(NS, JobId("a"), request, order=1, now=0)
        states = [
            dice.choice((JobStatus.PENDING, JobStatus.BUILDING, JobStatus.UNSCHEDULABLE, *ENDS)) for _ in range(count)
        ]
        tasks = [_run(task, state) for task, state in zip(job_lifecycle.new_tasks(job), states, strict=True)]
        failed = sum(
            state in (JobStatus.WORKER_FAILED, JobStatus.UNSCHEDULABLE)
            or (state is JobStatus.FAILED and request.max_retries_failure == 0)
            for state in states
        )
        wanted = next_records(_entry(job, *tasks), now=9, parent=None)
        told = {each.kill_requested for each in wanted if isinstance(each, TaskRecord)} - {None}
        is_left = any(state in (JobStatus.PENDING, JobStatus.BUILDING) for state in states) or (
            JobStatus.FAILED in states and request.max_retries_failure == 1
        )
        if failed > allowed and not (is_array and allowed == 0) and is_left:
            assert told == {f"{failed} of {count} tasks failed, and max_task_failures is {allowed}"}
        else:
            assert told == set()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_missing_of_a_released_job_are_the_tasks_without_a_record(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(30):
        released = recorded_job("a", replicas=dice.randint(1, 4), after=("b",)).model_copy(update={"released": True})
        tasks = job_lifecycle.new_tasks(released)
        there = dice.sample(tasks, dice.randint(0, len(tasks)))
        missing = [task for task in tasks if task not in there]
        assert list(missing_tasks(_entry(released, *there))) == missing
        ended = released.model_copy(update={"state": JobStatus.KILLED})
        waits = released.model_copy(update={"released": False})
        no_record = _read([row(task, number) for number, task in enumerate(there, start=1)]).get(KEY) or JobEntry()
        of_submitter = _entry(recorded_job("a", replicas=len(tasks)))
        for entry in (_entry(ended, *there), _entry(waits), no_record, of_submitter):
            assert list(missing_tasks(entry)) == []


def test_a_job_that_names_no_attempt_lives_as_long_as_its_parent() -> None:
    parent = job_record("p")
    named = job_record("a", parent="p").request
    in_second = named.model_copy(update={"parent_task": 0, "parent_attempt": 2})
    over = lifecycle.retry(_failed(job_lifecycle.new_tasks(parent)[0]), now=3)
    assert over is not None
    assert why_attempt_is_over(named, over) is None
    assert why_attempt_is_over(in_second, None) is None, "there is no record of what launched it"
    assert why_attempt_is_over(in_second, over) is None
    assert why_attempt_is_over(in_second, _failed(over)) == "attempt 2 of its parent p has ended"


def test_nothing_is_decided_about_a_job_that_is_not_known() -> None:
    assert next_records(JobEntry(), now=9, parent=None) == []


def test_whose_endpoint_is_stale() -> None:
    job = job_record("a")
    task = job_lifecycle.new_tasks(job)[0]
    claimed = lifecycle.claim(task, attempt=1, worker_id=WorkerId("w"), now=1)
    assert claimed is not None
    ended = lifecycle.lose_worker(claimed, worker_id=WorkerId("w"), now=2, reason="lost")
    assert ended is not None
    again = lifecycle.retry(ended, now=3)
    assert again is not None
    reclaimed = lifecycle.claim(again, attempt=2, worker_id=WorkerId("w"), now=4)
    assert reclaimed is not None

    def endpoint(attempt: int, job_id: str | None = "a") -> Endpoint:
        return Endpoint(
            endpoint_id=EndpointId("e"),
            name="calc",
            address="x",
            namespace=Namespace("default"),
            job_id=JobId(job_id) if job_id else None,
            attempt=attempt,
        )

    for record in (claimed, task):
        assert not is_stale(endpoint(1), _entry(job, record))
    assert not is_stale(endpoint(2), _entry(job, claimed)), "the endpoint is newer than the record"
    assert not is_stale(endpoint(2), _entry(job, ended)), "also where the record says only that the last one ended"
    for record in (ended, again, reclaimed):
        assert is_stale(endpoint(1), _entry(job, record))
    assert not is_stale(endpoint(2), _entry(job, reclaimed))
    assert is_stale(endpoint(1), None)
    assert is_stale(endpoint(1), _entry(job))
    assert not is_stale(endpoint(0, None), None)
