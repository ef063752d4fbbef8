"""A cluster that loses all that it kept, and has it again from a backup."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from fluster import ActorContext, ActorDiedError, ActorPool, ActorTimeoutError, LocalCluster, actor, deploy
from fluster.cluster import Cluster
from fluster_bus.messages import JobId, JobRequest, JobStatus, ResourceConfig
from tests.system.daemons import PATIENT, QUICK, Daemons
from tests.system.job_requests import call, command, texts
from tests.system.processes import Family, wait_ended
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SMALL = ResourceConfig.with_cpu(1, memory="128MiB")


def _backup(cluster: Daemons | LocalCluster, *words: str) -> str:
    """What `fluster backup` says."""
    program = [str(Path(sys.executable).with_name("fluster")), "--address", cluster.address, "backup", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _lose_store(daemons: Daemons) -> None:
    """Have an empty server in the place of the one that was there."""
    daemons.server.stop(grace_s=0)
    shutil.rmtree(daemons.server.store_dir / "jetstream")
    daemons.server.start()


class Tried:
    """A file into which each attempt of a job writes a line, and one that lets those end that wait for it."""

    def __init__(self, folder: Path) -> None:
        self._file, self._gate = folder / "tried", folder / "gate"
        self._file.touch()

    def job(self, name: str, *, waits: bool = False, resources: ResourceConfig = SMALL) -> JobRequest:
        waiting = f"until [ -e {self._gate}-{name} ] || [ -e {self._gate} ]; do sleep 0.05; done; " if waits else ""
        script = f"echo $FLUSTER_JOB_ID $FLUSTER_ATTEMPT >> {self._file}; {waiting}echo done"
        return command("sh", "-c", script, name=name, resources=resources)

    def lines(self) -> Counter[str]:
        return Counter(self._file.read_text().splitlines())

    def let(self, name: str = "") -> None:
        (self._gate if not name else self._gate.with_name(f"{self._gate.name}-{name}")).touch()


def _run(cluster: Cluster, jobs: Sequence[JobId]) -> bool:
    return all(cluster.poll(job).status is JobStatus.RUNNING for job in jobs)


def _answer() -> dict[str, int]:
    return {"answer": 42}


def test_a_cluster_that_lost_all_of_its_machines_goes_on_from_its_backup(family: Family, tmp_path: Path) -> None:
    tried = Tried(tmp_path)
    with Daemons(tmp_path, family, timing=QUICK, cpu=3) as daemons, daemons.connect() as cluster:
        daemons.start_controller()
        daemons.start_worker("w1")
        printed, answered = cluster.launch(tried.job("printed")), cluster.launch(call(_answer, name="answered"))
        failed = cluster.launch(command("sh", "-c", "echo no >&2; exit 3", name="failed"))
        ended = cluster.wait([printed, answered, failed], timeout=60)
        running = cluster.launch_many([tried.job(f"running-{number}", waits=True) for number in range(3)])
        waiting = cluster.launch_many([tried.job(f"waiting-{number}") for number in range(3)])
        wait_until(lambda: len(tried.lines()) == 1 + len(running))
        wait_until(lambda: _run(cluster, running))
        folder = tmp_path / "backup"
        assert f"{folder}: 14 streams" in _backup(daemons, "create", str(folder))
        assert "KV_fluster_jobs_default" in _backup(daemons, "show", str(folder), "--check")
        after = cluster.launch(tried.job("after"))
        tried.let("running-0")
        cluster.wait([running[0], *waiting, after], timeout=60)
        for name in ("controller", "w1"):
            daemons.kill(name)
        family.kill()  # tasks and their keepers
        _lose_store(daemons)
        _backup(daemons, "restore", str(folder))
        tried.let()
        daemons.start_controller()
        daemons.start_worker("w2")
        # Its connection is the one of before: what it waits for comes.
        infos = {info.job_id: info for info in cluster.wait([*running, *waiting], timeout=90)}
        assert {info.status for info in infos.values()} == {JobStatus.SUCCEEDED}
        assert [(infos[job].tasks[0].attempt, infos[job].tasks[0].preemptions) for job in running] == [(2, 1)] * 3
        assert [infos[job].tasks[0].attempt for job in waiting] == [1] * 3
        assert [info.status for info in cluster.wait([printed, answered, failed])] == [info.status for info in ended]
        assert (texts(cluster, printed), texts(cluster, failed, "stderr")) == (["done"], ["no"])
        assert cluster.result(answered) == {"answer": 42}
        assert after not in {info.job_id for info in cluster.list_jobs()}
        # What ended after the backup is known to have waited or run, and ends once more.
        expected = [f"{printed} 1", f"{after} 1", *(f"{job} 1" for job in waiting for _ in range(2))]
        expected += [f"{job} {attempt}" for job in running for attempt in (1, 2)]
        assert tried.lines() == Counter(expected)


def test_workers_that_live_on_go_by_the_records_of_the_backup(family: Family, tmp_path: Path) -> None:
    tried = Tried(tmp_path)
    large = ResourceConfig.with_cpu(2, memory="128MiB")
    with Daemons(tmp_path, family, timing=PATIENT, cpu=3) as daemons, daemons.connect() as cluster:
        daemons.start_controller()
        daemons.start_worker("w1")
        goes_on, ends = cluster.launch_many([tried.job("goes-on", waits=True), tried.job("ends", waits=True)])
        wait_until(lambda: _run(cluster, [goes_on, ends]))
        begins = cluster.launch(tried.job("begins", waits=True, resources=large))
        folder = tmp_path / "backup"
        _backup(daemons, "create", str(folder))
        # What happens from here on is lost: one ends, one begins, one is new and runs in the place of the first.
        tried.let("ends")
        cluster.wait(ends, timeout=60)
        wait_until(lambda: cluster.poll(begins).status is JobStatus.RUNNING)
        cluster.terminate(begins)
        cluster.wait(begins, timeout=60)
        new = cluster.launch(tried.job("new", waits=True))
        wait_until(lambda: f"{new} 1" in tried.lines())
        # A child that its shell has just forked shows the same.
        unknown = min(
            (
                each
                for each in psutil.process_iter(["cmdline", "create_time"])
                if f"{tmp_path}/gate-new" in " ".join(each.info["cmdline"] or ())
            ),
            key=lambda each: each.info["create_time"],
        )
        daemons.kill("controller")
        _lose_store(daemons)
        _backup(daemons, "restore", str(folder))
        daemons.start_controller()
        wait_ended(unknown)
        tried.let()
        infos = cluster.wait([goes_on, ends, begins], timeout=90)
        assert {info.status for info in infos} == {JobStatus.SUCCEEDED}
        assert [(info.tasks[0].attempt, info.tasks[0].preemptions) for info in infos] == [(1, 0), (2, 1), (1, 0)]
        expected = [f"{goes_on} 1", f"{ends} 1", f"{ends} 2", f"{begins} 1", f"{begins} 1", f"{new} 1"]
        assert tried.lines() == Counter(expected)
        assert texts(cluster, goes_on) == ["done"]
        assert new not in _known(cluster)


def _known(cluster: Cluster) -> set[JobId]:
    return {info.job_id for info in cluster.list_jobs()}


def test_a_cluster_that_runs_is_put_back_to_its_backup(family: Family, tmp_path: Path) -> None:
    tried = Tried(tmp_path)
    with Daemons(tmp_path, family, timing=PATIENT) as daemons, daemons.connect() as cluster:
        daemons.start_controller("c1")
        daemons.start_controller("c2")
        daemons.start_worker("w1")
        goes_on = cluster.launch(tried.job("goes-on", waits=True))
        wait_until(lambda: cluster.poll(goes_on).status is JobStatus.RUNNING)
        folder = tmp_path / "backup"
        _backup(daemons, "create", str(folder))
        lost = cluster.launch(tried.job("lost"))
        cluster.wait(lost, timeout=60)
        _backup(daemons, "restore", str(folder), "--replace")
        assert _known(cluster) == {goes_on}
        tried.let()
        again = cluster.launch(tried.job("again"))
        infos = cluster.wait([goes_on, again], timeout=60)
        assert [(info.status, info.tasks[0].attempt) for info in infos] == [(JobStatus.SUCCEEDED, 1)] * 2
        assert tried.lines() == Counter(f"{job} 1" for job in (goes_on, lost, again))


@actor(durable=True)
class Ledger:
    """Keeps the numbers that it was given."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_restore(self, state: list[int]) -> None:
        self.numbers = state

    def keep(self, ctx: ActorContext, number: int) -> list[int]:
        self.numbers.append(number)
        ctx.save(self.numbers)
        return self.numbers


def test_a_durable_actor_that_lives_on_gives_way_to_what_the_backup_has(tmp_path: Path) -> None:
    with LocalCluster() as cluster:
        ledger: ActorPool[Any] = deploy(cluster, Ledger)
        assert [ledger.call().keep(number) for number in (1, 2)][-1] == [1, 2]
        _backup(cluster, "create", str(tmp_path / "backup"))
        assert ledger.call().keep(3) == [1, 2, 3]
        _backup(cluster, "restore", str(tmp_path / "backup"), "--replace")

        def kept() -> list[int] | None:
            try:
                numbers: list[int] = ledger.call(timeout=10).keep(4)
            except (ActorDiedError, ActorTimeoutError):
                return None  # it may have run all the same
            return numbers

        numbers = wait_until(kept) or []
        assert (numbers[:3], set(numbers)) == ([1, 2, 4], {1, 2, 4})
