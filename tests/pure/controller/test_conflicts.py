"""Whose a job id is, whatever is submitted under it, in whatever order it is looked at, and how often."""

import random

import pytest
from pydantic import ValidationError

from fluster_bus.messages import (
    Entrypoint,
    JobId,
    JobRecord,
    JobRequest,
    JobStatus,
    Replacement,
    TaskRecord,
    WorkerId,
)
from fluster_services import job_lifecycle, lifecycle
from fluster_services.controller.scheduling.explain import explain
from fluster_services.controller.state.conflicts import (
    Resolution,
    circle,
    mark,
    refusal,
    resolve,
    successor,
    task_successor,
    unmark,
)
from fluster_services.controller.state.job_index import JobIndex, JobKey, record_key
from fluster_services.controller.state.reconcile import next_records
from fluster_services.job_lifecycle import job_info
from tests.pure.controller.test_job_index import NS, job_record, row

S, F, K, W = JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.KILLED, JobStatus.WORKER_FAILED
ID = JobId("a")


def submitted(
    mode: str, order: int, *, replicas: int = 1, now: float = 1_000, submission: str | None = None
) -> JobRecord:
    request = JobRequest(
        name="train",
        job_id=ID,
        entrypoint=Entrypoint(command=("true", str(order))),
        replicas=replicas,
        on_conflict=mode,  # type: ignore[arg-type]
        submission=submission,
    )
    return job_lifecycle.new_job(NS, ID, request, order=order, now=now)


def ended(job: JobRecord, state: JobStatus) -> JobRecord:
    return job.model_copy(update={"state": state})


@pytest.mark.parametrize(
    ("mode", "state", "expected"),
    [
        ("error", JobStatus.PENDING, Resolution.REFUSE),
        ("error", S, Resolution.REFUSE),
        ("keep", JobStatus.PENDING, Resolution.DONE),
        ("keep", S, Resolution.DONE),
        ("keep", F, Resolution.REPLACE),
        ("keep", K, Resolution.REPLACE),
        ("replace", JobStatus.PENDING, Resolution.STOP),
        ("replace", S, Resolution.REPLACE),
        ("replace", F, Resolution.REPLACE),
    ],
)
def test_what_becomes_of_a_submission(mode: str, state: JobStatus, expected: Resolution) -> None:
    known = ended(submitted("error", 1, now=0), state)
    assert resolve(known, submitted(mode, 2), gone=True) is expected
    stopped = Resolution.STOP if expected is Resolution.REPLACE else expected
    assert resolve(known, submitted(mode, 2), gone=False) is stopped, "what it launched has to be gone, too"
    assert resolve(known, submitted(mode, 1), gone=False) is Resolution.RECORDED


@pytest.mark.parametrize("mode", ["error", "keep", "replace"])
@pytest.mark.parametrize("state", [JobStatus.PENDING, S, F])
def test_the_same_submission_sent_again_does_nothing(mode: str, state: JobStatus) -> None:
    known = ended(submitted(mode, 1, now=0, submission="x"), state)
    assert resolve(known, submitted(mode, 2, now=9_999, submission="x"), gone=True) is Resolution.DONE
    other = successor(ended(known, F), [], submitted("replace", 2, submission="y"))
    assert resolve(other, submitted(mode, 3, submission="x"), gone=True) is Resolution.DONE, "it was replaced since"


@pytest.mark.parametrize("again", ["y", None])
@pytest.mark.parametrize("state", [JobStatus.PENDING, S, F])
def test_what_is_submitted_again_is_another_however_alike_and_soon(again: str | None, state: JobStatus) -> None:
    known = ended(submitted("error", 1, submission=again and "x"), state)
    same = known.request.model_copy(update={"submission": again})
    alike = job_lifecycle.new_job(NS, ID, same, order=2, now=1_000)
    assert resolve(known, alike, gone=True) is Resolution.REFUSE


def test_an_id_that_is_taken_is_told_with_what_can_be_done() -> None:
    assert refusal(submitted("error", 1)) == (
        "job 'a' exists already in namespace 'default', and has not ended: leave job_id out, choose another, or say "
        "on_conflict='keep' or on_conflict='replace'"
    )
    assert "and ended as FAILED" in refusal(ended(submitted("error", 1), F))


