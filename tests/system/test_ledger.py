"""Whatever is killed, stopped and restarted: what the jobs themselves wrote down, and what the cluster tells, agree.

Two invariants. Attempts of a fenced task never overlap: each attempt holds a lock on a file of its task as long as it lives,
and writes into a ledger when it finds the lock held. An acknowledged submit ends in exactly one final state: it is asked
for, and the event stream is read.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fluster.cluster import Cluster
from fluster_bus import subjects
from fluster_bus.messages import Event, JobId, JobInfo, JobRequest, JobStatus, ResourceConfig
from fluster_bus.streams import leaders_table
from fluster_services.config import Timing
from tests.system.daemons import Daemons
from tests.system.histories import check_history
from tests.system.job_requests import call, command, sleeper, wait_ready
from tests.system.nursery import Nursery
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60
SEED_VARIABLE, ROUNDS_VARIABLE = "FLUSTER_CHAOS_SEED", "FLUSTER_CHAOS_ROUNDS"
LEASE_S = 1.0
SMALL = ResourceConfig.with_cpu(0.5, memory="128MiB")
# Nobody is lost here: only the lead changes hands.
PATIENT = Timing(heartbeat_s=0.2, fence_after_s=30, worker_timeout_s=60, kill_grace_s=0.4, leader_lease_s=LEASE_S)
# Workers are lost here, too.
QUICK = Timing(heartbeat_s=0.2, fence_after_s=1.5, worker_timeout_s=3.0, kill_grace_s=0.4, leader_lease_s=LEASE_S)


# ---- the ledger ---------------------------------------------------------------------------------------------


class Ledger:
    """A file to which each attempt appends a line when it begins and one when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "ledger"
        self.file.touch()

    def request(self, *, seconds: float, replicas: int = 1) -> JobRequest:
        folder = str(self.folder)

        def work() -> None:
            import fcntl
            import os
            import time

            job, task, attempt = (os.environ[f"FLUSTER_{name}"] for name in ("JOB_ID", "TASK_INDEX", "ATTEMPT"))

            def write(word: str) -> None:
                file = os.open(f"{folder}/ledger", os.O_WRONLY | os.O_APPEND)
                os.write(file, f"{word} {job} {task} {attempt}\n".encode())  # one write: lines do not mix
                os.close(file)

            # The kernel lets go of it when the process is gone, in whatever way.
            lock = os.open(f"{folder}/{job}.{task}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                write("overlap")
            write("begin")
            time.sleep(seconds)
            write("end")

        return call(work, name="work", resources=SMALL, replicas=replicas, retry_backoff_s=0.05)

    def lines(self) -> list[tuple[str, str, int]]:
        """(word, task, attempt) in the order in which they were written."""
        words = [line.split() for line in self.file.read_text().splitlines()]
        return [(word, f"{job}.{task}", int(attempt)) for word, job, task, attempt in words]

    def wait_lines(self, count: int) -> None:
        wait_until(lambda: len(self.lines()) >= count, PATIENCE_S, lambda: len(self.lines()))

    def check(self, infos: list[JobInfo], stories: dict[str, list[Event]]) -> None:
        """What ran is what the cluster says that ran."""
        begun: dict[str, list[int]] = defaultdict(list)
        ended: dict[str, list[int]] = defaultdict(list)
        for word, task, attempt in self.lines():
            assert word != "overlap", f"attempt {attempt} of {task} met another that lived: {stories[task]}"
            (begun if word == "begin" else ended)[task].append(attempt)
        for task, attempts in begun.items():
            assert attempts == sorted(set(attempts)), f"{task} began as {attempts}"
        for info in infos:
            for each in info.tasks:
                task = subjects.task_key(info.job_id, each.task)
                assert begun[task], f"{task} never ran"
                assert begun[task][-1] <= each.attempt
                if each.status is JobStatus.SUCCEEDED:
                    assert ended[task][-1:] == [each.attempt], task
        known = {subjects.task_key(info.job_id, each.task) for info in infos for each in info.tasks}
        assert begun.keys() <= known, "something ran that nobody launched"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    folder = tmp_path / "ledger"
    folder.mkdir()
    return Ledger(folder)


# ---- the cluster --------------------------------------------------------------------------------------------


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
        row = await leaders_table(bus).get(subjects.LEADER_KEY)
        return row.value.controller_id if row is not None else None

    return cluster.portal.run(read)


class Load:
    """Jobs that are launched one after the other until it is enough; those whose submit was acknowledged."""

    def __init__(self, cluster: Cluster, ledger: Ledger, *, seconds: float, at_once: int = 60) -> None:
        self._cluster, self._ledger = cluster, ledger
        self._seconds, self._at_once = seconds, at_once
        self.acknowledged: list[JobId] = []
        self._enough = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._enough.is_set():
                replicas = 1 + len(self.acknowledged) % 2
                requests = [self._ledger.request(seconds=self._seconds, replicas=replicas) for _ in range(5)]
                self.acknowledged += self._cluster.launch_many(requests)
                begun = sum(word == "begin" for word, _, _ in self._ledger.lines())
                while len(self.acknowledged) * 1.5 - begun > self._at_once and not self._enough.wait(0.05):
                    begun = sum(word == "begin" for word, _, _ in self._ledger.lines())
        except BaseException as error:
            self._error = error

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            self._ledger.wait_lines(10)
            yield
        finally:
            self._enough.set()
            self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def check(self) -> list[JobInfo]:
        """Both invariants, for every submit that was acknowledged."""
        assert len(set(self.acknowledged)) == len(self.acknowledged)
        infos = self._cluster.wait(self.acknowledged, timeout=PATIENCE_S)
        assert Counter(info.status for info in infos) == {JobStatus.SUCCEEDED: len(self.acknowledged)}
        self._ledger.check(infos, check_history(self._cluster, infos))
        return infos


# ---- the lead changes hands ---------------------------------------------------------------------------------


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
    # Nobody was lost, so nothing was tried twice.
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


# ---- everything at once ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("timing", [QUICK], ids=["quick"])
def test_nothing_is_lost_or_run_twice_whatever_goes(
    nursery: Nursery, daemons: Daemons, client: Cluster, ledger: Ledger
) -> None:
    """Each fault once in each round, in an order of its own; `make chaos` has more rounds, and may repeat a seed."""
    seed = int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))
    rounds = int(os.environ.get(ROUNDS_VARIABLE) or 1)
    print(f"{SEED_VARIABLE}={seed} {ROUNDS_VARIABLE}={rounds}")  # shown when it fails
    dice = random.Random(seed)
    daemons.start_worker("w2")

    def pause(seconds: float) -> None:
        time.sleep(dice.uniform(0, seconds))

    def kill_worker() -> None:
        name = dice.choice(["w1", "w2"])
        daemons.kill(name)
        pause(1)
        daemons.start_worker(name)

    def lose_worker() -> None:
        name = dice.choice(["w1", "w2"])
        daemons.kill(name, signal.SIGSTOP)
        time.sleep(QUICK.worker_timeout_s + 1)  # longer than it may be silent: the time itself is what is tried
        daemons.kill(name, signal.SIGCONT)

    def kill_controller() -> None:
        name = dice.choice(list(nursery.running))
        nursery.kill(name)
        pause(1)
        nursery.start(name)

    def stop_controller() -> None:
        name = dice.choice(list(nursery.running))
        nursery.kill(name, signal.SIGSTOP)
        time.sleep(2 * LEASE_S)  # as above
        nursery.kill(name, signal.SIGCONT)

    def restart_server() -> None:
        daemons.kill_server()
        pause(0.5)
        daemons.server.start()

    deeds: list[Callable[[], None]] = [kill_worker, lose_worker, kill_controller, stop_controller, restart_server]
    load = Load(client, ledger, seconds=0.5)
    with load.running():
        for _ in range(rounds):
            dice.shuffle(deeds)
            for deed in deeds:
                print(deed.__name__)
                deed()
                pause(0.5)
    infos = load.check()
    assert len(infos) > 20
