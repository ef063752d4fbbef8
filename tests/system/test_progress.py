"""How far jobs are, as users see it."""

from pathlib import Path

import pytest

from fluster import NoTaskError, current_task
from fluster.cluster import LocalCluster
from fluster_bus.messages import JobInfo, JobStatus
from tests.system.daemons import PATIENT, Daemons
from tests.system.job_requests import call
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60


def test_a_process_that_is_no_task_has_no_context() -> None:
    with pytest.raises(NoTaskError, match="not a task of a job"):
        current_task()


def test_a_task_knows_itself(cluster: LocalCluster) -> None:
    def work() -> tuple[str, int, int, int]:
        from fluster import current_task

        task = current_task()
        return task.job_id, task.task, task.num_tasks, task.attempt

    job_id = cluster.launch(call(work, replicas=2))
    assert cluster.result(job_id, timeout=PATIENCE_S) == [(job_id, 0, 2, 1), (job_id, 1, 2, 1)]


def test_progress_is_seen_while_it_runs_and_afterwards(cluster: LocalCluster, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")

    def work() -> None:
        import os
        import time

        from fluster import current_task

        current_task().progress(0.25, "a quarter")
        while not os.path.exists(gate):  # noqa: PTH110
            time.sleep(0.01)
        current_task().progress(0.75, "nearly")

    job_id = cluster.launch(call(work))
    info = wait_until(lambda: found if (found := cluster.poll(job_id)).progress is not None else None, PATIENCE_S)
    assert info is not None
    assert (info.progress, info.progress_message) == (0.25, "a quarter")
    assert cluster.list_jobs(limit=1)[0].progress == 0.25
    Path(gate).touch()
    info = cluster.wait(job_id, timeout=PATIENCE_S)
    assert info.tasks[0].progress is not None
    assert (info.tasks[0].progress.fraction, info.progress_message) == (0.75, "nearly")
    assert info.progress == 1.0  # it succeeded


def test_the_last_word_of_very_many_is_kept(cluster: LocalCluster) -> None:
    def work() -> None:
        from fluster import current_task

        for number in range(20_000):
            current_task().progress(number / 20_000, f"step {number}")
        raise ValueError("enough")

    info = cluster.wait(cluster.launch(call(work)), timeout=PATIENCE_S)
    assert info.status is JobStatus.FAILED
    assert (info.progress, info.progress_message) == (19_999 / 20_000, "step 19999")


def test_a_job_is_watched_to_its_end(cluster: LocalCluster) -> None:
    def work() -> None:
        import time

        from fluster import current_task

        for number in range(1, 4):
            current_task().progress(number / 4)
            time.sleep(0.4)  # so long a progress stays: what comes sooner after another is left out

    job_id = cluster.launch(call(work))
    seen: list[JobInfo] = list(cluster.watch(job_id))
    assert seen[-1].status is JobStatus.SUCCEEDED
    assert [info.status for info in seen[:-1]].count(JobStatus.SUCCEEDED) == 0
    told = [info.progress for info in seen if info.progress is not None]
    assert told == sorted(told)
    assert 0.5 in told
    assert list(cluster.watch(job_id)) == [seen[-1]]


def test_a_wrong_fraction_is_the_jobs_own_error(cluster: LocalCluster) -> None:
    def work() -> None:
        from fluster import current_task

        current_task().progress(50, "per cent")

    with pytest.raises(ValueError, match="fraction=50 is not between 0 and 1"):
        cluster.result(cluster.launch(call(work)), timeout=PATIENCE_S)


def test_it_is_known_again_after_the_controller_and_the_worker_were_killed(family: Family, tmp_path: Path) -> None:
    def work() -> None:
        import time

        from fluster import current_task

        current_task().progress(0.5, "half")
        time.sleep(600)

    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        daemons.start_worker()
        with daemons.connect() as cluster:
            job_id = cluster.launch(call(work))
            wait_until(lambda: cluster.poll(job_id).progress == 0.5, PATIENCE_S)
            daemons.kill("controller")
            daemons.start_controller()
            wait_until(lambda: cluster.poll(job_id).progress == 0.5, PATIENCE_S)  # the worker tells it again
            daemons.kill("w1")
            daemons.kill("controller")
            daemons.start_controller()
            daemons.start_worker()
            wait_until(lambda: cluster.poll(job_id).progress == 0.5, PATIENCE_S)  # its keeper tells the next one
            cluster.terminate(job_id)
            cluster.wait(job_id, timeout=PATIENCE_S)
