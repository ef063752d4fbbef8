"""What is said of a job that waits for the turn, or the quota, of its namespace, and what ends a reservation there."""

from __future__ import annotations

import pytest

from fluster_bus.messages import Capacity, JobId, JobRecord, Namespace, TaskRecord
from fluster_bus.messages.namespaces import NamespaceQuota, NamespaceRecord
from fluster_services.capacity import needed
from fluster_services.controller.scheduling.order import Position, Starving, position_in_line
from fluster_services.controller.state.job_index import JobKey
from tests.pure.controller.test_dispatch import GIB, A, B, Cluster
from tests.pure.controller.test_kept_free import Overtaken
from tests.pure.recorded import registered_worker

OURS, THEIRS = Namespace("default"), Namespace("other")


class Tenants(Cluster):
    """Two workers of 4 CPUs that serve two namespaces; ours has a whole one."""

    def __init__(self) -> None:
        super().__init__()
        total = Capacity(cpu=4, memory=64 * GIB, namespaces=(OURS, THEIRS))
        for worker_id in (A, B):
            self.worker_index.on_registered(registered_worker(worker_id, total), now=0.0)
            self.worker_index.on_beat(worker_id, now=0.0, free=total)
        self.held = self.claim(self.submit("held", 4), A)

    def job(self, task: TaskRecord) -> JobRecord:
        entry = self.job_index.get(JobKey(task.namespace, JobId(task.job_id)))
        assert entry is not None
        assert entry.job is not None
        return entry.job.value

    def who_goes_first(self, task: TaskRecord) -> str | None:
        return self.dispatch.who_goes_first(self.job(task))

    def why_short(self, task: TaskRecord) -> str | None:
        return self.dispatch.why_short(self.job(task))


def test_who_has_more_is_told_who_goes_first_and_by_what() -> None:
    cluster = Tenants()
    ours = cluster.submit("ours", 1)
    assert cluster.who_goes_first(ours) is None, "no other namespace has anything that waits"
    theirs = cluster.submit("theirs", 1, namespace=THEIRS)
    told = "namespace other goes first: it holds 0 % of the cluster, default 50 %, equal weights"
    assert cluster.who_goes_first(ours) == told
    assert cluster.who_goes_first(theirs) is None
    cluster.dispatch.on_namespace(NamespaceRecord(name=OURS, quota=NamespaceQuota(max_priority=5)))
    first = cluster.submit("first", 1, priority=9)
    assert cluster.who_goes_first(theirs) == "namespace default goes first: its tasks have a higher priority"
    assert cluster.who_goes_first(first) is None
    assert cluster.taken() == ["first", "theirs", "ours"]
    assert cluster.who_goes_first(ours) is None, "nothing of another namespace is left in a line"


def test_of_several_namespaces_that_go_first_the_first_is_named() -> None:
    cluster, third = Tenants(), Namespace("third")
    ours = cluster.submit("ours", 1)
    cluster.claim(cluster.submit("held-by-third", 2, namespace=third), B)
    cluster.submit("thirds", 1, namespace=third)
    cluster.submit("theirs", 1, namespace=THEIRS)
    told = "namespace other goes first: it holds 0 % of the cluster, default 50 %, equal weights"
    assert cluster.who_goes_first(ours) == told


def test_what_waits_for_its_quota_is_told_so_until_there_is_room_in_it() -> None:
    cluster = Tenants()
    ours, theirs = cluster.submit("ours", 1), cluster.submit("theirs", 1, namespace=THEIRS)
    assert cluster.why_short(ours) is None
    cluster.dispatch.on_namespace(NamespaceRecord(name=OURS, quota=NamespaceQuota(cpus=5)))
    assert cluster.why_short(ours) is None
    cluster.dispatch.on_namespace(NamespaceRecord(name=OURS, quota=NamespaceQuota(cpus=4)))
    assert cluster.why_short(ours) == "waits for the quota of namespace default: 4 of 4 CPUs are used"
    assert cluster.why_short(theirs) is None
    assert cluster.taken() == ["theirs"]
    cluster.end(cluster.held)
    assert cluster.why_short(ours) is None
    assert cluster.taken() == ["ours"]


def test_what_the_quota_is_kept_for_is_not_told_that_it_waits_for_itself() -> None:
    cluster = Tenants()
    cluster.dispatch.on_namespace(NamespaceRecord(name=OURS, quota=NamespaceQuota(cpus=5)))
    large, small = cluster.submit("large", 4), cluster.submit("small", 2)
    first = Position(position_in_line(large.order, 0), 0, JobKey(OURS, large.job_id))
    cluster.dispatch.scheduler.order.keep_quota(Starving(first, needed(large.resources, OURS)))
    cluster.end(cluster.held)
    assert cluster.why_short(large) is None
    assert cluster.why_short(small) == (
        "waits for the quota of namespace default: job large, which others have overtaken for long, goes first"
    )


def test_no_worker_is_kept_free_for_what_has_no_room_in_its_quota() -> None:
    cluster = Overtaken()
    cluster.time = 30
    cluster.find_nobody()
    assert cluster.kept_free() == (A,)
    rooms = cluster.rooms
    cluster.dispatch.on_namespace(NamespaceRecord(name=OURS, quota=NamespaceQuota(cpus=4)))
    cluster.taken()
    assert cluster.kept_free() is None
    assert cluster.rooms > rooms


# ---- quotas of which a part is kept ---------------------------------------------------------------------


def _kept_for(cluster: Cluster) -> str | None:
    kept = cluster.dispatch.scheduler.order.kept_quota(OURS)
    return kept.job.job_id if kept is not None else None


def test_room_in_a_quota_is_kept_for_what_others_of_its_namespace_have_overtaken_for_too_long() -> None:
    cluster = Overtaken(quota=5)
    cluster.time = 29
    cluster.submit("behind", 1)
    assert cluster.taken() == ["behind"]
    assert _kept_for(cluster) is None
    cluster.time = 31
    cluster.submit("later", 0.5)
    assert cluster.taken() == [], "all that comes free in the quota is for the large one"
    assert _kept_for(cluster) == "large"
    assert cluster.kept_free() is None, "a worker is kept free once the quota has room"


@pytest.mark.parametrize(("large", "quota"), [(4, 3.5), (40, 41)], ids=["it never has room", "no worker has"])
def test_nothing_of_a_quota_is_kept_where_that_helps_nothing(large: float, quota: float) -> None:
    cluster = Overtaken(large, quota=quota)
    for cluster.time in (31, 62):
        cluster.taken()
        assert _kept_for(cluster) is None


def test_the_quota_is_kept_for_the_first_of_those_that_were_overtaken() -> None:
    cluster = Overtaken(quota=5)
    cluster.time = 31
    cluster.taken()
    assert _kept_for(cluster) == "large"
    cluster.submit("earlier", 3.5, priority=1)
    cluster.overtake("behind_that_alone", priority=1)
    cluster.time = 62
    cluster.taken()
    assert _kept_for(cluster) == "earlier"
