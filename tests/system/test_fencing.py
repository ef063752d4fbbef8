"""Attempts that are too late do not begin, and superseded ones are killed at once."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from fluster.cluster import Cluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.messages import AttemptList, Done, JobId, JobStatus, WorkerId
from fluster_bus.running.fence_clock import fence_clock
from fluster_services.config import Timing
from fluster_services.worker.contract.attempt_directory import SPEC_FILE
from tests.system.daemons import QUICK, Daemons
from tests.system.job_requests import command, wait_ready
from tests.system.processes import Family
from tests.system.runtime_site import Site, end_of, wait_for_line
from tests.system.small_disks import fill, mounted
from tests.waiting import wait_until

PATIENCE_S = 60


@pytest.fixture
def daemons(tmp_path: Path, family: Family) -> Iterator[Daemons]:
    with Daemons(tmp_path, family, timing=QUICK) as daemons:
        daemons.start_controller()
        yield daemons


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["command", "callable"])
async def test_an_attempt_that_is_late_before_it_begins_does_not_begin(site: Site, tmp_path: Path, kind: str) -> None:
    ledger = tmp_path / "ledger"
    late = {"fence_after_s": 1.0, "fence_at": 0.0, "kill_grace_s": 0.1}  # since the machine was started

    if kind == "command":
        task = await site.command("touch", str(ledger), **late)
    else:
        task = await site.call(ledger.touch, **late)
    assert (await end_of(task)).reason == "fenced"
    assert not ledger.exists()


@pytest.mark.anyio
async def test_the_fence_counts_from_the_last_sign_of_life_and_is_renewed(site: Site) -> None:
    task = await site.command("sleep", "600", fence_after_s=3600.0, fence_at=fence_clock() + 0.5)
    assert (await end_of(task)).reason == "fenced"
    again = await site.command("sleep", "600", key="ns.job.1.1", fence_after_s=3600.0, fence_at=fence_clock() + 10)
    again.renew(3600)
    again.kill(0, "enough")
    assert (await end_of(again)).reason == "killed"


@pytest.mark.anyio
async def test_a_renewal_counts_from_its_sending(site: Site) -> None:
    """One that lay about while the keeper was stopped renews nothing, and what is dated in the future no more than now."""
    task = await site.command("sleep", "600", fence_after_s=3600.0)
    task.send({"renew": 3600.0, "sent_since_boot_s": fence_clock() - 3600})
    assert (await end_of(task)).reason == "fenced"
    again = await site.command("sleep", "600", key="ns.job.1.1", fence_after_s=3600.0)
    again.send({"renew": 0.1, "sent_since_boot_s": fence_clock() + 3600})
    assert (await end_of(again)).reason == "fenced"


def test_a_task_is_fenced_by_the_beat_that_was_heard_before_it_was_claimed(tmp_path: Path, family: Family) -> None:
    timing = dataclasses.replace(QUICK, heartbeat_s=3, fence_after_s=90, worker_timeout_s=120)
    with Daemons(tmp_path, family, timing=timing) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1")
        with daemons.connect() as cluster:
            beats: SimpleQueue[object] = SimpleQueue()
            cluster.portal.run(cluster.asynchronous.bus.subscribe, subjects.heartbeats(), beats.put)
            beats.get(timeout=PATIENCE_S)  # the next comes in 3 s
            launched_at = fence_clock()
            job_id = cluster.launch(command("sh", "-c", "echo ready; exec sleep 600"))
            wait_ready(cluster, job_id)
            (spec,) = (json.loads(path.read_text()) for path in (tmp_path / "w1").rglob(SPEC_FILE))
            assert beats.empty(), "else the task may have been claimed after it"
            assert spec["fence_at"] - timing.fence_after_s <= launched_at
            cluster.terminate(job_id)
            cluster.wait(job_id, timeout=PATIENCE_S)


@pytest.mark.anyio
async def test_the_fence_holds_for_what_the_main_process_leaves_behind_in_a_longer_grace(site: Site) -> None:
    script = "trap 'exit 0' TERM; (trap '' TERM; echo ready; sleep 600) & wait"
    task = await site.command("sh", "-c", script, fence_after_s=1.0, kill_grace_s=0.1)
    await wait_for_line(task, "ready")
    task.kill(600, "enough")
    assert (await end_of(task)).reason == "killed"


def begin_and_end(ledger: Path) -> str:
    """A command that notes its beginning, and goes on to note that it lives."""
    return f"echo begin $FLUSTER_ATTEMPT >> {ledger}; echo $$ > {ledger}.$FLUSTER_ATTEMPT; echo ready; exec sleep 600"


# Goes on through SIGTERM, and notes each of its steps.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    with open(sys.argv[1], "a") as ledger:
        ledger.write(os.environ["FLUSTER_ATTEMPT"] + "\\n")
    time.sleep(0.01)
"""


