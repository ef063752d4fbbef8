"""What jobs return, as users meet it."""

import asyncio
import functools
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster import WorkerPool, deploy
from fluster.cluster import AsyncCluster, LocalCluster
from fluster.errors import (
    ActorNameTakenError,
    JobFailedError,
    JobNotFoundError,
    JobResultError,
    JobTimeoutError,
    RemoteError,
)
from fluster_bus.messages import JobId, JobStatus
from fluster_services.worker.task import task_result
from tests.system.daemons import PATIENT, Daemons
from tests.system.job_requests import call, command, sleeper, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60

pytestmark = pytest.mark.anyio


def test_a_result_comes_back(cluster: LocalCluster) -> None:
    def add(left: int, right: int) -> dict[str, int]:
        return {"sum": left + right}

    job_id = cluster.launch(call(add, 40, 2))
    assert cluster.result(job_id, timeout=PATIENCE_S) == {"sum": 42}
    assert cluster.result(job_id) == {"sum": 42}
    (task,) = cluster.poll(job_id).tasks
    assert task.result is not None
    assert task.result.size > 0


def test_a_coroutine_runs_to_its_end(cluster: LocalCluster) -> None:
    async def add(left: int, right: int) -> int:
        await asyncio.sleep(0)
        return left + right

    async def fail() -> None:
        raise LookupError("in the coroutine")

    job, failing = cluster.launch_many([call(add, 2, 3), call(fail)])
    assert cluster.result(job, timeout=PATIENCE_S) == 5
    with pytest.raises(LookupError, match="in the coroutine"):
        cluster.result(failing, timeout=PATIENCE_S)


def test_a_generator_is_refused_at_the_call() -> None:
    def count() -> Iterator[int]:
        yield 1

    async def count_slowly() -> AsyncIterator[int]:
        yield 1

    for generator in (count, count_slowly, functools.partial(count)):
        with pytest.raises(TypeError, match="is a generator: calling it would run none of its code"):
            call(generator)


def test_a_generator_that_only_the_task_can_see_fails_it(cluster: LocalCluster) -> None:
    job = cluster.launch(call(lambda: (number for number in range(3))))
    with pytest.raises(TypeError, match="whose code has not run"):
        cluster.result(job, timeout=PATIENCE_S)


def test_none_costs_nothing(cluster: LocalCluster) -> None:
    job_id = cluster.launch(call(print, "something"))
    assert cluster.result(job_id, timeout=PATIENCE_S) is None
    assert cluster.poll(job_id).tasks[0].result is None


def test_a_large_result_comes_whole(cluster: LocalCluster) -> None:
    def work() -> bytes:
        return bytes(range(256)) * 20_000

    assert cluster.result(cluster.launch(call(work)), timeout=PATIENCE_S) == bytes(range(256)) * 20_000


def test_a_command_has_no_result(cluster: LocalCluster) -> None:
    assert cluster.result(cluster.launch(command("true")), timeout=PATIENCE_S) is None


def test_a_class_of_the_script_travels(cluster: LocalCluster) -> None:
    def make() -> Any:
        class Point:
            def __init__(self, x: int) -> None:
                self.x = x

        return Point(3)

    assert cluster.result(cluster.launch(call(make)), timeout=PATIENCE_S).x == 3


def test_results_of_several_tasks_come_by_rank(cluster: LocalCluster) -> None:
    def rank() -> str:
        import os

        return os.environ["FLUSTER_TASK_INDEX"]

    job_id = cluster.launch(call(rank, replicas=3))
    assert cluster.result(job_id, timeout=PATIENCE_S) == ["0", "1", "2"]
    assert cluster.result(job_id, task=1) == "1"
    with pytest.raises(ValueError, match="has no task 3: it has 3"):
        cluster.result(job_id, task=3)


def test_what_the_job_raised_is_raised(cluster: LocalCluster) -> None:
    def work() -> None:
        raise KeyError("no such thing")

    job_id = cluster.launch(call(work))
    with pytest.raises(KeyError, match="no such thing") as caught:
        cluster.result(job_id, timeout=PATIENCE_S)
    (note,) = caught.value.__notes__
    assert f"raised in job {job_id}" in note
    assert "in work" in note


