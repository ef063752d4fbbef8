"""Who has room, found without a look at each worker: whatever happens, the same as a look at each would find."""

import random

import pytest

from fluster_bus.messages import (
    Capacity,
    JobStatus,
    Namespace,
    TaskRecord,
    WorkerId,
    WorkerInfo,
)
from fluster_bus.storage.tables import Row
from fluster_services import capacity, job_lifecycle, lifecycle
from fluster_services.controller.state.first_fit import FirstFit
from fluster_services.controller.state.job_index import JobIndex, record_key
from fluster_services.controller.state.liveness import Liveness
from fluster_services.controller.state.worker_index import WorkerIndex
from tests.pure.recorded import recorded_job, registered_worker

NAMESPACE = Namespace("default")


def _capacity(dice: random.Random) -> Capacity:
    zone = (f"zone={dice.choice('ab')}",) if dice.random() < 0.5 else ()
    free = Capacity(
        cpu=dice.randrange(5),
        memory=dice.randrange(5),
        disk=dice.randrange(3),
        tasks=dice.choice((None, 0, 1, 2)),
        labels=zone,
        resources=(("license", float(dice.randrange(1, 4))),) if dice.random() < 0.3 else (),
    )
    if dice.random() < 0.7:
        return free
    gpus = {"device": "gpu", "variant": dice.choice(("h100", "a100")), "devices": dice.randrange(1, 5)}
    return free.model_copy(update=gpus)


@pytest.mark.parametrize("seed", range(20))
def test_a_search_finds_just_those_with_room(seed: int) -> None:
    dice = random.Random(seed)
    room, free = FirstFit(), dict[WorkerId, Capacity]()
    for _ in range(300):
        worker_id = WorkerId(f"w{dice.randrange(2 + 2 * seed)}")
        if dice.random() < 0.3:
            room.remove(worker_id)
            free.pop(worker_id, None)
        else:
            free[worker_id] = _capacity(dice)
            room.put(worker_id, free[worker_id])
        need = _capacity(dice)
        found = list(room.with_room(need))
        assert dict(found) == {each: left for each, left in free.items() if capacity.fits(need, left)}
        assert len(dict(found)) == len(found)


def test_a_search_sees_what_changes_before_it() -> None:
    room, need = FirstFit(), Capacity(cpu=1)
    for each in "abc":
        room.put(WorkerId(each), Capacity(cpu=1))
    search = room.with_room(need)
    first = next(search)[0]
    later = [worker_id for worker_id, _ in room.with_room(need) if worker_id != first]
    room.put(later[0], Capacity())
    assert [worker_id for worker_id, _ in search] == later[1:]


def _info(
    worker_id: str, *, draining: bool = False, trouble: str = "", tasks: int | None = None, detecting: bool = False
) -> WorkerInfo:
    total = Capacity(cpu=4, memory=4 << 30, tasks=tasks)
    return registered_worker(WorkerId(worker_id), total, draining=draining, trouble=trouble, detecting=detecting)


class Cluster:
    def __init__(self) -> None:
        self.job_index = JobIndex()
        self.worker_index = WorkerIndex(self.job_index, Liveness(10.0))
        self._revision = 0

    def apply(self, record: TaskRecord) -> None:
        self._revision += 1
        self.job_index.apply(Row(record_key(record), record, self._revision))

    def free(self, need: Capacity | None = None) -> dict[WorkerId, float]:
        return {worker_id: free.cpu for worker_id, free in self.worker_index.with_room(need or Capacity())}


def _task(cpu: float) -> TaskRecord:
    (task,) = job_lifecycle.new_tasks(recorded_job(cpu=cpu, memory=1 << 30))
    return task


def test_what_a_worker_has_left_follows_the_records() -> None:
    cluster = Cluster()
    a, b = WorkerId("a"), WorkerId("b")
    cluster.worker_index.on_registered(_info("a"), now=0.0)
    cluster.worker_index.on_registered(_info("b"), now=0.0)
    assert cluster.free() == {a: 4, b: 4}
    held = lifecycle.claim(_task(3), attempt=1, worker_id=a, now=0.0)
    assert held is not None
    cluster.apply(held)
    assert cluster.free() == {a: 1, b: 4}
    assert cluster.free(Capacity(cpu=2)) == {b: 4}
    assert [(view.name, view.free.cpu, view.jobs) for view in cluster.worker_index.views()] == [
        ("a", 1, ("job",)),
        ("b", 4, ()),
    ]
    ended = lifecycle.end(held, attempt=1, worker_id=a, now=1.0, state=JobStatus.SUCCEEDED, reason="")
    assert ended is not None
    cluster.apply(ended)
    assert cluster.free() == {a: 4, b: 4}


def test_one_that_has_as_many_tasks_as_it_may_has_no_room() -> None:
    cluster, a, small = Cluster(), WorkerId("a"), _task(0)
    cluster.worker_index.on_registered(_info("a", tasks=1), now=0.0)
    need = capacity.needed(small.resources)
    assert list(cluster.free(need)) == [a]
    held = lifecycle.claim(small, attempt=1, worker_id=a, now=0.0)
    assert held is not None
    cluster.apply(held)
    assert list(cluster.free(need)) == []
    ended = lifecycle.end(held, attempt=1, worker_id=a, now=1.0, state=JobStatus.SUCCEEDED, reason="")
    assert ended is not None
    cluster.apply(ended)
    assert list(cluster.free(need)) == [a]


