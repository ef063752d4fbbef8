"""The lead changes hands: what the jobs themselves wrote down, and what the cluster tells, agree."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fluster.cluster import Cluster
from fluster_bus.core import buckets
from fluster_bus.messages import JobStatus
from fluster_bus.storage.streams import leaders_table
from fluster_services.config import Timing
from tests.system.daemons import Daemons
from tests.system.histories import check_history
from tests.system.job_requests import command, sleeper, wait_ready
from tests.system.ledger import PATIENCE_S, SMALL, Ledger, Load
from tests.system.nursery import Nursery
from tests.system.processes import Family
from tests.waiting import wait_until

LEASE_S = 1.0
# No worker is lost here: only the lead changes hands.
PATIENT = Timing(heartbeat_s=0.2, fence_after_s=30, worker_timeout_s=60, kill_grace_s=0.4, leader_lease_s=LEASE_S)
# Workers are lost here, too.
QUICK = Timing(heartbeat_s=0.2, fence_after_s=1.5, worker_timeout_s=3.0, kill_grace_s=0.4, leader_lease_s=LEASE_S)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    folder = tmp_path / "ledger"
    folder.mkdir()
    return Ledger(folder)


@pytest.fixture
def timing() -> Timing:
    return PATIENT


@pytest.fixture
def daemons(tmp_path: Path, family: Family, timing: Timing) -> Iterator[Daemons]:
    with Daemons(tmp_path / "cluster", family, timing=timing) as daemons:
        yield daemons


@pytest.fixture
def nursery(daemons: Daemons) -> Iterator[Nursery]:
    with Nursery(daemons) as nursery:
        nursery.start("c1")
        daemons.start_worker("w1")
        nursery.start("c2")
        yield nursery


@pytest.fixture
def client(daemons: Daemons, nursery: Nursery) -> Iterator[Cluster]:
    with daemons.connect() as cluster:
        yield cluster


def leader(cluster: Cluster) -> str | None:
    """Who leads, or did last."""
    bus = cluster.asynchronous.bus

    async def read() -> str | None:
        row = await leaders_table(bus).get(buckets.LEADER_KEY)
        return row.value.controller_id if row is not None else None

    return cluster.portal.run(read)


def test_fifty_controllers_are_killed_at_any_moment_under_load(
    nursery: Nursery, client: Cluster, ledger: Ledger
) -> None:
    """Sometimes it comes back under its own name and leads at once, sometimes the other follows it."""
    dice = random.Random(os.urandom(8))
    load = Load(client, ledger, seconds=0.1)
    with load.running():
        for number in range(50):
            victim = leader(client) if dice.random() < 0.8 else dice.choice(list(nursery.running))
            if victim not in nursery.running:
                victim = dice.choice(list(nursery.running))  # the leader's successor is not there yet
            time.sleep(dice.uniform(0, 0.15))  # any moment is meant
            nursery.kill(victim)
            nursery.start(victim if dice.random() < 0.8 else f"c{number + 3}")
    infos = load.check()
    # No worker was lost, so nothing was tried twice.
    assert {task.attempt for info in infos for task in info.tasks} == {1}


@pytest.mark.parametrize("timing", [Timing(heartbeat_s=1.0)], ids=["usual"])
def test_another_controller_leads_when_the_lease_of_the_first_is_over(
    nursery: Nursery, client: Cluster, timing: Timing
) -> None:
    first = wait_until(lambda: leader(client))
    assert first is not None
    client.wait(client.launch(command("true")), timeout=PATIENCE_S)
    nursery.kill(first)
    killed_at = time.monotonic()
    client.wait(client.launch(command("true")), timeout=PATIENCE_S)
    assert time.monotonic() - killed_at < 4 * timing.leader_lease_s, "some 7 s on a quiet machine"
    assert leader(client) != first


@pytest.mark.parametrize("timing", [replace(QUICK, fence_after_s=5.0, worker_timeout_s=6.5)], ids=["quick"])
def test_a_stopped_leader_that_continues_judges_nothing(
    nursery: Nursery, daemons: Daemons, client: Cluster, timing: Timing
) -> None:
    """It is stopped for longer than any worker may be silent, and so has heard of none."""
    first = wait_until(lambda: leader(client))
    assert first is not None
    held = client.launch_many([sleeper(resources=SMALL) for _ in range(3)])
    for job_id in held:
        wait_ready(client, job_id)
    nursery.kill(first, signal.SIGSTOP)
    stopped_at = time.monotonic()
    wait_until(lambda: leader(client) != first, PATIENCE_S)
    second = leader(client)
    assert second is not None
    assert client.wait(client.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    wait_until(lambda: time.monotonic() - stopped_at > timing.worker_timeout_s + 1, PATIENCE_S)
    nursery.kill(first, signal.SIGCONT)
    wait_until(
        lambda: f"{first} stands by; {second} leads" in daemons.log(first), PATIENCE_S, lambda: daemons.log(first)
    )
    infos = [client.poll(job_id) for job_id in held]
    assert {(info.status, info.tasks[0].attempt) for info in infos} == {(JobStatus.RUNNING, 1)}
    # It follows as well as any other.
    nursery.kill(second)
    assert client.wait(client.launch(command("true")), timeout=PATIENCE_S).status is JobStatus.SUCCEEDED
    assert leader(client) == first
    for job_id in held:
        client.terminate(job_id)
    ended = client.wait(held, timeout=PATIENCE_S)
    assert {(info.status, info.tasks[0].attempt) for info in ended} == {(JobStatus.KILLED, 1)}
    check_history(client, ended)