class Failing:
    def __init__(self, fails: bool = False) -> None:
        if fails:
            raise LookupError("remote")

    def fail(self, _item: int = 0) -> None:
        raise LookupError("remote")


def _fail(_item: int = 0) -> None:
    raise LookupError("remote")


async def _fail_later() -> None:
    _fail()


def test_tracebacks_show_the_users_frames_and_few_of_ours(cluster: LocalCluster) -> None:
    pool = deploy(cluster, Failing)
    with WorkerPool(cluster, 1) as workers:
        ways: list[Callable[[], object]] = [
            lambda: pool.call().fail(),
            lambda: pool.submit().fail().result(),
            lambda: pool.broadcast().fail().results(),
            lambda: list(pool.map().fail([1])),
            lambda: deploy(cluster, Failing, True, name="failing"),
            lambda: workers.submit(_fail).result(),
            lambda: workers.map(_fail, [1]).results(),
            lambda: list(workers.imap_unordered(_fail, [1])),
            lambda: cluster.result(cluster.launch(call(_fail))),
            lambda: cluster.result(cluster.launch(call(_fail_later))),
        ]
        for way in ways:
            with pytest.raises(LookupError, match="remote") as caught:
                way()
            ours = [entry for entry in caught.traceback if "test_results" not in str(entry.path)]
            assert len(ours) <= 4, ours
            [note] = caught.value.__notes__
            frames = [line for line in note.splitlines() if line.startswith("  File ")]
            assert frames, note
            assert all("test_results.py" in frame for frame in frames), note
    pool.shutdown()