def test_the_last_that_was_submitted_replaces_it() -> None:
    known = mark(submitted("error", 1), 3)
    assert known is not None
    assert known.kill_requested == "replaced by a newer submission of its id"
    assert mark(known, 3) is None
    assert resolve(known, submitted("replace", 2), gone=False) is Resolution.DONE
    assert resolve(known, submitted("replace", 4), gone=False) is Resolution.STOP
    assert resolve(ended(known, K), submitted("replace", 3), gone=True) is Resolution.REPLACE
    for keeper in (2, 4):
        assert resolve(ended(known, K), submitted("keep", keeper), gone=True) is Resolution.DONE, "that one is kept"
    by_keep = mark(ended(submitted("error", 1), F), 3)
    assert by_keep is not None
    assert by_keep.kill_requested is None
    assert resolve(by_keep, submitted("keep", 3), gone=True) is Resolution.REPLACE


def test_who_asks_for_the_id_is_told_about_the_replacement() -> None:
    known = mark(submitted("error", 1), 2)
    assert known is not None
    assert not known.is_over
    gone = ended(known, K)
    assert not gone.is_over
    assert job_info(gone, []).status is JobStatus.PENDING
    assert explain(gone, [], [], ahead=0, now=0).startswith("it is to take the place of a job that has ended")
    assert unmark(gone).is_over
    assert job_info(unmark(gone), []).status is K


def test_a_wish_to_stop_it_reaches_the_replacement_that_is_not_there_yet() -> None:
    known = mark(submitted("error", 1), 2)
    assert known is not None
    wished = job_lifecycle.request_job_kill(known, reason="enough")
    assert wished is not None
    assert wished.replacement == Replacement(order=2, kill_requested="enough")
    assert job_lifecycle.request_job_kill(wished, reason="again") is None
    assert successor(ended(wished, K), [], submitted("replace", 2)).kill_requested == "enough"


def test_a_child_of_a_parent_that_was_replaced_ends() -> None:
    parent = successor(
        ended(submitted("error", 1), K), job_lifecycle.new_tasks(submitted("error", 1)), submitted("replace", 2)
    )
    assert parent.first_attempt == 2
    for attempt, stopped in ((1, True), (2, False), (None, False)):
        job = job_record("child", parent="a")
        request = job.request.model_copy(update={"parent_attempt": attempt})
        job_index = JobIndex()
        job_index.apply(row(job.model_copy(update={"request": request}), 1))
        entry = job_index.get(JobKey(NS, JobId("child")))
        assert entry is not None
        records = next_records(entry, now=1, parent=parent)
        assert [record.kill_requested for record in records] == (["its parent a was replaced"] if stopped else [])


def test_no_job_takes_the_id_of_one_for_which_its_own_wait() -> None:
    jobs = {
        job.job_id: job
        for job in (
            _waiting("b", "a"),
            _waiting("c", "b"),
            _waiting("d", "e"),
            _waiting("e", "d"),
            ended(_waiting("f", "a"), F),
            job_record("g"),
        )
    }

    def why(*after: str) -> str | None:
        return circle(ID, map(JobId, after), jobs.get)

    assert why("b") == "after='b': that job waits for 'a' itself"
    assert why("g", "c") == "after='b': that job waits for 'a' itself"
    assert why("d", "f", "g", "nothing") is None


def _waiting(job_id: str, *after: str) -> JobRecord:
    job = job_record(job_id)
    return job.model_copy(update={"request": job.request.model_copy(update={"after": tuple(map(JobId, after))})})


def test_an_id_is_needed_to_meet_another() -> None:
    with pytest.raises(ValidationError, match="on_conflict='keep' needs job_id"):
        JobRequest(name="a", entrypoint=Entrypoint(command=("true",)), on_conflict="keep")


# ---- histories ------------------------------------------------------------------------------------------