def test_only_those_that_live_and_take_work_have_room() -> None:
    cluster = Cluster()
    a, b = WorkerId("a"), WorkerId("b")
    cluster.worker_index.on_registered(_info("a"), now=0.0)
    cluster.worker_index.on_registered(_info("b"), now=0.0)
    cluster.worker_index.on_beat(b, now=8.0, free=Capacity(cpu=4))
    assert cluster.worker_index.take_lost(now=11.0) == [a]
    assert cluster.free() == {b: 4}
    assert cluster.worker_index.dead() == [a]
    assert cluster.worker_index.on_beat(a, now=12.0, free=Capacity(cpu=4))
    assert cluster.free() == {a: 4, b: 4}
    cluster.worker_index.on_registered(_info("b", draining=True), now=12.0)
    assert cluster.free() == {a: 4}
    cluster.worker_index.on_left(a)
    assert cluster.free() == {}
    assert cluster.worker_index.views() == []


def test_one_that_is_not_well_has_no_room_and_is_still_counted_on() -> None:
    cluster, a = Cluster(), WorkerId("a")
    cluster.worker_index.on_registered(_info("a", trouble="its disk has no room"), now=0.0)
    assert cluster.free() == {}
    assert cluster.worker_index.troubles() == [(a, "its disk has no room")]
    assert [worker_id for worker_id, _ in cluster.worker_index.totals()] == [a]  # so what fits it is not a misfit
    cluster.worker_index.on_registered(_info("a"), now=1.0)
    assert cluster.free() == {a: 4}
    assert cluster.worker_index.troubles() == []


def test_one_that_is_lost_is_in_no_trouble_that_passes() -> None:
    cluster, a = Cluster(), WorkerId("a")
    cluster.worker_index.on_registered(_info("a", trouble="its disk has no room"), now=0.0)
    assert cluster.worker_index.take_lost(now=11.0) == [a]
    assert cluster.worker_index.troubles() == []


def test_only_what_no_worker_could_ever_cover_is_a_misfit() -> None:
    cluster, small, large = Cluster(), Capacity(cpu=1), Capacity(cpu=8)
    gpu = Capacity(cpu=1, device="gpu", variant="h100", devices=1)
    cluster.worker_index.note_misfits([large], now=0.0)
    assert cluster.worker_index.misfits == {}, "workers may be about to register"
    cluster.worker_index.on_registered(_info("a", detecting=True), now=1.0)
    cluster.worker_index.on_registered(_info("b"), now=1.0)
    cluster.worker_index.note_misfits([small, large, gpu], now=2.0)
    assert cluster.worker_index.misfits == {large: 2.0}, "a worker that still looks for its GPUs may have some"
    cluster.worker_index.on_registered(_info("a"), now=3.0)
    cluster.worker_index.note_misfits([small, large, gpu], now=4.0)
    assert cluster.worker_index.misfits == {large: 2.0, gpu: 4.0}
    elsewhere = small.model_copy(update={"elsewhere": (WorkerId("a"),)})
    nowhere = small.model_copy(update={"elsewhere": (WorkerId("a"), WorkerId("b"))})
    cluster.worker_index.note_misfits([small, elsewhere, nowhere], now=5.0)
    assert cluster.worker_index.misfits == {nowhere: 5.0}


def test_what_a_lost_worker_held_is_lost_but_not_what_has_ended_there() -> None:
    cluster, a, b = Cluster(), WorkerId("a"), WorkerId("b")
    for job, worker_id in (("lost", a), ("ended", a), ("elsewhere", b)):
        (task,) = job_lifecycle.new_tasks(recorded_job(job))
        held = lifecycle.claim(task, attempt=1, worker_id=worker_id, now=0.0)
        assert held is not None
        cluster.apply(held)
        if job == "ended":
            ended = lifecycle.end(held, attempt=1, worker_id=a, now=1.0, state=JobStatus.SUCCEEDED, reason="")
            assert ended is not None
            cluster.apply(ended)
    ((record, revision),) = cluster.worker_index.lost_tasks(a, now=2.0, reason="it is silent")
    assert (record.job_id, record.state, revision) == ("lost", JobStatus.WORKER_FAILED, 1)


def test_who_left_is_not_waited_for_whatever_becomes_of_what_it_held() -> None:
    cluster, a = Cluster(), WorkerId("a")
    cluster.worker_index.on_registered(_info("a"), now=0.0)
    held = lifecycle.claim(_task(3), attempt=1, worker_id=a, now=0.0)
    assert held is not None
    cluster.apply(held)
    cluster.worker_index.on_left(a)
    cluster.worker_index.liveness.expect(a, now=1.0)  # as when its record asks for its end
    assert cluster.worker_index.dead() == [a]
    assert cluster.worker_index.take_lost(now=100.0) == []
    cluster.worker_index.on_registered(_info("a"), now=101.0)  # it is back
    assert cluster.worker_index.dead() == []
    assert cluster.worker_index.take_lost(now=111.0) == [a]


def test_what_all_have_together_follows_each_that_comes_changes_and_leaves() -> None:
    worker_index = WorkerIndex(JobIndex(), Liveness(1e9))

    def cpus_with(worker_id: str, cpu: float, *, draining: bool = False) -> float:
        total = Capacity(cpu=cpu, memory=int(cpu) << 30)
        worker_index.on_registered(registered_worker(WorkerId(worker_id), total, draining=draining), now=0.0)
        worker_index.on_beat(WorkerId(worker_id), now=0.0, free=total)
        assert worker_index.total().memory == worker_index.total().milli_cpus / 1000 * (1 << 30)
        return worker_index.total().milli_cpus / 1000

    assert cpus_with("a", 4) == 4
    assert cpus_with("b", 2) == 6
    assert cpus_with("a", 8) == 10
    assert cpus_with("a", 8) == 10
    assert cpus_with("b", 2, draining=True) == 8
    worker_index.on_left(WorkerId("a"))
    assert worker_index.total().milli_cpus == 0
