"""Wall clocks that are wrong, and that are set while everything runs: no deadline is measured by them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluster.cluster import Cluster
from fluster_bus.messages import JobId, JobStatus
from fluster_services.config import RecordLimits
from tests.system.daemons import QUICK, Daemons
from tests.system.job_requests import command, sleeper, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

HOUR_S = 3_600
PATIENCE_S = 60
NAMES = ("controller", "w1", "w2")


@pytest.fixture
def daemons(tmp_path: Path, family: Family) -> Iterator[Daemons]:
    with Daemons(tmp_path / "cluster", family, timing=QUICK) as daemons:
        for name in NAMES:
            daemons.clocks[name] = tmp_path / f"{name}.clock"
            daemons.clocks[name].write_text("0")
        yield daemons


def test_a_wall_clock_that_is_set_an_hour_off_changes_nothing(daemons: Daemons) -> None:
    daemons.set_clock("w2", -HOUR_S)  # wrong from the beginning
    daemons.start_controller()
    daemons.start_worker("w1")
    daemons.start_worker("w2")
    with daemons.connect() as client:
        held = client.launch_many([sleeper(timeout_s=HOUR_S / 2, scheduling_timeout_s=HOUR_S / 2) for _ in range(4)])
        for job_id in held:
            wait_ready(client, job_id)
        for controller_s, worker_s in ((HOUR_S, -HOUR_S), (-HOUR_S, HOUR_S)):
            daemons.set_clock("controller", controller_s)
            daemons.set_clock("w1", worker_s)
            _wait_longer_than_any_worker_may_be_silent()
            assert client.wait(client.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
        assert {status.info.worker_id for status in client.list_workers() if status.alive} == {"w1", "w2"}
        infos = [client.poll(job_id) for job_id in held]
        assert {(info.status, info.tasks[0].attempt) for info in infos} == {(JobStatus.RUNNING, 1)}
        for job_id in held:
            client.terminate(job_id)
        assert {info.status for info in client.wait(held, timeout=PATIENCE_S)} == {JobStatus.KILLED}


def test_deadlines_hold_by_clocks_that_are_set_back(daemons: Daemons) -> None:
    """What takes its time takes no hour more: the timeout of an attempt, the wait for room, the judgement of a worker."""
    daemons.start_controller()
    daemons.start_worker("w1")
    with daemons.connect() as client:
        _shifted(client, daemons)


def _shifted(client: Cluster, daemons: Daemons) -> None:
    running = client.launch(sleeper(timeout_s=5))
    wait_ready(client, running)
    for name in ("controller", "w1"):
        daemons.set_clock(name, -HOUR_S)
    assert client.wait(running, timeout=PATIENCE_S).status is JobStatus.FAILED
    lost = client.launch(sleeper(max_retries_preemption=0))
    wait_ready(client, lost)
    daemons.set_clock("controller", -2 * HOUR_S)
    daemons.kill("w1")
    info = client.wait(lost, timeout=PATIENCE_S)
    assert (info.status, info.error_message) == (JobStatus.WORKER_FAILED, "worker w1 was not heard for 3 s")
    waiting = client.launch(command("true", scheduling_timeout_s=0.5))
    assert client.wait(waiting, timeout=PATIENCE_S).status is JobStatus.UNSCHEDULABLE


def test_a_controller_that_is_started_with_a_wrong_clock_knows_how_long_a_job_has_waited(daemons: Daemons) -> None:
    daemons.start_controller()
    with daemons.connect() as client:
        waiting = client.launch(command("true", scheduling_timeout_s=HOUR_S / 2))
        impatient = client.launch(command("true", scheduling_timeout_s=12))
        launched = restarted = time.monotonic()
        for off_s in (HOUR_S, -HOUR_S, HOUR_S, -HOUR_S):
            daemons.kill("controller")
            daemons.set_clock("controller", off_s)
            restarted = time.monotonic()
            daemons.start_controller()
            assert client.poll(waiting).status is JobStatus.PENDING
        assert client.wait(impatient, timeout=PATIENCE_S).status is JobStatus.UNSCHEDULABLE
        ended = time.monotonic()
        assert ended - launched >= 12
        assert ended - restarted < 12, "not the whole time once more"
        daemons.start_worker("w1")
        assert client.wait(waiting, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED


def _wait_longer_than_any_worker_may_be_silent() -> None:
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > QUICK.worker_timeout_s + 3 * QUICK.heartbeat_s, PATIENCE_S)


def test_a_controller_whose_clock_is_days_ahead_erases_no_records(daemons: Daemons) -> None:
    limits = RecordLimits(max_finished=3, kept_at_least_s=0, sure_after_s=0, sweep_s=0.05)
    daemons.set_clock("controller", 8 * 24 * HOUR_S)  # wrong from the beginning
    daemons.start_controller(records=limits)
    daemons.start_worker("w1")
    with daemons.connect() as client:
        jobs = [_ended(client) for _ in range(3)]  # one after the other: the first has ended first
        jobs = _ended_and_swept(client, jobs)
        daemons.kill("controller")
        daemons.start_controller(records=limits)  # which finds them, and its clock is wrong as before
        jobs = _ended_and_swept(client, jobs)
        daemons.set_clock("controller", 16 * 24 * HOUR_S)  # and again while it runs
        _ended_and_swept(client, jobs)


def _ended(client: Cluster) -> JobId:
    job_id = client.launch(command("true"))
    assert client.wait(job_id, timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    return job_id


def _ended_and_swept(client: Cluster, jobs: list[JobId]) -> list[JobId]:
    """With one job more there are too many, and when the oldest has gone the others were looked at as well."""
    jobs = [*jobs, _ended(client)]
    wait_until(lambda: jobs[0] not in {info.job_id for info in client.list_jobs()}, PATIENCE_S)
    assert {info.job_id for info in client.list_jobs()} == set(jobs[1:])
    return jobs[1:]