def test_a_task_that_is_slow_to_end_is_gone_before_its_retry_begins(daemons: Daemons, tmp_path: Path) -> None:
    """By the proportions that LocalCluster has: whatever the worker and the task do, the keeper keeps the fence."""
    ledger = tmp_path / "ledger"
    daemons.start_worker("w1")
    with daemons.connect() as cluster:
        job_id = cluster.launch(command(sys.executable, "-c", STUBBORN, str(ledger)))
        wait_ready(cluster, job_id)
        daemons.kill("w1", signal.SIGSTOP)
        daemons.start_worker("w2")
        wait_ready(cluster, job_id, lines=2)
        wait_until(lambda: ledger.read_text().split().count("2") > 20)
        steps = ledger.read_text().split()
        assert "1" not in steps[steps.index("2") :], "an attempt that was given away goes on beside the next"
        daemons.kill("w1", signal.SIGCONT)
        cluster.terminate(job_id)
        cluster.wait(job_id, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("worker_signal", "keeper_signal"),
    [(signal.SIGKILL, signal.SIGKILL), (signal.SIGKILL, signal.SIGSTOP), (signal.SIGSTOP, signal.SIGKILL)],
)
def test_with_the_keeper_gone_too_what_is_left_fences_the_task(
    daemons: Daemons, tmp_path: Path, worker_signal: signal.Signals, keeper_signal: signal.Signals
) -> None:
    """A child of the task, in a session of its own, which the kernel does not end with the keeper."""
    ledger = tmp_path / "ledger"
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    daemons.start_worker("w1")
    with daemons.connect() as cluster:
        script = f"setsid {sys.executable} {tmp_path}/stubborn.py {ledger} & wait"
        job_id = cluster.launch(command("sh", "-c", script))
        wait_ready(cluster, job_id)
        (keeper,) = daemons.family.named("fluster-keeper")
        daemons.kill("w1", worker_signal)
        keeper.send_signal(keeper_signal)
        daemons.start_worker("w2")
        wait_ready(cluster, job_id, lines=2)
        wait_until(lambda: ledger.read_text().split().count("2") > 20)
        steps = ledger.read_text().split()
        assert "1" not in steps[steps.index("2") :], "an attempt that was given away goes on beside the next"
        if keeper_signal is signal.SIGSTOP:
            keeper.resume()
        cluster.terminate(job_id)
        cluster.wait(job_id, timeout=PATIENCE_S)


def test_a_machine_that_wakes_ends_what_was_fenced_while_it_slept(tmp_path: Path, family: Family) -> None:
    with Daemons(tmp_path, family) as daemons:  # with a fence that is far off
        slept = daemons.sleeps["w1"] = tmp_path / "w1.slept"
        slept.write_text("0")
        daemons.start_controller()
        daemons.start_worker("w1")
        with daemons.connect() as cluster:
            job_id = cluster.launch(command("sh", "-c", "echo ready; while true; do echo tick; sleep 0.1; done"))
            wait_ready(cluster, job_id)
            (keeper,) = daemons.family.named("fluster-keeper")
            (task,) = keeper.children()
            daemons.kill("w1", signal.SIGSTOP)  # its network is slow to come back
            slept.write_text("3600")
            wait_until(lambda: not _lives(task))
            daemons.kill("w1", signal.SIGCONT)
            cluster.terminate(job_id)
            cluster.wait(job_id, timeout=PATIENCE_S)


@pytest.mark.parametrize("frozen", ["worker", "worker, keeper and task"])
def test_a_machine_that_was_frozen_past_the_timeout_runs_nothing_twice(
    daemons: Daemons, tmp_path: Path, frozen: str
) -> None:
    ledger = tmp_path / "ledger"
    daemons.start_worker("w1")
    with daemons.connect() as cluster:
        job_id = cluster.launch(command("sh", "-c", begin_and_end(ledger)))
        wait_ready(cluster, job_id)
        task = psutil.Process(int(Path(f"{ledger}.1").read_text()))
        keeper = task.parent()
        assert keeper is not None
        worker = psutil.Process(daemons.running["w1"].pid)
        stopped = [worker] if frozen == "worker" else [worker, keeper, task]
        for each in stopped:
            each.send_signal(signal.SIGSTOP)
        daemons.start_worker("w2")
        wait_ready(cluster, job_id, lines=2)
        if frozen == "worker":
            assert not _lives(task), "its keeper should have stopped it"
        for each in reversed(stopped):  # the task first: its keeper ends it as soon as it can
            each.send_signal(signal.SIGCONT)
        wait_until(lambda: not _lives(task))
        wait_until(lambda: _alive(cluster) == {"w1", "w2"})
        info = cluster.poll(job_id)
        assert (info.status, info.worker_id, info.tasks[0].attempt) == (JobStatus.RUNNING, "w2", 2)
        cluster.terminate(job_id)
        ended = cluster.wait(job_id, timeout=PATIENCE_S)
        assert (ended.status, ended.tasks[0].attempt) == (JobStatus.KILLED, 2)
        assert (ended.tasks[0].preemptions, ended.tasks[0].failures) == (1, 0)
        assert ledger.read_text().split() == ["begin", "1", "begin", "2"]