def test_errors_of_ours_show_where_the_user_called(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def frames_of(call: Callable[[], object], error: type[Exception]) -> list[str]:
        with pytest.raises(error) as caught:
            call()
        files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
        return [file for file in files if file != __file__]

    monkeypatch.delenv("FLUSTER_DEBUG", raising=False)
    assert len(frames_of(lambda: cluster.poll(JobId("missing")), JobNotFoundError)) <= 1
    with deploy(cluster, Failing, name="taken-name", timeout=PATIENCE_S):
        again = functools.partial(deploy, cluster, Failing, name="taken-name")
        assert len(frames_of(again, ActorNameTakenError)) <= 1
    monkeypatch.setenv("FLUSTER_DEBUG", "1")
    assert len(frames_of(lambda: cluster.poll(JobId("missing")), JobNotFoundError)) > 4


def test_what_cannot_be_made_again_is_caught_by_its_own_class(cluster: LocalCluster) -> None:
    class CodedError(Exception):
        def __init__(self, code: int, text: str) -> None:
            super().__init__(f"{code}: {text}")
            self.code = code

    def fail() -> None:
        raise CodedError(7, "odd")

    with pytest.raises(RemoteError, match="7: odd") as caught:
        cluster.result(cluster.launch(call(fail)), timeout=PATIENCE_S)
    assert "CodedError" in [kind.__name__ for kind in type(caught.value).__mro__[1:]]
    assert vars(caught.value)["code"] == 7


def test_a_job_that_failed_otherwise_is_told(cluster: LocalCluster) -> None:
    with pytest.raises(JobFailedError, match="exit code 3"):
        cluster.result(cluster.launch(command("sh", "-c", "exit 3")), timeout=PATIENCE_S)

    def leave() -> None:
        raise SystemExit(4)

    with pytest.raises(JobFailedError, match="exit code 4"):
        cluster.result(cluster.launch(call(leave)), timeout=PATIENCE_S)


def test_a_task_that_succeeded_has_its_result_also_in_a_job_that_failed(cluster: LocalCluster) -> None:
    def work() -> str:
        import os

        if os.environ["FLUSTER_TASK_INDEX"] == "1":
            raise ValueError("one")
        return "well"

    job_id = cluster.launch(call(work, replicas=2, max_task_failures=1))
    with pytest.raises(ValueError, match="one"):
        cluster.result(job_id, timeout=PATIENCE_S)
    assert cluster.result(job_id, task=0) == "well"


def test_what_cannot_be_kept_is_told_and_is_no_failure(cluster: LocalCluster) -> None:
    job_id = cluster.launch(call(threading.Lock))
    with pytest.raises(JobResultError, match=r"a lock, cannot be pickled.*; return plain data"):
        cluster.result(job_id, timeout=PATIENCE_S)
    info = cluster.poll(job_id)
    assert info.status is JobStatus.SUCCEEDED
    assert any("cannot be pickled" in line.text for line in cluster.logs(job_id))


def test_a_result_that_is_very_large_is_kept_for_some_hours_and_says_so(cluster: LocalCluster) -> None:
    job_id = cluster.launch(call(bytes, task_result.MAX_RESULT_BYTES))  # and some bytes more, when pickled
    assert len(cluster.result(job_id, timeout=PATIENCE_S)) == task_result.MAX_RESULT_BYTES
    [line] = cluster.logs(job_id)
    assert "it is kept for 4 hours only" in line.text


def test_what_cannot_be_unpickled_here_says_why(cluster: LocalCluster, tmp_path: Path) -> None:
    folder = str(tmp_path)

    def work() -> Any:
        import sys
        from pathlib import Path

        Path(folder, "only_there.py").write_text("class Thing:\n    pass\n")
        sys.path.insert(0, folder)
        import only_there  # type: ignore[import-not-found]

        return only_there.Thing()

    with pytest.raises(JobResultError, match=r"cannot be unpickled here: ModuleNotFoundError: .*only_there"):
        cluster.result(cluster.launch(call(work)), timeout=PATIENCE_S)


def test_a_job_that_goes_on_has_no_result_yet(cluster: LocalCluster) -> None:
    job_id = cluster.launch(sleeper())
    with pytest.raises(JobTimeoutError):
        cluster.result(job_id, timeout=0.2)
    cluster.terminate(job_id)
    with pytest.raises(JobFailedError, match="KILLED"):
        cluster.result(job_id, timeout=PATIENCE_S)
    with pytest.raises(JobNotFoundError):
        cluster.result(JobId("nobody"))


async def test_it_is_awaited_too(cluster: LocalCluster) -> None:
    async with await AsyncCluster.connect(cluster.address) as same:
        assert await same.result(await same.launch(call(sum, [1, 2])), timeout=PATIENCE_S) == 3


def test_a_retried_job_has_the_result_of_its_last_attempt(cluster: LocalCluster) -> None:
    def work() -> int:
        import os

        attempt = int(os.environ["FLUSTER_ATTEMPT"])
        if attempt == 1:
            raise ValueError("first")
        return attempt

    assert cluster.result(cluster.launch(call(work, max_retries_failure=1, retry_backoff_s=0)), timeout=PATIENCE_S) == 2


def test_the_result_survives_the_death_of_the_worker_and_of_the_server(family: Family, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    path = str(gate)

    def work() -> bytes:
        import os
        import time

        print("ready", flush=True)
        while not os.path.exists(path):  # noqa: PTH110
            time.sleep(0.01)
        return b"x" * 1_500_000

    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        daemons.start_worker()
        with daemons.connect() as cluster:
            job_id = cluster.launch(call(work))
            wait_ready(cluster, job_id)
            daemons.kill("w1")
            gate.touch()
            wait_until(lambda: not family.named("fluster-task"), PATIENCE_S)  # it ended without a worker to report to
            daemons.restart_server()
            daemons.start_worker()
            assert cluster.result(job_id, timeout=PATIENCE_S) == b"x" * 1_500_000
            assert cluster.poll(job_id).tasks[0].attempt == 1
            daemons.restart_server()
            assert cluster.result(job_id, timeout=PATIENCE_S) == b"x" * 1_500_000


def test_a_large_callable_that_waits_for_another_job_is_still_whole(cluster: LocalCluster) -> None:
    first = cluster.launch(call(print))
    assert cluster.result(cluster.launch(call(len, b"x" * 50_000, after=(first,))), timeout=PATIENCE_S) == 50_000
