"""Quotas and turns of namespaces in the flow of offers: what is kept for whom, and what is said of it."""

from __future__ import annotations

import pytest

from fluster_bus.messages import Capacity, JobId, JobRecord, Namespace, OfferReply, TaskRecord, WorkerId
from fluster_bus.messages.namespaces import NamespaceQuota, NamespaceRecord
from fluster_services import capacity, job_lifecycle, lifecycle
from fluster_services.controller.scheduling.order import position_of
from fluster_services.controller.state.job_index import JobKey
from tests.pure.controller.test_dispatch import GIB, A, B, Cluster
from tests.pure.recorded import recorded_job, registered_worker

OURS, THEIRS = Namespace("team-a"), Namespace("team-b")


class Shared(Cluster):
    """The same two workers of 4 CPUs, for two teams; it counts how often gangs hear of room."""

    def __init__(self) -> None:
        super().__init__()
        self.gangs_told = 0
        for worker_id in (A, B):
            total = Capacity(cpu=4, memory=64 * GIB, namespaces=(OURS, THEIRS))
            self.worker_index.on_registered(registered_worker(worker_id, total), now=0.0)

    def on_room(self) -> None:
        self.gangs_told += 1

    def job(self, name: str) -> JobRecord:
        for key in self.job_index.keys():  # noqa: SIM118 - it is not a dict
            entry = self.job_index.get(key)
            if key.job_id == name and entry is not None and entry.job is not None:
                return entry.job.value
        raise AssertionError(name)

    def set(self, namespace: Namespace, *, weight: float = 1.0, **quota: float) -> None:
        record = NamespaceRecord(name=namespace, quota=NamespaceQuota.model_validate(quota), weight=weight)
        self.dispatch.on_namespace(record)

    def start(self, name: str, cpu: float, worker_id: WorkerId, namespace: Namespace = OURS) -> TaskRecord:
        """One that is held already."""
        return self.claim(self.submit(name, cpu, namespace=namespace), worker_id)

    def accept(self, worker_id: WorkerId = A) -> str:
        """Offer what comes next, and have the worker claim it."""
        ((position, need),) = self.dispatch.take()
        asking = self.dispatch.offer(position, need)
        next(asking)
        entry = self.job_index.get(position.job)
        assert entry is not None
        self.claim(entry.tasks[position.task].value, worker_id)
        with pytest.raises(StopIteration):
            asking.send(OfferReply(worker_id=worker_id, accepted=True))
        return position.job.job_id


def test_what_records_say_is_held_counts_whoever_offered_it() -> None:
    cluster = Shared()
    cluster.set(OURS, cpus=4)
    held = cluster.start("held", 3, A)
    cluster.submit("waits", 2, namespace=OURS)
    cluster.submit("fits", 1, namespace=OURS)
    assert cluster.taken() == ["fits"]
    assert cluster.dispatch.why_short(cluster.job("waits")) == (
        "waits for the quota of namespace team-a: 4 of 4 CPUs are used"
    )
    told = cluster.gangs_told
    cluster.end(held)
    assert cluster.gangs_told > told, "a gang may fit into the quota now"
    assert cluster.taken() == ["waits"]
    assert cluster.dispatch.shares.used(OURS).milli_cpus == 3_000


def test_a_task_that_goes_back_without_an_end_frees_the_quota_too() -> None:
    cluster = Shared()
    cluster.set(OURS, cpus=1)
    held = cluster.start("held", 1, A)
    cluster.submit("waits", 1, namespace=OURS)
    assert cluster.taken() == []
    cluster.job_index.discard(JobKey(OURS, held.job_id))
    assert cluster.taken() == ["waits"]


def test_room_in_a_quota_is_kept_for_who_was_overtaken_for_too_long() -> None:
    cluster = Shared()
    cluster.set(OURS, cpus=4)
    held = [cluster.start(f"held{each}", 1, A) for each in range(4)]
    cluster.submit("large", 3, namespace=OURS)
    for each in range(2):
        cluster.submit(f"small{each}", 1, namespace=OURS)
    cluster.end(held[0])
    assert cluster.accept() == "small0"
    cluster.time = 31.0
    cluster.end(held[1])
    assert cluster.taken() == [], "small1 would leave too little"
    assert cluster.dispatch.scheduler.order.kept_quota(OURS) == position_of(cluster.job("large"))
    assert cluster.dispatch.why_short(cluster.job("small1")) == (
        "waits for the quota of namespace team-a: job large, which others have overtaken for long, goes first"
    )
    assert cluster.dispatch.why_short(cluster.job("large")) == (
        "waits for the quota of namespace team-a: 3 of 4 CPUs are used, and it needs 3"
    )
    for task in held[2:]:
        cluster.end(task)
    assert cluster.taken() == ["large"]


