"""The controller's view of the records: the newest of each, however they arrive."""

import random

from fluster_bus.messages import Entrypoint, JobId, JobRecord, JobRequest, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_bus.storage.tables import Deleted, Row
from fluster_services import job_lifecycle, lifecycle
from fluster_services.controller.state.job_index import JobIndex, JobKey, record_key

NS = Namespace("default")


def job_record(job_id: str, *, order: int = 1, replicas: int = 1, parent: str | None = None) -> JobRecord:
    request = JobRequest(
        name="train",
        entrypoint=Entrypoint(command=("true",)),
        replicas=replicas,
        parent=JobId(parent) if parent else None,
        max_retries_failure=1,
        max_retries_preemption=2,
    )
    return job_lifecycle.new_job(NS, JobId(job_id), request, order=order, now=0)


def row(record: JobRecord | TaskRecord, revision: int) -> Row[JobRecord | TaskRecord]:
    return Row(record_key(record), record, revision)


def _claimed(task: TaskRecord, worker: str) -> TaskRecord:
    claimed = lifecycle.claim(task, attempt=task.attempt, worker_id=WorkerId(worker), now=1)
    assert claimed is not None
    return claimed


def test_an_older_record_changes_nothing() -> None:
    job_index, job = JobIndex(), job_record("a")
    task = job_lifecycle.new_tasks(job)[0]
    key = JobKey(NS, JobId("a"))
    assert job_index.apply(row(_claimed(task, "w1"), 5)) == key
    assert job_index.apply(row(task, 4)) is None
    assert job_index.apply(row(task, 5)) is None
    assert job_index.get(key) is None
    assert job_index.apply(row(job, 2)) == key
    assert job_index.apply(row(job, 2)) is None
    entry = job_index.get(key)
    assert entry is not None
    assert entry.task_records()[0].state is JobStatus.BUILDING


def test_a_task_has_children_until_all_that_they_launched_has_ended() -> None:
    job_index = JobIndex()
    jobs = {name: job_record(name, order=number) for number, name in enumerate(("p", "child", "grandchild"), 1)}
    updates = {"child": {"parent": "p", "parent_task": 1}, "grandchild": {"parent": "child", "parent_task": 0}}
    for name, update in updates.items():
        request = jobs[name].request.model_copy(update=update)
        jobs[name] = jobs[name].model_copy(update={"request": request})
    for number, job in enumerate(jobs.values(), 1):
        job_index.apply(row(job, number))
    parent = JobKey(NS, JobId("p"))
    assert job_index.with_children(parent) == {1}
    job_index.apply(row(jobs["child"].model_copy(update={"state": JobStatus.KILLED}), 4))
    assert job_index.with_children(parent) == {1}
    job_index.apply(row(jobs["grandchild"].model_copy(update={"state": JobStatus.KILLED}), 5))
    assert job_index.with_children(parent) == frozenset()
    assert job_index.relieved(JobKey(NS, JobId("grandchild"))) == [JobKey(NS, JobId("child")), parent]


def test_who_holds_what() -> None:
    job_index, job = JobIndex(), job_record("a", replicas=2)
    first, second = job_lifecycle.new_tasks(job)
    job_index.apply(row(job, 1))
    job_index.apply(row(_claimed(first, "w1"), 2))
    job_index.apply(row(_claimed(second, "w1"), 3))
    assert {task.value.task for _, task in job_index.held_by(WorkerId("w1"))} == {0, 1}
    assert job_index.holders() == ["w1"]
    ended = lifecycle.lose_worker(_claimed(first, "w1"), worker_id=WorkerId("w1"), now=2, reason="lost")
    assert ended is not None
    job_index.apply(row(ended, 4))
    again = lifecycle.retry(ended, now=3)
    assert again is not None
    job_index.apply(row(again, 5))
    job_index.apply(row(_claimed(again, "w2"), 6))
    assert [task.value.task for _, task in job_index.held_by(WorkerId("w1"))] == [1]
    assert job_index.holders() == ["w1", "w2"]
    assert job_index.held_by(WorkerId("w3")) == []
    job_index.sanity_check()


def test_children_and_the_newest() -> None:
    job_index = JobIndex()
    for number, name in enumerate(["a", "b", "c"], start=1):
        job_index.apply(row(job_record(name, order=number, parent="a" if name != "a" else None), number))
    assert job_index.children(JobKey(NS, JobId("a"))) == {JobKey(NS, JobId("b")), JobKey(NS, JobId("c"))}
    assert job_index.children(JobKey(NS, JobId("b"))) == frozenset()
    assert [key.job_id for key in job_index.newest(NS)] == ["c", "b", "a"]
    assert list(job_index.newest(Namespace("other"))) == []
    assert len(job_index.keys()) == 3


