"""Workers that are kept free for a task that others have overtaken for too long: when, which, and until when."""

from __future__ import annotations

import pytest

from fluster_bus.messages import Capacity, Namespace, OfferReply, WorkerId
from fluster_bus.messages.namespaces import NamespaceQuota, NamespaceRecord
from fluster_services.controller.scheduling.order import Position
from fluster_services.controller.state.job_index import JobKey
from tests.pure.controller.test_dispatch import ON_CLASS, A, B, Cluster
from tests.pure.recorded import registered_worker

GIB = 1 << 30


class Overtaken(Cluster):
    """On A 3 of 4 CPUs are free, on B 2; a task that needs 4 found no worker, and a small one behind it did."""

    def __init__(self, large: float = 4, *, quota: float | None = None) -> None:
        super().__init__()
        self.rooms = 0  # how often gangs heard that they may find room
        self.tick_s = 0.0  # by which the clock goes on whenever it is read
        if quota is not None:
            name = Namespace("default")
            self.dispatch.on_namespace(NamespaceRecord(name=name, quota=NamespaceQuota(cpus=quota)))
        self.claim(self.submit("on_a", 1), A)
        self.on_b = self.claim(self.submit("on_b", 2), B)
        self.large = self.submit("large", large)
        self.find_nobody()
        self.overtake("small")

    def now(self) -> float:
        self.time += self.tick_s
        return self.time

    def on_room(self) -> None:
        self.rooms += 1

    def overtake(self, name: str, *, priority: int = 0) -> None:
        small = self.submit(name, 0.5, priority=priority)
        (ask, *_) = self.offer(OfferReply(worker_id=B, accepted=True))
        assert ask.offer.job_id == name
        self.claim(small, B)

    def register(self, worker_id: WorkerId, *, draining: bool = False) -> None:
        total = Capacity(cpu=4, memory=64 * GIB, namespaces=(Namespace("default"),))
        self.worker_index.on_registered(registered_worker(worker_id, total, draining=draining), now=self.time)

    def kept_free(self) -> tuple[WorkerId, ...] | None:
        found = self.dispatch.reservation
        return found[1] if found is not None else None


@pytest.fixture
def cluster() -> Overtaken:
    return Overtaken()


def test_it_is_the_worker_that_lacks_least_and_not_before_the_time(cluster: Overtaken) -> None:
    cluster.time = 29.9
    assert cluster.taken() == []
    assert cluster.dispatch.reservation is None
    cluster.time = 30
    rooms = cluster.rooms
    assert cluster.taken() == [], "it has no more room by that than before"
    key = JobKey(Namespace("default"), cluster.large.job_id)
    assert cluster.dispatch.reservation == (key, (A,))
    assert cluster.rooms == rooms + 1, "gangs may have been kept from workers until then"


def test_as_long_as_it_stands_nothing_is_offered_anew_for_it(cluster: Overtaken) -> None:
    cluster.time = 30
    cluster.find_nobody()
    rooms = cluster.rooms
    for _ in range(3):
        cluster.time += 30
        assert cluster.taken() == []
    assert (cluster.kept_free(), cluster.rooms) == ((A,), rooms)


def test_a_worker_that_lacks_what_the_job_names_is_not_kept_free_for_it() -> None:
    cluster = Overtaken(large=3)
    cluster.dispatch.on_room()
    cluster.offer(OfferReply(worker_id=A, accepted=False, unfit=True, reason="no folder"))
    ((position, need),) = cluster.dispatch.take()
    assert list(cluster.dispatch.offer(position, need)) == [], "B is full"
    cluster.time = 5
    cluster.overtake("another")
    cluster.time = 35
    cluster.taken()
    assert cluster.kept_free() == (B,)


