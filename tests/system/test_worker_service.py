"""What one worker answers to an operator, and to no other user."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fluster.cluster import Cluster
from fluster.cluster.workers import ask_worker
from fluster.errors import JobNotFoundError, WorkerNotFoundError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import server_subjects, subjects
from fluster_bus.core.errors import CredentialsError, ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.messages import (
    AttemptList,
    AttemptLogsReply,
    AttemptLogsRequest,
    AttemptQuery,
    AttemptStatus,
    Capacity,
    Done,
    JobId,
    JobStatus,
    KillAttemptRequest,
    Message,
    ResourceConfig,
    WorkerId,
)
from fluster_bus.messages.parts.resources import GIB
from tests.system.daemons import DEFAULT, PATIENT, Daemons, operated  # noqa: F401 - a fixture
from tests.system.job_requests import command, sleeper, wait_ready
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60
W1 = WorkerId("w1")

Reply = TypeVar("Reply", bound=Message)


@pytest.fixture
def daemons(tmp_path: Path, family: Family) -> Iterator[Daemons]:
    with Daemons(tmp_path, family, timing=PATIENT) as daemons:
        daemons.start_controller()
        daemons.start_worker("w1")
        yield daemons


def ask(cluster: Cluster, verb: str, request: Message, reply: type[Reply], *, worker_id: WorkerId = W1) -> Reply:
    answer: Reply = cluster.portal.run(ask_worker, cluster.asynchronous.bus, worker_id, verb, request, reply)
    return answer


def query(job_id: JobId, **fields: Any) -> AttemptQuery:
    return AttemptQuery(namespace=DEFAULT, job_id=job_id, **fields)


def test_it_tells_what_it_runs_and_stops_one_of_it(cluster: Cluster) -> None:
    two = cluster.launch(sleeper(replicas=2, max_task_failures=1))
    wait_ready(cluster, two, lines=2)
    wait_until(lambda: all(each.pid for each in ask(cluster, "list", Done(), AttemptList).attempts))
    listed = ask(cluster, "list", Done(), AttemptList)
    assert [(each.job_id, each.task, each.attempt, each.phase) for each in listed.attempts] == [
        (two, 0, 1, "running"),
        (two, 1, 1, "running"),
    ]
    status = ask(cluster, "status", query(two, task=1), AttemptStatus)
    assert status.pid is not None
    assert "sleep" in Path(f"/proc/{status.pid}/cmdline").read_text()
    kill = KillAttemptRequest(namespace=DEFAULT, job_id=two, task=1, reason="just this one")
    assert ask(cluster, "kill", kill, AttemptStatus).task == 1
    wait_until(lambda: cluster.poll(two).tasks[1].status is JobStatus.KILLED)
    info = cluster.poll(two)
    assert (info.tasks[1].error_message, info.tasks[0].status) == ("just this one", JobStatus.RUNNING)
    with pytest.raises(JobNotFoundError, match="has no attempt of task 1"):
        ask(cluster, "status", query(two, task=1), AttemptStatus)
    with pytest.raises(JobNotFoundError, match="has no attempt 2 of task 0"):
        ask(cluster, "kill", KillAttemptRequest(namespace=DEFAULT, job_id=two, attempt=2), AttemptStatus)
    cluster.terminate(two)
    cluster.wait(two, timeout=PATIENCE_S)
    wait_until(lambda: ask(cluster, "list", Done(), AttemptList).attempts == ())


def test_by_force_it_stops_at_once_what_makes_use_of_its_grace(cluster: Cluster, daemons: Daemons) -> None:
    slow = dataclasses.replace(PATIENT, kill_grace_s=600, worker_timeout_s=700)
    daemons.start_worker("slow", timing=slow, total=Capacity(cpu=16, memory=64 * GIB, labels=("is=slow",)))
    stubborn = "trap 'echo not yet' TERM; echo ready; while :; do sleep 600 & wait; done"
    job_id = cluster.launch(command("sh", "-c", stubborn, resources=ResourceConfig(labels={"is": "slow"})))
    wait_ready(cluster, job_id)
    kill = KillAttemptRequest(namespace=DEFAULT, job_id=job_id, reason="enough")
    ask(cluster, "kill", kill, AttemptStatus, worker_id=WorkerId("slow"))
    wait_until(lambda: [line.text for line in cluster.logs(job_id)] == ["ready", "not yet"])
    assert cluster.poll(job_id).status is JobStatus.RUNNING
    ask(cluster, "kill", kill.model_copy(update={"force": True}), AttemptStatus, worker_id=WorkerId("slow"))
    assert cluster.wait(job_id, timeout=PATIENCE_S).status is JobStatus.KILLED


def test_it_shows_the_end_of_the_output_as_asked(cluster: Cluster) -> None:
    job_id = cluster.launch(command("sh", "-c", "seq 1000; echo oops >&2; echo ready; exec sleep 600"))

    def lines(**fields: Any) -> list[str]:
        request = AttemptLogsRequest(namespace=DEFAULT, job_id=job_id, **fields)
        return [line.text for line in ask(cluster, "logs", request, AttemptLogsReply).lines]

    wait_ready(cluster, job_id, lines=1001)
    wait_until(lambda: lines(stream="stderr") == ["oops"])
    assert lines(tail=2, stream="stdout") == ["1000", "ready"]
    assert lines(tail=2, grep="^99[0-9]$") == ["998", "999"]
    assert len(lines()) == 100
    assert lines(tail=0) == []
    assert lines(since=1e12) == []
    with pytest.raises(ServiceError, match=r"grep='\(': invalid regular expression"):
        lines(grep="(")
    cluster.terminate(job_id)
    cluster.wait(job_id, timeout=PATIENCE_S)


def test_it_tells_how_it_is(cluster: Cluster) -> None:
    health = cluster.worker_health(W1)
    assert (health.worker_id, health.problems, health.draining, health.running) == ("w1", (), False, 0)
    assert health.disk_free > 0
    assert health.limits.startswith("limits of tasks are not enforced")
    with pytest.raises(WorkerNotFoundError, match="'w2'"):
        cluster.worker_health(WorkerId("w2"))


def test_one_that_has_as_many_tasks_as_it_may_waits_for_the_end_of_one(cluster: Cluster, daemons: Daemons) -> None:
    few = WorkerId("few")
    labels = {"has": "one"}
    daemons.start_worker(few, total=Capacity(cpu=16, memory=64 * GIB, tasks=1, labels=("has=one",)))
    first, second = (cluster.launch(sleeper(resources=ResourceConfig(cpu=0, labels=labels))) for _ in range(2))
    wait_ready(cluster, first)
    wait_until(lambda: "1 of 1 tasks that may run there at once are busy" in cluster.explain(second))
    health = cluster.worker_health(few)
    assert (health.takes_work, health.running, health.total.tasks, health.free.tasks) == (False, 1, 1, 0)
    assert cluster.worker_health(W1).takes_work
    cluster.terminate(first)
    wait_ready(cluster, second)
    cluster.terminate(second)
    cluster.wait(second, timeout=PATIENCE_S)


def test_plain_tools_see_its_verbs(cluster: Cluster) -> None:
    async def info(bus: Bus) -> bytes:
        return (await bus.request(server_subjects.service_verb("INFO", "fluster-worker", "w1"))).data

    told = json.loads(cluster.portal.run(info, cluster.asynchronous.bus))
    assert {each["name"]: each["subject"] for each in told["endpoints"]} == {
        verb: f"fluster.sys.workers.w1.{verb}"
        for verb in ("offer", "run", "status", "list", "logs", "stack", "flush", "kill", "health", "drain")
    }


@pytest.mark.parametrize("role", [Role.CLIENT, Role.JOB])
@pytest.mark.parametrize("verb", subjects.WORKER_VERBS)
def test_tenants_may_not_ask_it(daemons: Daemons, role: Role, verb: str) -> None:
    async def refused() -> None:
        bus = await Bus.connect(daemons.server.credentials(role, DEFAULT), name="tenant")
        try:
            with pytest.raises(CredentialsError, match="other credentials"):
                await ask_worker(bus, W1, verb, Done(), Done)
        finally:
            await bus.close()

    asyncio.run(refused())


def test_the_command_line_asks_it(cluster: Cluster, daemons: Daemons) -> None:
    def fluster(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from fluster.cli import main; main()", *words],
            env={**os.environ, "FLUSTER_CLUSTER_ADDRESS": daemons.address},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    job_id = cluster.launch(sleeper())
    wait_ready(cluster, job_id)
    assert "problems     none" in fluster("worker", "health", "w1").stdout
    assert "problems     none" in fluster("worker", "health", "w").stdout, "there is only one that begins so"
    assert job_id in fluster("worker", "list", "w1").stdout
    (listed,) = json.loads(fluster("worker", "list", "w1", "--output", "json").stdout)["attempts"]
    assert (listed["job_id"], listed["phase"]) == (job_id, "running")
    assert fluster("worker", "status", "w1", job_id).stdout.splitlines()[1].split()[1:5] == [
        job_id,
        "0",
        "1",
        "running",
    ]
    assert fluster("worker", "logs", "w1", job_id).stdout == "ready\n"
    assert fluster("worker", "logs", "w", job_id[:-2]).stdout == "ready\n"
    missing = fluster("worker", "health", "w9")
    assert (missing.returncode, missing.stdout) == (4, "")
    assert fluster("worker", "kill", "w1", job_id).stdout == f"{job_id}.0.1\n"
    assert cluster.wait(job_id, timeout=PATIENCE_S).error_message == "killed by fluster worker kill"
    assert fluster("worker", "drain", "w1", "--wait").stdout == "w1\n"
    assert json.loads(fluster("--output", "json", "workers").stdout) == []
