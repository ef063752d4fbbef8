"""What a program has on a shared cluster ends with the program, however that ends."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from fluster import Cluster, JobStatus
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from tests.system.daemons import PATIENT, Daemons
from tests.system.processes import Family
from tests.waiting import wait_until

LEASE_S = 10.0  # a busy machine takes seconds to start a helper
HELPER = "fluster.owner_helper"

PROGRAM = """
import os, signal, sys, time
if "WITHOUT_PIDFDS" in os.environ:
    del os.pidfd_open
from fluster import Cluster, WorkerPool, actor, deploy

class Counter:
    def pid(self):
        return os.getpid()

@actor(durable=True)
class Ledger:
    def pid(self):
        return os.getpid()

cluster = Cluster()
pool = WorkerPool(cluster, 1)
pids = [pool.submit(os.getpid).result(), deploy(cluster, Counter).call().pid()]
ledger = deploy(cluster, Ledger).call().pid()
if os.fork() == 0:  # it outlives its parent, and holds what that had open
    signal.pause()
print(*pids, ledger, flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    timing = dataclasses.replace(PATIENT, owner_lease_s=LEASE_S)
    with Daemons(tmp_path_factory.mktemp("owners"), Family(), timing=timing) as daemons:
        daemons.start_controller()
        daemons.start_worker()
        yield daemons


@pytest.fixture
def cluster(daemons: Daemons) -> Iterator[Cluster]:
    with daemons.connect() as cluster:
        yield cluster
        left = [job.job_id for job in cluster.list_jobs() if not job.status.finished()]
        for job_id in left:
            cluster.terminate(job_id)
        cluster.wait(left, timeout=60)


class Client:
    """A program with a worker, an actor that is its own, and one that is not."""

    def __init__(self, process: subprocess.Popen[str], family: Family) -> None:
        assert process.stdout is not None
        self.process = process
        self.family = family
        *own, ledger = (int(pid) for pid in process.stdout.readline().split())
        self.own, self.ledger = own, ledger

    def helper(self) -> psutil.Process:
        (helper,) = self.family.named(HELPER)
        return helper

    def living(self) -> list[int]:
        return [pid for pid in self.own if psutil.pid_exists(pid)]


@contextmanager
def running(daemons: Daemons, errors: Path | None = None, *, has_pidfds: bool = True) -> Iterator[Client]:
    variables = {} if has_pidfds else {"WITHOUT_PIDFDS": "1"}
    family = Family()
    with ExitStack() as stack:
        stack.callback(family.kill)
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            env=family.environment(FLUSTER_CLUSTER_ADDRESS=daemons.address, **variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context(errors.open("w")) if errors is not None else None,
            text=True,
        )
        stack.enter_context(process)
        yield Client(process, family)


def wait_ended(client: Client, cluster: Cluster, reason: str) -> None:
    wait_until(lambda: not client.living())
    wait_until(lambda: sum(not job.status.finished() for job in cluster.list_jobs()) == 1)
    ended = [job for job in cluster.list_jobs() if job.status.finished()][:2]
    assert [job.status for job in ended] == [JobStatus.KILLED] * 2
    assert all(reason in job.error_message for job in ended), ended
    assert psutil.pid_exists(client.ledger)


def words_of_helpers(cluster: Cluster) -> list[Delivery]:
    """What helpers tell from now on; grows."""
    told: list[Delivery] = []
    bus = cluster.asynchronous.bus
    cluster.portal.run(bus.subscribe, subjects.jobs_verb(cluster.namespace, "own"), told.append)
    return told


def open_files(process: psutil.Process) -> list[str]:
    return [str(file.readlink()) for file in Path(f"/proc/{process.pid}/fd").iterdir()]


@pytest.mark.parametrize("end", ["killed", "left"])
def test_its_workers_and_actors_end_when_it_is_killed_or_leaves(daemons: Daemons, cluster: Cluster, end: str) -> None:
    with running(daemons) as client:
        if end == "killed":
            client.process.kill()
        else:
            assert client.process.stdin is not None
            client.process.stdin.close()
        wait_ended(client, cluster, "has ended")
        wait_until(lambda: not client.family.named(HELPER))


def test_where_there_are_no_pidfds_a_pipe_tells_its_end(daemons: Daemons, cluster: Cluster) -> None:
    with running(daemons, has_pidfds=False) as client:
        assert not any("pidfd" in file for file in open_files(client.helper()))
        client.process.kill()  # the child that it forked lives on
        wait_ended(client, cluster, "has ended")
        wait_until(lambda: not client.family.named(HELPER))


def test_a_helper_that_dies_once_the_end_is_told_leaves_nothing_to_the_lease(
    daemons: Daemons, cluster: Cluster
) -> None:
    with running(daemons) as client:
        told, helper = words_of_helpers(cluster), client.helper()
        client.process.kill()
        wait_until(lambda: any(json.loads(word.data)["ended"] for word in told))
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.kill()
        wait_ended(client, cluster, "has ended")


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_helper_that_dies_is_replaced_at_once(daemons: Daemons, cluster: Cluster, *, has_pidfds: bool) -> None:
    with running(daemons, has_pidfds=has_pidfds) as client:
        first = client.helper()
        first.kill()
        wait_until(lambda: [each for each in client.family.named(HELPER) if each != first], LEASE_S)
        client.process.kill()
        wait_ended(client, cluster, "has ended")
        wait_until(lambda: not client.family.named(HELPER))


def test_helpers_that_keep_dying_are_told_of_once(daemons: Daemons, cluster: Cluster, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with running(daemons, errors) as client:

        def is_told() -> bool:
            client.family.kill_named(HELPER)
            return "6 times in a row" in errors.read_text()

        wait_until(is_told)
        wait_ended(client, cluster, f"was not heard for {LEASE_S:g} s")
        assert client.process.poll() is None
        assert not client.family.named(HELPER)
        assert errors.read_text().count("in a row") == 1


def test_they_stay_while_it_is_stopped_and_end_when_nothing_is_heard_of_it(daemons: Daemons, cluster: Cluster) -> None:
    with running(daemons) as client:
        client.process.send_signal(signal.SIGSTOP)
        told = words_of_helpers(cluster)
        wait_until(lambda: len(told) > 25)  # some 20 times in a lease
        assert len(client.living()) == 2
        client.helper().kill()
        wait_ended(client, cluster, f"was not heard for {LEASE_S:g} s")
        os.kill(client.process.pid, signal.SIGKILL)


def test_an_absence_of_controller_and_bus_ends_nothing(daemons: Daemons, cluster: Cluster) -> None:
    with running(daemons) as client:
        told = words_of_helpers(cluster)
        absences: list[tuple[Callable[[], object], Callable[[], object]]] = [
            (functools.partial(daemons.kill, "controller"), daemons.start_controller),
            (daemons.kill_server, daemons.server.start),
        ]
        for leave, come in absences:
            leave()
            time.sleep(LEASE_S + 0.5)  # how long it is away is what is tested
            come()
            told.clear()
            wait_until(lambda: len(told) > 5)  # so the controller, which is there again, had time to judge
            assert len(client.living()) == 2
        client.process.kill()
        wait_ended(client, cluster, "has ended")