class _Cluster:
    """The records of one id, with an intake that may die between any two writes, and workers that do as they like."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.rows: dict[str, tuple[JobRecord | TaskRecord, int]] = {}
        self.revision = 0
        self.job_index = JobIndex()
        self.attempts: dict[int, int] = {}  # {task: the highest attempt that a worker had}
        self.numbers: dict[str, list[int]] = {}  # {record: its transitions, as they came}
        self.recorded: list[int] = []

    def write(self, record: JobRecord | TaskRecord) -> None:
        self.revision += 1
        key = record_key(record)
        self.rows[key] = (record, self.revision)
        for each in record.transitions:
            if each.number > max(self.numbers.setdefault(key, []), default=0):
                self.numbers[key].append(each.number)
        self.job_index.apply(row(record, self.revision))
        self.job_index.sanity_check()

    def job(self) -> JobRecord | None:
        known = self.rows.get(ID)
        return known[0] if known is not None and isinstance(known[0], JobRecord) else None

    def tasks(self) -> list[TaskRecord]:
        return [record for record, _ in self.rows.values() if isinstance(record, TaskRecord)]

    def dies(self) -> bool:
        return self.dice.random() < 0.1

    def look_at(self, job: JobRecord) -> bool:
        """As the intake does, a step at a time; False when it is to come again."""
        known = self.job()
        if known is None:
            self.write(job)
            known = job
        gone = self.job_index.unfinished(JobKey(NS, ID)) is None
        resolution = resolve(known, job, gone=gone)
        if resolution is Resolution.STOP:
            marked = mark(known, job.order)
            if marked is not None:
                self.write(marked)
            return False
        if resolution is Resolution.REPLACE:
            assert not any(lifecycle.is_held(task) for task in self.tasks())
            known = successor(known, self.tasks(), job)
            self.write(known)
        if resolution in (Resolution.REPLACE, Resolution.RECORDED):
            if self.dies():
                return False
            return self._write_tasks(known)
        return True

    def _write_tasks(self, job: JobRecord) -> bool:
        for task in job_lifecycle.new_tasks(job):
            before = self.rows.get(record_key(task))
            if before is None:
                self.write(task)
            elif isinstance(before[0], TaskRecord) and before[0].order < task.order:
                self.write(task_successor(before[0], task))
            if self.dies():
                return False
        for old in self.tasks():
            if old.order < job.order and old.task >= job.request.replicas:
                del self.rows[record_key(old)]
        return True

    def settle(self) -> None:
        entry = self.job_index.get(JobKey(NS, ID))
        while entry is not None and (wanted := next_records(entry, now=9, parent=None)):
            for record in wanted:
                self.write(record)

    def work(self) -> None:
        """A worker does something with a task."""
        entry = self.job_index.get(JobKey(NS, ID))
        if entry is None or not entry.tasks:
            return
        task = self.dice.choice(entry.task_records())
        worker = WorkerId("w")
        if task.state is JobStatus.PENDING:
            claimed = lifecycle.claim(task, attempt=task.attempt, worker_id=worker, now=1)
            assert claimed is not None
            assert self.attempts.get(task.task, 0) < task.attempt, "no attempt runs twice"
            self.attempts[task.task] = task.attempt
            self.write(claimed)
        elif lifecycle.is_held(task):
            state = K if task.kill_requested is not None else self.dice.choice((S, S, F, W))
            done = lifecycle.end(task, attempt=task.attempt, worker_id=worker, now=1, state=state, reason="so it ended")
            assert done is not None
            self.write(done)


@pytest.mark.parametrize("seed", range(8))
def test_random_histories(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(40):
        cluster = _Cluster(dice)
        waiting = [
            submitted(dice.choice(("error", "keep", "replace", "replace")), order, replicas=dice.randint(1, 3))
            for order in range(1, dice.randint(2, 8))
        ]
        last = max(
            (job.order for job in waiting if job.request.on_conflict == "replace"),
            default=0,
        )
        for _ in range(5_000):
            if not waiting:
                break
            if dice.random() < 0.5:
                job = dice.choice(waiting[:3])
                known = cluster.job()
                refused = known is not None and resolve(known, job, gone=False) is Resolution.REFUSE
                if refused or cluster.look_at(job):
                    waiting.remove(job)
            else:
                cluster.work()
                cluster.settle()
        assert not waiting, "each submission is settled in the end"
        job_now = cluster.job()
        assert job_now is not None
        assert job_now.order >= last, "the last that replaces has the id, or one that was submitted after it"
        while not job_now.state.finished():
            cluster.settle()
            cluster.work()
            cluster.settle()
            job_now = cluster.job()
            assert job_now is not None
        assert {task.order for task in cluster.tasks()} == {job_now.order}
        assert [task.task for task in sorted(cluster.tasks(), key=lambda task: task.task)] == list(
            range(job_now.request.replicas)
        )
        for key, numbers in cluster.numbers.items():
            assert numbers == sorted(set(numbers)), key