def test_nothing_is_kept_for_what_no_quota_or_no_worker_has_ever_room_for() -> None:
    cluster = Shared()
    held = [cluster.start(f"held{each}", 1, A) for each in range(2)]
    for name, cpu in (("larger-than-workers", 8), ("larger-than-the-quota", 10)):
        cluster.submit(name, cpu, namespace=OURS)
    for each in range(3):
        cluster.submit(f"small{each}", 1, namespace=OURS)
    cluster.set(OURS, cpus=2)  # it was not that small when they were submitted
    cluster.end(held[0])
    assert cluster.accept() == "small0"
    cluster.time = 31.0
    cluster.end(held[1])
    assert cluster.taken() == ["small1"]
    assert cluster.dispatch.scheduler.order.kept_quota(OURS) is None
    said = cluster.dispatch.why_short(cluster.job("larger-than-the-quota"))
    assert said is not None
    assert said.startswith("it needs 10 CPUs, more than the quota of namespace team-a ever has room for (2 CPUs)")


def test_a_worker_is_not_kept_free_any_more_for_who_lacks_quota() -> None:
    cluster = Shared()
    held = [cluster.start(f"held-{worker}{each}", 1, worker) for worker in (A, B) for each in range(4)]
    cluster.submit("large", 4, namespace=OURS)
    assert cluster.find_nobody() == ["large"]
    cluster.submit("small", 1, namespace=OURS)
    cluster.end(held[0])
    assert cluster.accept() == "small"
    cluster.time = 31.0
    cluster.dispatch.on_room()
    cluster.find_nobody()
    assert cluster.dispatch.reservation is not None
    cluster.set(OURS, cpus=4)
    cluster.dispatch.take()
    assert cluster.dispatch.reservation is None


def test_who_goes_first_is_told_with_what_both_have() -> None:
    cluster = Shared()
    for each in range(3):
        cluster.start(f"held{each}", 1, A)
    cluster.submit("ours", 4, namespace=OURS)
    assert cluster.dispatch.who_goes_first(cluster.job("ours")) is None
    cluster.submit("theirs", 4, namespace=THEIRS)
    assert cluster.dispatch.who_goes_first(cluster.job("ours")) == (
        "namespace team-b goes first: it holds 0 % of the cluster, team-a 37.5 %, equal weights"
    )
    assert cluster.dispatch.who_goes_first(cluster.job("theirs")) is None
    cluster.set(THEIRS, weight=0.5)
    cluster.start("more", 4, B, THEIRS)
    assert cluster.dispatch.who_goes_first(cluster.job("theirs")) == (
        "namespace team-a goes first: it holds 37.5 % of the cluster, team-b 50 %, with weights 1 and 0.5"
    )
    cluster.set(THEIRS, max_priority=3)
    cluster.submit("urgent", 4, namespace=THEIRS, priority=5)
    assert cluster.dispatch.who_goes_first(cluster.job("ours")) == (
        "namespace team-b goes first: its tasks have a higher priority"
    )
    ours, urgent = position_of(cluster.job("ours")), position_of(cluster.job("urgent"))
    assert cluster.dispatch.goes_before(urgent, ours)
    assert not cluster.dispatch.goes_before(ours, urgent)
    cluster.set(THEIRS, cpus=4)
    assert cluster.dispatch.who_goes_first(cluster.job("ours")) is None, "its quota keeps it waiting"
    cluster.dispatch.on_namespace_gone(THEIRS)
    assert cluster.dispatch.why_short(cluster.job("theirs")) is None


def test_the_parts_are_of_those_workers_that_take_work() -> None:
    cluster = Shared()
    cluster.start("held", 2, A)
    for name, namespace in (("ours", OURS), ("theirs", THEIRS)):
        cluster.submit(name, 4, namespace=namespace)
    cluster.dispatch.take()
    assert cluster.dispatch.shares.part(OURS) == 6 / 8
    cluster.worker_index.on_registered(
        registered_worker(B, Capacity(cpu=4, memory=64 * GIB), draining=True),
        now=0.0,
    )
    cluster.dispatch.take()
    assert cluster.worker_index.total().milli_cpus == 4_000
    cluster.worker_index.on_left(B)
    cluster.worker_index.on_registered(registered_worker(A, Capacity(cpu=12, memory=64 * GIB)), now=0.0)
    assert cluster.worker_index.total() == (12_000, 64 * GIB, 0)


def test_a_gang_that_is_gathered_counts_once_whether_its_holds_are_known_or_not() -> None:
    cluster = Shared()
    cluster.set(OURS, cpus=3)
    job = recorded_job("gang", cpu=1, memory=GIB, namespace=OURS, replicas=3, gang=True)
    cluster.write(job)
    tasks = job_lifecycle.new_tasks(job)
    for task in tasks:
        cluster.write(task)
    key, need = JobKey(OURS, JobId("gang")), capacity.needed(job.request.resources, OURS)
    dispatch = cluster.dispatch
    dispatch.add_gang(position_of(job), need, 3)
    assert dispatch.has_quota(position_of(job), need, 3)
    assert dispatch.rank(position_of(job))[0] == 0
    dispatch.on_gathering(key)
    for task in tasks:
        held = lifecycle.claim(task, attempt=1, worker_id=A, now=1.0, epoch=1)
        assert held is not None
        cluster.write(held)
        assert dispatch.is_offered(key)
        dispatch.on_no_offer(key, task.task)
    assert not dispatch.is_offered(key)
    assert dispatch.shares.used(OURS).milli_cpus == 3_000
    assert not dispatch.has_quota(position_of(job), need, 3)