def test_what_is_being_prepared_when_its_worker_is_frozen_is_not_started_by_it(
    daemons: Daemons, tmp_path: Path
) -> None:
    """The worker is stopped as soon as it has claimed: wherever that meets it, only the other one runs the task."""
    ledger = tmp_path / "ledger"
    daemons.start_worker("w1")
    with daemons.connect() as cluster:
        for number in range(3):
            job_id = cluster.launch(command("sh", "-c", begin_and_end(ledger), name=f"try-{number}"))
            worker = psutil.Process(daemons.running["w1"].pid)
            wait_until(lambda job_id=job_id: cluster.poll(job_id).worker_id)  # type: ignore[misc]
            worker.send_signal(signal.SIGSTOP)
            daemons.start_worker(f"w2-{number}")
            wait_until(lambda: "begin 2" in _lines(ledger), PATIENCE_S)
            begun = _lines(ledger)
            worker.send_signal(signal.SIGCONT)
            wait_until(lambda: "w1" in _alive(cluster))
            cluster.terminate(job_id)
            assert cluster.wait(job_id, timeout=PATIENCE_S).tasks[0].attempt == 2
            assert _lines(ledger) == begun, "the first attempt began after the second"
            ledger.write_text("")
            cluster.drain_worker(WorkerId(f"w2-{number}"), wait=True)


def _lines(ledger: Path) -> list[str]:
    return ledger.read_text().splitlines() if ledger.exists() else []


def test_a_task_that_may_go_on_outlasts_a_fence(tmp_path: Path, family: Family) -> None:
    timing = Timing(heartbeat_s=0.2, fence_after_s=3, kill_grace_s=0.1, worker_timeout_s=60)
    with Daemons(tmp_path, family, timing=timing) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1")
        with daemons.connect() as cluster:
            script = f"echo ready; read line < {tmp_path}/gate"
            os.mkfifo(tmp_path / "gate")
            job_id = cluster.launch(command("sh", "-c", script, on_disconnect="continue"))
            fenced = cluster.launch(command("sh", "-c", "echo ready; exec sleep 600"))
            for each in (job_id, fenced):
                wait_ready(cluster, each)
            (sleeping,) = [each for each in psutil.process_iter() if each.name() == "sleep" and _is_of(each, fenced)]
            daemons.kill("w1", signal.SIGSTOP)
            wait_until(lambda: not _lives(sleeping))
            (tmp_path / "gate").write_text("go\n")  # a reader is there: it was not stopped
            daemons.kill("w1", signal.SIGCONT)
            info = cluster.wait(job_id, timeout=PATIENCE_S)
            assert (info.status, info.tasks[0].attempt) == (JobStatus.SUCCEEDED, 1)
            cluster.terminate(fenced)
            cluster.wait(fenced, timeout=PATIENCE_S)


def _is_of(process: psutil.Process, job_id: JobId) -> bool:
    try:
        return process.environ().get("FLUSTER_JOB_ID") == job_id
    except psutil.Error:
        return False


def test_a_task_that_may_go_on_does_so_beside_its_retry_until_the_worker_is_back(
    daemons: Daemons, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    daemons.start_worker("w1")
    with daemons.connect() as cluster:
        job_id = cluster.launch(command("sh", "-c", begin_and_end(ledger), on_disconnect="continue"))
        wait_ready(cluster, job_id)
        first = psutil.Process(int(Path(f"{ledger}.1").read_text()))
        daemons.kill("w1", signal.SIGSTOP)
        daemons.start_worker("w2")
        wait_ready(cluster, job_id, lines=2)
        assert _lives(first)
        daemons.kill("w1", signal.SIGCONT)
        wait_until(lambda: not _lives(first))
        info = cluster.poll(job_id)
        assert (info.status, info.worker_id, info.tasks[0].attempt) == (JobStatus.RUNNING, "w2", 2)
        cluster.terminate(job_id)
        assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _alive(cluster: Cluster) -> set[str]:
    return {worker.info.worker_id for worker in cluster.list_workers() if worker.alive}


def test_a_store_without_room_fences_nothing_that_can_go_on(tmp_path: Path, family: Family) -> None:
    """The leader cannot renew its lease there, and knows by reading that no other could take it."""
    quick = dataclasses.replace(QUICK, leader_lease_s=0.6)
    with mounted(tmp_path / "nats", megabytes=64), Daemons(tmp_path, family, timing=quick) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1")
        with daemons.connect() as cluster:
            job_id = cluster.launch(command("sh", "-c", "echo ready; exec sleep 600"))
            wait_ready(cluster, job_id)
            attempts = cluster.portal.run(_attempts_at, cluster.asynchronous.bus)
            assert attempts == 1
            fill(tmp_path / "nats" / "ballast")
            wait_until(lambda: "the leader's seat could not be written" in daemons.log("controller"))
            lasts_until = time.monotonic() + 2 * quick.fence_after_s  # nothing is to happen in this time
            while time.monotonic() < lasts_until:
                assert cluster.portal.run(_attempts_at, cluster.asynchronous.bus) == 1
                time.sleep(0.1)


async def _attempts_at(bus: Bus) -> int:
    """How many attempts run on w1, by its own word."""
    answer = await bus.request(subjects.worker_verb(WorkerId("w1"), "list"), Done().to_json())
    return len([each for each in AttemptList.from_json(answer.data).attempts if each.phase == "running"])
