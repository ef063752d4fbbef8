"""The flow of offers: whom a task is offered to in turn, and what follows from the answers. No bus, and no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fluster_bus.messages import (
    Capacity,
    JobId,
    JobRecord,
    JobStatus,
    Namespace,
    OfferReply,
    TaskRecord,
    WorkerId,
)
from fluster_bus.storage.tables import Row
from fluster_services import job_lifecycle, lifecycle
from fluster_services.controller.scheduling.dispatch import Ask, Dispatch
from fluster_services.controller.state.job_index import JobIndex, JobKey, record_key
from fluster_services.controller.state.liveness import Liveness
from fluster_services.controller.state.worker_index import WorkerIndex
from tests.pure.recorded import recorded_job, registered_worker

GIB = 1 << 30
A, B = WorkerId("a"), WorkerId("b")
ON_CLASS = "fluster.default.dispatch.cpu.none.0.c4000m.m1024"


class Cluster:
    """Two workers of 4 CPUs, and a dispatch whose offers are answered by hand."""

    def __init__(self) -> None:
        self.time = 0.0
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.job_index = JobIndex()
        self.worker_index = WorkerIndex(self.job_index, Liveness(1e9))
        self.dispatch = Dispatch(self.job_index, self.worker_index, self, reserve_after_s=30.0, unfit_retry_s=7.0)
        self._revision = 0
        for worker_id in (A, B):
            total = Capacity(cpu=4, memory=64 * GIB, namespaces=(Namespace("default"),))
            self.worker_index.on_registered(registered_worker(worker_id, total), now=0.0)
            self.worker_index.on_beat(worker_id, now=0.0, free=total)

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, action: Callable[[], None], /) -> None:
        self.later.append((self.time + delay_s, action))

    def on_dispatchable(self) -> None:
        """The tests take by themselves."""

    def on_room(self) -> None:
        """There are no gangs."""

    def write(self, record: JobRecord | TaskRecord, *, pause_s: float = 0.0) -> None:
        self._revision += 1
        key = self.job_index.apply(Row(record_key(record), record, self._revision))
        assert key is not None
        if isinstance(record, TaskRecord):
            self.dispatch.on_task(key, record, pause_s=pause_s)

    def submit(self, name: str, cpu: float, **fields: Any) -> TaskRecord:
        (task,) = self.submit_all(name, cpu, **fields)
        return task

    def submit_all(self, name: str, cpu: float, *, pause_s: float = 0.0, **fields: Any) -> list[TaskRecord]:
        job = recorded_job(name, cpu=cpu, memory=GIB, order=self._revision, **fields)
        self.write(job)
        tasks = job_lifecycle.new_tasks(job)
        for task in tasks:
            self.write(task, pause_s=pause_s)
        return tasks

    def claim(self, task: TaskRecord, worker_id: WorkerId) -> TaskRecord:
        claimed = lifecycle.claim(task, attempt=1, worker_id=worker_id, now=self.time)
        assert claimed is not None
        self.write(claimed)
        return claimed

    def end(self, task: TaskRecord) -> None:
        assert task.worker_id is not None
        ended = lifecycle.end(
            task, attempt=1, worker_id=task.worker_id, now=self.time, state=JobStatus.SUCCEEDED, reason=""
        )
        assert ended is not None
        self.write(ended)

    def taken(self) -> list[str]:
        return [position.job.job_id for position, _ in self.dispatch.take()]

    def taken_tasks(self) -> list[int]:
        return [position.task for position, _ in self.dispatch.take()]

    def offer(self, *answers: OfferReply | None) -> list[Ask]:
        """Offer what comes next; returns what was asked, which is as much as there are answers for."""
        ((position, need),) = self.dispatch.take()
        asking = self.dispatch.offer(position, need)
        asks = [next(asking)]
        asks += [asking.send(answer) for answer in answers[:-1]]
        with pytest.raises(StopIteration):
            asking.send(answers[-1])
        return asks

    def find_nobody(self) -> list[str]:
        """Offer all that may be offered; no worker has room."""
        taken = self.dispatch.take()
        for position, need in taken:
            assert list(self.dispatch.offer(position, need))
        return [position.job.job_id for position, _ in taken]


def _no(worker_id: WorkerId = A) -> OfferReply:
    return OfferReply(worker_id=worker_id, accepted=False)


def _subjects(asks: list[Ask]) -> list[str]:
    return [ask.subject for ask in asks]


def test_a_task_on_a_level_is_offered_to_its_class_alone() -> None:
    cluster = Cluster()
    cluster.submit("job", 4)
    assert _subjects(cluster.offer(None)) == [ON_CLASS]
    assert cluster.taken() == [], "nobody has room"
    assert cluster.dispatch.is_idle
    assert cluster.later == [], "as long as none tells that it has"
    cluster.dispatch.on_room()
    assert cluster.taken() == ["job"]


def test_a_task_between_two_levels_is_then_offered_by_name_to_those_with_room() -> None:
    cluster = Cluster()
    cluster.claim(cluster.submit("other", 2), A)
    cluster.submit("job", 3)
    asks = cluster.offer(None, OfferReply(worker_id=B, accepted=True))
    assert _subjects(asks) == [ON_CLASS, "fluster.sys.workers.b.offer"]
    assert asks[0].offer.job_id == "job"


def test_what_does_not_answer_by_its_name_is_passed_over() -> None:
    cluster = Cluster()
    cluster.submit("job", 3)
    asks = cluster.offer(None, None, OfferReply(worker_id=B, accepted=True))
    assert _subjects(asks) == [ON_CLASS, *(f"fluster.sys.workers.{worker}.offer" for worker in (A, B))]
    assert cluster.later == []
    cluster.dispatch.on_room()
    assert cluster.taken() == [], "it is claimed, and its record on its way"


@pytest.mark.parametrize(
    ("said_cpu", "answer", "is_repeated"), [(4, _no(B), True), (1, _no(B), False), (4, None, False)]
)
def test_who_declines_by_name_is_asked_again_soon_if_it_said_that_it_has_room(
    said_cpu: float, answer: OfferReply | None, is_repeated: bool
) -> None:
    cluster = Cluster()
    cluster.claim(cluster.submit("other", 2), A)
    cluster.worker_index.on_beat(
        B, now=0.0, free=Capacity(cpu=said_cpu, memory=GIB, namespaces=(Namespace("default"),))
    )
    cluster.submit("job", 3)
    assert len(cluster.offer(None, answer)) == 2
    assert [at for at, _ in cluster.later] == ([0.01] if is_repeated else [])
    assert not cluster.dispatch.unfit(JobKey(Namespace("default"), JobId("job")))


@pytest.mark.parametrize(("cpu", "asked"), [(1, 1), (3, 3)])  # on a level, and between two: then by name too
def test_a_worker_with_room_that_listens_to_nothing_is_offered_it_again_when_it_is_heard(
    cpu: float, asked: int
) -> None:
    """The controller is back on a restarted server before the worker, which has as much room as it said before."""
    cluster = Cluster()
    free = Capacity(cpu=4, memory=64 * GIB, namespaces=(Namespace("default"),))
    cluster.submit("job", cpu)
    assert len(cluster.offer(*[None] * asked)) == asked
    assert cluster.taken() == []
    for worker_id in (A, B):
        assert cluster.worker_index.on_beat(worker_id, now=1.0, free=free)
        assert not cluster.worker_index.on_beat(worker_id, now=2.0, free=free)


def test_a_worker_missed_nothing_that_is_full_or_was_not_to_have_it() -> None:
    cluster = Cluster()
    free = Capacity(cpu=4, memory=64 * GIB, namespaces=(Namespace("default"),))
    cluster.claim(cluster.submit("other", 3), A)
    cluster.submit("job", 3)
    cluster.offer(None, _lacks(B))
    cluster.dispatch.take()
    cluster.find_nobody()
    assert not cluster.worker_index.on_beat(A, now=1.0, free=free)
    assert not cluster.worker_index.on_beat(B, now=1.0, free=free)


def test_who_lacks_by_name_what_the_job_names_is_passed_over_and_told_of() -> None:
    cluster = Cluster()
    cluster.submit("job", 3)
    cluster.offer(None, _lacks(A), OfferReply(worker_id=B, accepted=True))
    key = next(iter(cluster.job_index.keys()))
    assert dict(cluster.dispatch.unfit(key)) == {A: "worker a has no folder"}
    cluster.dispatch.on_room()
    assert cluster.taken() == [], "it is claimed at B"


def test_a_job_that_no_worker_of_its_namespace_takes_holds_up_no_other_namespace() -> None:
    cluster = Cluster()
    cluster.submit("theirs", 4, namespace="other")
    cluster.submit("ours", 4)
    assert cluster.taken() == ["theirs", "ours"]
    cluster = Cluster()
    cluster.submit("theirs", 3, namespace="other")
    assert _subjects(cluster.offer(None)) == ["fluster.other.dispatch.cpu.none.0.c4000m.m1024"], (
        "no worker is asked by name"
    )
    cluster.submit("ours", 3)
    assert cluster.taken() == ["ours"]


def test_room_is_found_as_soon_as_the_record_tells_of_it() -> None:
    cluster = Cluster()
    held = cluster.claim(cluster.submit("one", 2), A)
    cluster.claim(cluster.submit("two", 2), B)
    cluster.submit("job", 3)
    cluster.offer(None)
    assert cluster.taken() == []
    cluster.end(held)  # no worker has beaten since
    assert _subjects(cluster.offer(None, _no()))[1:] == ["fluster.sys.workers.a.offer"]


def test_room_that_is_too_small_wakes_only_what_fits() -> None:
    cluster = Cluster()
    first, second = cluster.submit("first", 1), cluster.submit("second", 1)
    cluster.claim(cluster.submit("large", 3), A)
    cluster.claim(cluster.submit("other", 4), B)
    held = cluster.claim(first, A)
    cluster.submit("waits", 4)
    cluster.find_nobody()
    assert cluster.taken() == []
    cluster.end(held)
    assert cluster.taken() == ["second"]
    cluster.dispatch.on_room()  # a worker told of room: how much is not known
    assert cluster.taken() == ["waits"]
    assert second.state is JobStatus.PENDING


def test_what_a_worker_declined_that_said_to_have_room_is_offered_again_soon_and_then_later() -> None:
    cluster = Cluster()
    cluster.submit("job", 4)
    pauses = []
    for _ in range(8):
        cluster.offer(_no())
        assert cluster.taken() == []
        ((at, action),) = cluster.later
        pauses.append(round(at - cluster.time, 3))
        cluster.later.clear()
        action()
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]


def test_all_that_is_declined_meanwhile_is_offered_again_together() -> None:
    cluster = Cluster()
    for name, cpu in (("large", 4), ("small", 1)):
        cluster.submit(name, cpu)
    taken = cluster.dispatch.take()
    for position, need in taken:
        asking = cluster.dispatch.offer(position, need)
        next(asking)
        with pytest.raises(StopIteration):
            asking.send(_no())
    assert not cluster.dispatch.is_idle
    ((_, action),) = cluster.later
    action()
    assert cluster.taken() == ["large", "small"]


def test_only_so_many_offers_are_out_at_once() -> None:
    cluster = Cluster()
    for number in range(32):
        cluster.submit(f"one{number}", 1)
        cluster.submit(f"two{number}", 2)
    taken = cluster.dispatch.take()
    assert len(taken) == 32
    assert cluster.taken() == []
    cluster.dispatch.on_unanswered(*taken[0])
    assert len(cluster.taken()) == 1


def test_room_that_came_while_an_offer_was_out_is_not_forgotten() -> None:
    cluster = Cluster()
    cluster.submit("job", 4)
    ((position, need),) = cluster.dispatch.take()
    asking = cluster.dispatch.offer(position, need)
    next(asking)
    cluster.dispatch.on_room()
    with pytest.raises(StopIteration):
        asking.send(None)
    assert cluster.taken() == ["job"]


def test_an_offer_without_an_answer_is_made_again() -> None:
    cluster = Cluster()
    cluster.submit("job", 4)
    ((position, need),) = cluster.dispatch.take()
    next(cluster.dispatch.offer(position, need))
    assert not cluster.dispatch.is_idle
    cluster.dispatch.on_unanswered(position, need)
    assert cluster.dispatch.is_idle
    assert cluster.taken() == ["job"]


def test_a_task_is_not_offered_before_its_pause_is_over_nor_when_it_has_changed_meanwhile() -> None:
    cluster = Cluster()
    cluster.submit("kept", 1, pause_s=5.0)
    killed = lifecycle.request_kill(cluster.submit("killed", 1, pause_s=5.0), now=1.0, reason="")
    assert killed is not None
    cluster.write(killed)
    assert cluster.taken() == []
    for at, action in cluster.later:
        assert at == 5.0
        action()
    assert cluster.taken() == ["kept"]


def test_a_class_whose_members_are_kept_free_is_not_the_last_word() -> None:
    cluster = Cluster()
    cluster.submit("job", 4)
    kept_free = OfferReply(worker_id=A, accepted=False, spared=True)
    asks = cluster.offer(kept_free, kept_free, kept_free, _no(), OfferReply(worker_id=B, accepted=True))
    assert _subjects(asks) == [ON_CLASS] * 3 + [f"fluster.sys.workers.{worker}.offer" for worker in (A, B)]


def test_who_has_become_full_meanwhile_is_asked_once() -> None:
    cluster = Cluster()
    cluster.submit("job", 4)
    kept_free = OfferReply(worker_id=A, accepted=False, spared=True)
    assert _subjects(cluster.offer(kept_free, _no(B))) == [ON_CLASS] * 2


# ---- what changes while a task waits --------------------------------------------------------------------


def test_what_is_to_be_stopped_is_not_offered() -> None:
    cluster = Cluster()
    killed = lifecycle.request_kill(cluster.submit("job", 1), now=1.0, reason="why")
    assert killed is not None
    cluster.write(killed)
    assert cluster.taken() == []
    cluster.dispatch.scheduler.sanity_check()


def test_what_a_gang_gives_back_is_room_and_what_it_takes_is_not() -> None:
    cluster = Cluster()
    cluster.submit("waits", 2)
    assert cluster.find_nobody() == ["waits"]
    (task,) = cluster.submit_all("gang", 1, gang=True)
    assert cluster.find_nobody() == ["waits"], "a task of a gang may have come back from a worker; it is not offered"
    held = lifecycle.claim(task, attempt=1, worker_id=A, now=1.0, epoch=1)
    assert held is not None
    cluster.write(held)
    assert cluster.find_nobody() == []


def test_a_task_more_that_waits_is_no_room() -> None:
    cluster = Cluster()
    cluster.submit("waits", 4)
    assert cluster.find_nobody() == ["waits"]
    cluster.submit("small", 1)
    assert cluster.find_nobody() == ["small"]


# ---- arrays ---------------------------------------------------------------------------------------------


def test_as_many_tasks_of_an_array_are_offered_or_run_as_may_at_once() -> None:
    cluster = Cluster()
    tasks = cluster.submit_all("array", 1, array="0-3%2")
    assert cluster.taken_tasks() == [0, 1]
    key = next(iter(cluster.job_index.keys()))
    assert [cluster.dispatch.awaits_slot(key, number) for number in range(4)] == [False, False, True, True]
    first = cluster.claim(tasks[0], A)
    assert cluster.taken_tasks() == [], "it is held, and has its turn until it ends"
    cluster.end(first)
    assert cluster.taken_tasks() == [2]
    killed = lifecycle.request_kill(tasks[1], now=1.0, reason="why")
    assert killed is not None
    cluster.write(killed)
    assert cluster.taken_tasks() == [3], "one that is never run passes its turn as well"


def test_an_array_without_a_bound_is_offered_as_a_whole() -> None:
    cluster = Cluster()
    cluster.submit_all("array", 1, array="0-3")
    assert cluster.taken_tasks() == [0, 1, 2, 3]


# ---- workers that lack what a job names -----------------------------------------------------------------


def _lacks(worker_id: WorkerId) -> OfferReply:
    return OfferReply(worker_id=worker_id, accepted=False, unfit=True, reason=f"worker {worker_id} has no folder")


def test_a_worker_without_the_folder_is_not_asked_again_and_the_next_one_is() -> None:
    cluster = Cluster()
    task = cluster.submit("there", 4)
    assert [ask.subject for ask in cluster.offer(_lacks(A))] == [ON_CLASS]
    (ask,) = cluster.offer(OfferReply(worker_id=B, accepted=True))
    assert ask.subject == "fluster.sys.workers.b.offer"
    cluster.claim(task, B)
    cluster.dispatch.scheduler.sanity_check()


def test_a_task_that_is_wanted_nowhere_holds_up_nobody_with_the_same_need() -> None:
    cluster = Cluster()
    cluster.submit("nowhere", 4)
    cluster.offer(_lacks(A))
    cluster.offer(_lacks(B))
    (need,) = cluster.dispatch.scheduler.needs()
    assert need.elsewhere == (A, B)
    cluster.submit("other", 4)
    positions = cluster.dispatch.take()
    assert sorted(position.job.job_id for position, _ in positions) == ["nowhere", "other"]
    for position, need in positions:
        asks = list(cluster.dispatch.offer(position, need)) if position.job.job_id == "nowhere" else None
        assert asks in (None, [])
    cluster.worker_index.note_misfits([need for need in cluster.dispatch.scheduler.needs() if need.elsewhere], now=1.0)
    assert [need.elsewhere for need in cluster.worker_index.misfits] == [(A, B)]
    cluster.dispatch.scheduler.sanity_check()


@pytest.mark.parametrize("is_out", [False, True])
def test_a_worker_that_lacked_it_is_asked_again_after_a_while(is_out: bool) -> None:
    cluster = Cluster()
    cluster.claim(cluster.submit("busy", 4), B)
    task = cluster.submit("there", 4)
    cluster.offer(_lacks(A))
    ((position, need),) = cluster.dispatch.take()
    assert need.elsewhere == (A,)
    asking = cluster.dispatch.offer(position, need)
    if not is_out:
        assert list(asking) == [], "B is full"
        assert cluster.dispatch.take() == []
    (due, ask_again) = cluster.later.pop()
    assert due == 7.0
    ask_again()
    if is_out:
        assert list(asking) == []
    assert not cluster.dispatch.unfit(position.job)
    (ask,) = cluster.offer(OfferReply(worker_id=A, accepted=True))
    assert ask.subject == ON_CLASS
    cluster.claim(task, A)
    assert cluster.dispatch.is_idle
    assert len(cluster.dispatch.scheduler) == 0
    cluster.dispatch.scheduler.sanity_check()


def test_one_that_lacks_it_still_is_not_asked_for_as_long_again() -> None:
    cluster = Cluster()
    cluster.claim(cluster.submit("busy", 4), B)
    cluster.submit("there", 4)
    for _ in range(3):
        cluster.offer(_lacks(A))
        ((position, need),) = cluster.dispatch.take()
        assert list(cluster.dispatch.offer(position, need)) == []
        assert len(cluster.later) == 1
        cluster.later.pop()[1]()


def test_of_several_that_lack_it_each_is_asked_again_in_its_own_time() -> None:
    cluster = Cluster()
    cluster.submit("nowhere", 4)
    cluster.offer(_lacks(A))
    cluster.time = 1.0
    cluster.offer(_lacks(B))
    key = next(iter(cluster.job_index.keys()))
    (first, second) = cluster.later
    first[1]()
    assert list(cluster.dispatch.unfit(key)) == [B]
    second[1]()
    assert not cluster.dispatch.unfit(key)


def test_what_workers_lack_is_forgotten_with_the_job() -> None:
    cluster = Cluster()
    task = cluster.submit("there", 4)
    cluster.offer(_lacks(A))
    key = next(iter(cluster.job_index.keys()))
    assert dict(cluster.dispatch.unfit(key)) == {A: "worker a has no folder"}
    cluster.end(cluster.claim(task, B))
    cluster.dispatch.forget(key)
    assert not cluster.dispatch.unfit(key)
