"""The controller's view of the records: the newest of each, however they arrive."""

import random

from fluster_bus.messages import Entrypoint, JobId, JobRecord, JobRequest, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_bus.storage.tables import Deleted, Row
from fluster_services import job_lifecycle, lifecycle
from fluster_services.controller.state.books import Books, JobKey, record_key

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
    books, job = Books(), job_record("a")
    task = job_lifecycle.new_tasks(job)[0]
    key = JobKey(NS, JobId("a"))
    assert books.apply(row(_claimed(task, "w1"), 5)) == key
    assert books.apply(row(task, 4)) is None
    assert books.apply(row(task, 5)) is None
    assert books.get(key) is None
    assert books.apply(row(job, 2)) == key
    assert books.apply(row(job, 2)) is None
    entry = books.get(key)
    assert entry is not None
    assert entry.task_records()[0].state is JobStatus.BUILDING


def test_a_task_has_children_until_all_that_they_launched_has_ended() -> None:
    books = Books()
    jobs = {name: job_record(name, order=number) for number, name in enumerate(("p", "child", "grandchild"), 1)}
    updates = {"child": {"parent": "p", "parent_task": 1}, "grandchild": {"parent": "child", "parent_task": 0}}
    for name, update in updates.items():
        request = jobs[name].request.model_copy(update=update)
        jobs[name] = jobs[name].model_copy(update={"request": request})
    for number, job in enumerate(jobs.values(), 1):
        books.apply(row(job, number))
    parent = JobKey(NS, JobId("p"))
    assert books.with_children(parent) == {1}
    books.apply(row(jobs["child"].model_copy(update={"state": JobStatus.KILLED}), 4))
    assert books.with_children(parent) == {1}
    books.apply(row(jobs["grandchild"].model_copy(update={"state": JobStatus.KILLED}), 5))
    assert books.with_children(parent) == frozenset()
    assert books.relieved(JobKey(NS, JobId("grandchild"))) == [JobKey(NS, JobId("child")), parent]


def test_who_holds_what() -> None:
    books, job = Books(), job_record("a", replicas=2)
    first, second = job_lifecycle.new_tasks(job)
    books.apply(row(job, 1))
    books.apply(row(_claimed(first, "w1"), 2))
    books.apply(row(_claimed(second, "w1"), 3))
    assert {task.value.task for _, task in books.held_by(WorkerId("w1"))} == {0, 1}
    assert books.holders() == ["w1"]
    ended = lifecycle.lose_worker(_claimed(first, "w1"), worker_id=WorkerId("w1"), now=2, reason="lost")
    assert ended is not None
    books.apply(row(ended, 4))
    again = lifecycle.retry(ended, now=3)
    assert again is not None
    books.apply(row(again, 5))
    books.apply(row(_claimed(again, "w2"), 6))
    assert [task.value.task for _, task in books.held_by(WorkerId("w1"))] == [1]
    assert books.holders() == ["w1", "w2"]
    assert books.held_by(WorkerId("w3")) == []
    books.sanity_check()


def test_children_and_the_newest() -> None:
    books = Books()
    for number, name in enumerate(["a", "b", "c"], start=1):
        books.apply(row(job_record(name, order=number, parent="a" if name != "a" else None), number))
    assert books.children(JobKey(NS, JobId("a"))) == {JobKey(NS, JobId("b")), JobKey(NS, JobId("c"))}
    assert books.children(JobKey(NS, JobId("b"))) == frozenset()
    assert [key.job_id for key in books.newest(NS)] == ["c", "b", "a"]
    assert list(books.newest(Namespace("other"))) == []
    assert len(books.keys()) == 3


def test_a_job_waits_as_long_as_none_of_its_tasks_is_begun() -> None:
    books, job = Books(), job_record("a", replicas=2)
    first, second = job_lifecycle.new_tasks(job)
    books.apply(row(job, 1))
    assert books.waiting(NS) == 1, "also before its tasks are there, as when it waits for others"
    books.apply(row(first, 2))
    books.apply(row(second, 3))
    claimed = lifecycle.claim(first, attempt=1, worker_id=WorkerId("w1"), now=1.0)
    assert claimed is not None
    books.apply(row(claimed, 4))
    assert books.waiting(NS) == 0
    books.apply(row(claimed, 4))
    books.apply(row(first, 5))
    assert books.waiting(NS) == 1, "it goes back and waits again"
    books.sanity_check()
    assert books.waiting(Namespace("other")) == 0
    books.discard(JobKey(NS, JobId("a")))
    assert books.waiting(NS) == 0
    books.apply(row(job, 6))
    books.apply(row(job.model_copy(update={"state": JobStatus.KILLED}), 7))
    assert books.waiting(NS) == 0
    books.sanity_check()


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
        in_order, shuffled = Books(), Books()
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
    books = Books()
    books.apply(row(job_record("parent", order=1), 1))
    books.apply(row(job_record("a", order=2, parent="parent"), 2))
    books.apply(row(_claimed(job_lifecycle.new_tasks(job_record("a", order=2))[0], "w1"), 3))
    assert books.remove(NS, Deleted("a.0", 4)) is None
    assert books.remove(NS, Deleted("a", 1)) is None  # it was made anew since
    removed = books.remove(NS, Deleted("a", 5))
    assert removed is not None
    assert removed[0] == JobKey(NS, JobId("a"))
    assert len(removed[1]) == 2
    assert books.get(removed[0]) is None
    assert books.held_by(WorkerId("w1")) == []
    assert books.children(JobKey(NS, JobId("parent"))) == frozenset()
    assert books.remove(NS, Deleted("a", 6)) is None
    books.sanity_check()


def test_a_job_that_replaced_a_child_is_no_child_of_its_parent() -> None:
    books = Books()
    books.apply(row(job_record("parent", order=1), 1))
    books.apply(row(job_record("mine", order=2, parent="parent"), 2))
    books.apply(row(job_record("mine", order=3, parent="other"), 3))
    assert books.children(JobKey(NS, JobId("parent"))) == frozenset()
    assert books.children(JobKey(NS, JobId("other"))) == {JobKey(NS, JobId("mine"))}
    books.apply(row(job_record("mine", order=4), 4))
    assert books.children(JobKey(NS, JobId("other"))) == frozenset()