def test_it_is_asked_by_name_before_the_records_say_that_it_has_room() -> None:
    cluster = Overtaken(large=3.5)
    cluster.time = 30
    cluster.taken()
    cluster.dispatch.on_room()
    asks = cluster.offer(None, OfferReply(worker_id=A, accepted=True))
    assert [ask.subject for ask in asks] == [
        "fluster.default.dispatch.cpu.none.0.c4000m.m1024",
        "fluster.sys.workers.a.offer",
    ]


def test_others_are_not_asked_by_the_name_of_what_is_kept_free(cluster: Overtaken) -> None:
    cluster.time = 30
    cluster.find_nobody()
    cluster.submit("behind", 1.5)
    kept_free = OfferReply(worker_id=A, accepted=False, spared=True)
    asks = cluster.offer(*[kept_free] * 3, None)
    assert [ask.subject for ask in asks[3:]] == ["fluster.sys.workers.b.offer"]


def test_it_passes_to_another_where_its_worker_is_about_to_leave(cluster: Overtaken) -> None:
    cluster.time = 30
    cluster.find_nobody()
    cluster.register(A, draining=True)
    rooms = cluster.rooms
    assert cluster.taken() == ["large"]
    assert cluster.kept_free() == (B,)
    assert cluster.rooms == rooms + 2


def test_of_several_workers_each_has_to_take_work() -> None:
    cluster = Overtaken()
    gang = Position(0, 0, JobKey(Namespace("default"), cluster.large.job_id))
    cluster.dispatch.remove_gang(gang.job)
    cluster.dispatch.add_gang(gang, Capacity(cpu=3, namespaces=(Namespace("default"),)), 2)
    cluster.overtake("another")
    cluster.time = 30
    cluster.taken()
    assert cluster.kept_free() == (A, B)
    cluster.register(B, draining=True)
    cluster.taken()
    assert cluster.kept_free() == (A,), "for the task: without B there is no room for the gang"


def test_what_was_overtaken_earlier_in_the_order_takes_it_over(cluster: Overtaken) -> None:
    cluster.time = 30
    cluster.find_nobody()
    earlier = cluster.submit("earlier", 4, priority=1)
    cluster.time = 60
    cluster.taken()
    assert cluster.dispatch.reservation == (JobKey(Namespace("default"), earlier.job_id), (A,))


def test_it_ends_with_the_task_and_gangs_are_told(cluster: Overtaken) -> None:
    cluster.time = 30
    cluster.find_nobody()
    other = cluster.submit("other", 0.5)
    rooms = cluster.rooms
    cluster.claim(other, B)
    assert (cluster.kept_free(), cluster.rooms) == ((A,), rooms), "of another task nothing follows"
    cluster.claim(cluster.large, A)
    assert (cluster.kept_free(), cluster.rooms) == (None, rooms + 1)


def test_once_it_is_over_a_worker_that_leaves_is_no_room(cluster: Overtaken) -> None:
    cluster.time = 30
    cluster.find_nobody()
    cluster.claim(cluster.large, A)
    cluster.submit("waits", 4)
    assert cluster.find_nobody() == ["waits"]
    cluster.register(A, draining=True)
    assert cluster.taken() == []


def test_a_choice_that_takes_long_is_made_seldom(cluster: Overtaken) -> None:
    cluster.register(A, draining=True)
    cluster.register(B, draining=True)
    cluster.time, cluster.tick_s = 30, 1.0
    cluster.taken()  # there are no workers to choose; this takes a second or two
    cluster.tick_s = 0.0
    began_at = cluster.time
    cluster.register(A)
    cluster.time = began_at + 15
    cluster.taken()
    assert cluster.kept_free() is None
    cluster.time = began_at + 45
    cluster.taken()
    assert cluster.kept_free() == (A,)


def test_what_is_on_a_level_is_offered_to_its_class_also_where_a_worker_is_kept_free_for_it(cluster: Overtaken) -> None:
    cluster.time = 30
    cluster.taken()
    cluster.dispatch.on_room()
    assert [ask.subject for ask in cluster.offer(OfferReply(worker_id=A, accepted=True))] == [ON_CLASS]
