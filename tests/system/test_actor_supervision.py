"""Actors whose processes die, and come back: real processes, real signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fluster import (
    ActorContext,
    ActorDiedError,
    ActorFailedError,
    ActorPool,
    JobStatus,
    LocalCluster,
    actor,
    deploy,
    method,
)
from fluster.actors import MemberState
from fluster.cluster import Cluster
from fluster_bus.core.names import unique_name
from fluster_bus.messages import WorkerId
from tests.system.daemons import PATIENT, QUICK, Daemons
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60.0


@actor(max_restarts=2, restart_window=60)
class Phoenix:
    """Writes down what happens to it."""

    def __init__(self, journal: str, start: list[int]) -> None:
        self.journal = journal
        self.count = start.pop()  # each instance gets arguments of its own

    def on_start(self) -> None:
        self.note("started")

    async def on_stop(self) -> None:
        self.note("stopped")

    def on_failure(self, error: Exception) -> None:
        self.note(f"failed: {error}")

    def note(self, line: str) -> None:
        with Path(self.journal).open("a") as file:
            file.write(f"{line}\n")

    def add(self) -> int:
        self.count += 1
        return self.count

    @method(retries=10)
    def pid(self) -> int:
        return os.getpid()

    @method(retries=10)
    def attempt(self, ctx: ActorContext) -> int:
        return ctx.attempt

    def sleep(self, entered: str) -> None:
        Path(entered).touch()
        time.sleep(PATIENCE_S)

    @method(retries=10)
    def sleep_once(self, entered: str) -> str:
        if Path(entered).exists():
            return "run again"
        self.sleep(entered)
        return "slept"

    def fail(self) -> None:
        raise ActorFailedError("of no use")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def phoenix(cluster: LocalCluster, journal: Path) -> Iterator[ActorPool[Phoenix]]:
    pool = deploy(cluster, Phoenix, str(journal), [0], name=unique_name("phoenix"))
    yield pool
    pool.shutdown()


def lines(journal: Path) -> list[str]:
    return journal.read_text().splitlines()


def kill(pool: ActorPool[Phoenix]) -> None:
    os.kill(pool.call().pid(), signal.SIGKILL)


def test_a_killed_process_is_replaced_and_what_may_be_repeated_is(
    phoenix: ActorPool[Phoenix], tmp_path: Path, journal: Path
) -> None:
    entered, entered_once = tmp_path / "entered", tmp_path / "entered-once"
    pid = phoenix.call().pid()
    assert phoenix.call().add() == 1
    repeated, once = phoenix.submit().sleep_once(str(entered_once)), phoenix.submit().sleep(str(entered))
    wait_until(entered_once.exists, PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match="may have run"):
        once.result(PATIENCE_S)
    assert repeated.result(PATIENCE_S) == "run again"
    assert phoenix.call().pid() != pid
    assert phoenix.call().add() == 1
    assert phoenix.size == 1
    (member,) = phoenix.members()
    assert (member.state, member.restarts, member.attempt) == (MemberState.READY, 1, 2)
    assert "SIGKILL" in member.last_error
    assert lines(journal) == ["started", "started"]


def test_one_that_dies_too_often_is_given_up(phoenix: ActorPool[Phoenix], cluster: LocalCluster) -> None:
    for _ in range(3):
        kill(phoenix)
    assert phoenix.job_id is not None
    info = cluster.wait(phoenix.job_id, timeout=PATIENCE_S)
    assert (info.status, info.tasks[0].attempt) == (JobStatus.FAILED, 3)
    with pytest.raises(ActorDiedError, match=r"its actor has died: task 0 is FAILED: .*SIGKILL"):
        phoenix.call().add()
    (member,) = phoenix.members()
    assert (member.state, member.restarts, member.task) == (MemberState.DEAD, 2, 0)
    assert "SIGKILL" in member.last_error
    assert phoenix.size == 0


def test_one_that_fails_is_made_anew_in_its_process_until_that_is_too_often(
    phoenix: ActorPool[Phoenix], cluster: LocalCluster, journal: Path
) -> None:
    pid = phoenix.call().pid()
    for _ in range(2):
        with pytest.raises(ActorFailedError, match="of no use"):
            phoenix.call().fail()
        assert (phoenix.call().add(), phoenix.call().pid()) == (1, pid)
    (member,) = wait_until(lambda: [each for each in phoenix.members() if each.restarts == 2])
    assert (member.state, member.last_error) == (MemberState.READY, "fluster.errors.ActorFailedError: of no use")
    with pytest.raises(ActorFailedError):
        phoenix.call().fail()
    assert phoenix.job_id is not None
    info = cluster.wait(phoenix.job_id, timeout=PATIENCE_S)
    assert (info.status, info.tasks[0].attempt) == (JobStatus.FAILED, 1)  # it does not come back
    assert "was given up: it failed after 2 restarts within 60 s" in info.error_message
    with pytest.raises(ActorDiedError, match="was given up: it failed after 2 restarts within 60 s"):
        phoenix.call().add()
    assert lines(journal) == ["started", *["failed: of no use", "started"] * 2, "failed: of no use"]


def test_a_shutdown_runs_on_stop_also_when_calls_do_not_end_within_the_grace(
    phoenix: ActorPool[Phoenix], tmp_path: Path, journal: Path
) -> None:
    entered = tmp_path / "entered"
    out = phoenix.submit().sleep(str(entered))
    wait_until(entered.exists, PATIENCE_S)
    phoenix.shutdown()
    assert isinstance(out.exception(PATIENCE_S), Exception)
    assert lines(journal) == ["started", "stopped"]


def test_what_on_start_raises_is_raised_by_deploy(cluster: LocalCluster) -> None:
    @actor(max_restarts=3)
    class Unwilling:
        async def on_start(self) -> None:
            raise ValueError("not today")

        def nothing(self) -> None: ...

    name = unique_name("unwilling")
    with pytest.raises(ValueError, match="not today"):
        deploy(cluster, Unwilling, name=name)
    assert cluster.lookup_endpoints(name) == []


def test_while_one_comes_back_the_others_are_called(cluster: LocalCluster, journal: Path) -> None:
    pool = deploy(cluster, Phoenix, str(journal), [0], name=unique_name("flock"), replicas=3)
    pids = pool.broadcast().pid().results()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: pool.size == 2)
    assert {pool.call().pid() for _ in range(6)} <= set(pool.broadcast().pid().results())
    states = {member.task: member.state for member in pool.members()}
    assert sorted(states) == [0, 1, 2]
    assert set(states.values()) <= {MemberState.READY, MemberState.RESTARTING}
    pool.wait_for_size(3)
    assert {member.state for member in pool.members()} == {MemberState.READY}
    assert sorted(member.restarts for member in pool.members()) == [0, 0, 1]
    assert len(set(pool.broadcast().pid().results()) - set(pids)) == 1
    pool.shutdown()


def test_a_drained_workers_actor_stops_and_starts_elsewhere_at_no_cost(
    tmp_path: Path, family: Family, journal: Path
) -> None:
    class Mover:  # local, so that no process has to import this module; max_restarts is 0
        def __init__(self, journal: str) -> None:
            self.journal = journal

        def on_stop(self) -> None:
            with Path(self.journal).open("a") as file:
                file.write("stopped\n")

        @method(retries=20)
        def where(self, ctx: ActorContext) -> tuple[str | None, int]:
            return ctx.worker_id, ctx.attempt

    with Daemons(tmp_path, family, timing=replace(PATIENT, kill_grace_s=10.0)) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1", drain_timeout_s=0.2)
        with daemons.connect() as cluster:
            pool = deploy(cluster, Mover, str(journal))
            call: Any = pool.call
            assert call().where() == ("w1", 1)
            daemons.start_worker("w2")
            wait_until(lambda: workers(cluster) == {"w1", "w2"})
            cluster.drain_worker(WorkerId("w1"), timeout=0.2)
            wait_until(lambda: call().where() == ("w2", 2), PATIENCE_S)
            assert lines(journal) == ["stopped"]
            assert cluster.poll(pool.job_id).tasks[0].failures == 0  # type: ignore[arg-type]
            pool.shutdown()
            assert lines(journal) == ["stopped", "stopped"]


def test_an_actor_whose_worker_is_lost_comes_back_at_no_cost(tmp_path: Path, family: Family) -> None:
    class Mover:  # max_restarts is 0
        @method(retries=20)
        def where(self, ctx: ActorContext) -> tuple[str | None, int]:
            return ctx.worker_id, ctx.attempt

    with Daemons(tmp_path, family, timing=QUICK) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1")
        with daemons.connect() as cluster:
            pool = deploy(cluster, Mover)
            call: Any = pool.call
            assert call().where() == ("w1", 1)
            daemons.start_worker("w2")
            wait_until(lambda: workers(cluster) == {"w1", "w2"})
            daemons.kill("w1")  # the process of the actor is fenced, and runs on until then
            wait_until(lambda: call().where() == ("w2", 2), PATIENCE_S)
            (member,) = pool.members()
            assert (member.state, member.restarts) == (MemberState.READY, 1)
            assert "worker w1 was not heard" in member.last_error
            info = cluster.poll(pool.job_id)  # type: ignore[arg-type]
            assert (info.tasks[0].failures, info.tasks[0].preemptions) == (0, 1)
            pool.shutdown()


def workers(cluster: Cluster) -> set[str]:
    return {worker.info.worker_id for worker in cluster.list_workers()}
