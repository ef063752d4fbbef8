"""What users do with a LocalCluster, with its workers as processes and as containers."""

import os
import pickle
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from fluster import (
    ActorDiedError,
    ActorPool,
    JobFailedError,
    JobStatus,
    LocalCluster,
    ResourceConfig,
    WorkerPool,
    actor,
    current_task,
    deploy,
)
from fluster_bus.payloads import arenas
from tests.system.either_cluster import CPUS, EitherCluster
from tests.system.job_requests import call, command, texts, wait_ready

PATIENCE_S = 60
FULL = ResourceConfig(cpu=CPUS, memory=256 << 20)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _pickled_by_value() -> Iterator[None]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture
def cluster(either: EitherCluster) -> LocalCluster:
    return either.cluster


# ---- with whatever workers ------------------------------------------------------------------------------------


def test_jobs_return_fail_and_tell_what_they_write(cluster: LocalCluster) -> None:
    def work(number: int) -> int:
        print("working")
        sys.stderr.write("complaining\n")
        return 2 * number

    job_id = cluster.launch(call(work, 21))
    assert cluster.result(job_id, timeout=PATIENCE_S) == 42
    assert texts(cluster, job_id) == ["working"]
    assert texts(cluster, job_id, "stderr") == ["complaining"]

    def fail() -> None:
        raise LookupError("nothing there")

    with pytest.raises(LookupError, match="nothing there"):
        cluster.result(cluster.launch(call(fail)), timeout=PATIENCE_S)
    with pytest.raises(JobFailedError):
        cluster.wait(cluster.launch(command("sh", "-c", "exit 3")), timeout=PATIENCE_S, raise_on_failure=True)


def test_many_jobs_at_once(cluster: LocalCluster) -> None:
    job_ids = cluster.launch_many([call(abs, -number) for number in range(20)])
    assert [cluster.result(job_id, timeout=PATIENCE_S) for job_id in job_ids] == list(range(20))
    assert {cluster.poll(job_id).tasks[0].worker_id for job_id in job_ids} == {"worker-0", "worker-1"}


def test_a_job_that_is_cancelled_has_its_grace(cluster: LocalCluster) -> None:
    script = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    job_id = cluster.launch(command("sh", "-c", script))
    wait_ready(cluster, job_id)
    cluster.terminate(job_id)
    assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED
    assert texts(cluster, job_id) == ["up", "saved"]


def test_all_items_are_done_though_a_process_of_the_pool_is_killed(cluster: LocalCluster) -> None:
    def square(number: int) -> int:
        return number * number

    def die_once(mark: str) -> str:
        if current_task().attempt == 1 and mark == "first":
            os.kill(os.getpid(), signal.SIGKILL)
        return mark

    with WorkerPool(cluster, 2) as pool:
        before = pool.map(square, range(200))
        dying = pool.submit(die_once, "first")
        after = pool.map(square, range(200))
        assert dying.result(PATIENCE_S) == "first"
        for result in (before, after):
            assert result.results(PATIENCE_S) == [number * number for number in range(200)]


def test_what_jobs_find_and_leave_in_a_folder_is_their_program_s(either: EitherCluster, tmp_path: Path) -> None:
    shared = either.folder()
    (shared / "given").write_text("words")

    def copy(target: Path) -> bool:
        target.parent.mkdir(mode=0o700, exist_ok=True)
        target.write_text((shared / "given").read_text())
        return tmp_path.exists()

    made = shared / "below" / "made"
    assert either.cluster.result(either.cluster.launch(call(copy, made)), timeout=PATIENCE_S) is either.is_one_machine
    assert made.read_text() == "words"
    for each in (made, made.parent):
        assert (each.stat().st_uid, each.stat().st_gid) == (os.getuid(), os.getgid())


class Block:
    """Bytes that are pickled out of band, as arrays are."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, _protocol: object) -> tuple[type, tuple[pickle.PickleBuffer]]:
        return Block, (pickle.PickleBuffer(self.data),)


@actor(resources=FULL)
class Holder:
    """Fills a worker, so that its caller is on the other."""

    def where(self) -> tuple[str | None, str]:
        return arenas.place(), current_task().worker_id

    def ends(self, block: Block) -> tuple[int, bytes]:
        return len(memoryview(block.data)), bytes(memoryview(block.data)[-2:])

    def made(self, size: int) -> Block:
        return Block(bytearray(size - 2) + b"ok")

    def die(self) -> None:
        os._exit(3)


def test_a_job_on_one_worker_calls_an_actor_on_the_other_with_whatever_it_has(either: EitherCluster) -> None:
    def use(pool: ActorPool[Holder]) -> list[Any]:
        found: list[Any] = [(arenas.place(), current_task().worker_id), pool.call().where()]
        for size in (8, 1 << 20, 64 << 20):
            found += [pool.call().ends(Block(bytearray(size - 2) + b"ok")), Holder().ends(pool.call().made(size))]
        return found

    pool = deploy(either.cluster, Holder, name="holder")
    try:
        job_id = either.cluster.launch(call(use, pool, resources=FULL))
        here, there, *rest = either.cluster.result(job_id, timeout=PATIENCE_S)
        assert {here[1], there[1]} == {"worker-0", "worker-1"}
        assert rest == [(size, b"ok") for size in (8, 8, 1 << 20, 1 << 20, 64 << 20, 64 << 20)]
        assert (here[0] == there[0]) == either.is_one_machine
        assert (there[0] == arenas.place()) == either.is_one_machine
        assert pool.call().ends(Block(bytearray(1 << 20))) == (1 << 20, b"\0\0"), "from outside"
        with pytest.raises(ActorDiedError):
            pool.call().die()
    finally:
        pool.shutdown()