def test_a_job_waits_as_long_as_none_of_its_tasks_is_begun() -> None:
    job_index, job = JobIndex(), job_record("a", replicas=2)
    first, second = job_lifecycle.new_tasks(job)
    job_index.apply(row(job, 1))
    assert job_index.waiting(NS) == 1, "also before its tasks are there, as when it waits for others"
    job_index.apply(row(first, 2))
    job_index.apply(row(second, 3))
    claimed = lifecycle.claim(first, attempt=1, worker_id=WorkerId("w1"), now=1.0)
    assert claimed is not None
    job_index.apply(row(claimed, 4))
    assert job_index.waiting(NS) == 0
    job_index.apply(row(claimed, 4))
    job_index.apply(row(first, 5))
    assert job_index.waiting(NS) == 1, "it goes back and waits again"
    job_index.sanity_check()
    assert job_index.waiting(Namespace("other")) == 0
    job_index.discard(JobKey(NS, JobId("a")))
    assert job_index.waiting(NS) == 0
    job_index.apply(row(job, 6))
    job_index.apply(row(job.model_copy(update={"state": JobStatus.KILLED}), 7))
    assert job_index.waiting(NS) == 0
    job_index.sanity_check()


def test_the_order_in_which_records_arrive_does_not_matter() -> None:
    dice = random.Random(1)
    for _ in range(200):
        job = job_record("a", replicas=2)
        rows, revision = [row(job, 1)], 1
        for task in job_lifecycle.new_tasks(job):
            record: TaskRecord | None = task
            while record is not None:
                revision += 1
                rows.append(row(record, revision))
                step = dice.choice(("on", "on", "on", "stop"))
                record = None if step == "stop" else _advance(record, dice)
        in_order, shuffled = JobIndex(), JobIndex()
        for each in rows:
            in_order.apply(each)
        for each in dice.sample(rows, len(rows)) + dice.choices(rows, k=3):
            shuffled.apply(each)
        in_order.sanity_check()
        shuffled.sanity_check()
        key = JobKey(NS, JobId("a"))
        assert shuffled.get(key) == in_order.get(key)
        assert sorted(shuffled.holders()) == sorted(in_order.holders())


def _advance(task: TaskRecord, dice: random.Random) -> TaskRecord | None:
    if task.state is JobStatus.PENDING:
        return _claimed(task, dice.choice(("w1", "w2")))
    if lifecycle.is_held(task) and task.worker_id is not None:
        return lifecycle.lose_worker(task, worker_id=task.worker_id, now=2, reason="lost")
    return lifecycle.retry(task, now=3)


def test_a_job_that_was_removed_leaves_nothing() -> None:
    job_index = JobIndex()
    job_index.apply(row(job_record("parent", order=1), 1))
    job_index.apply(row(job_record("a", order=2, parent="parent"), 2))
    job_index.apply(row(_claimed(job_lifecycle.new_tasks(job_record("a", order=2))[0], "w1"), 3))
    assert job_index.remove(NS, Deleted("a.0", 4)) is None
    assert job_index.remove(NS, Deleted("a", 1)) is None  # it was made anew since
    removed = job_index.remove(NS, Deleted("a", 5))
    assert removed is not None
    assert removed[0] == JobKey(NS, JobId("a"))
    assert len(removed[1]) == 2
    assert job_index.get(removed[0]) is None
    assert job_index.held_by(WorkerId("w1")) == []
    assert job_index.children(JobKey(NS, JobId("parent"))) == frozenset()
    assert job_index.remove(NS, Deleted("a", 6)) is None
    job_index.sanity_check()


def test_a_job_that_replaced_a_child_is_no_child_of_its_parent() -> None:
    job_index = JobIndex()
    job_index.apply(row(job_record("parent", order=1), 1))
    job_index.apply(row(job_record("mine", order=2, parent="parent"), 2))
    job_index.apply(row(job_record("mine", order=3, parent="other"), 3))
    assert job_index.children(JobKey(NS, JobId("parent"))) == frozenset()
    assert job_index.children(JobKey(NS, JobId("other"))) == {JobKey(NS, JobId("mine"))}
    job_index.apply(row(job_record("mine", order=4), 4))
    assert job_index.children(JobKey(NS, JobId("other"))) == frozenset()
