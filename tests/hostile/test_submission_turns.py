"""What one namespace submits keeps no other's waiting: neither jobs of thousands of tasks, nor many that replace others."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.errors import JobRefusedError
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, Namespace
from fluster_bus.server import EmbeddedServer
from fluster_services.config import LOCAL_TIMING
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.submissions import checks, intake, outcomes
from tests.component.controllers import NS, RunningController, job_request
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

OTHER = Namespace("other")
TASKS = 1_000


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(namespaces=(NS, OTHER)) as server:
        yield server


@pytest.fixture
async def controller(own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningController]:
    monkeypatch.setattr(intake, "_RECORDED_AT_ONCE", 2)
    monkeypatch.setattr(outcomes, "_MAX_PARKED", 4)
    running = await RunningController(own_server, LOCAL_TIMING, (NS, OTHER)).start()
    yield running
    await running.stop()


@pytest.fixture
async def attacker(own_server: EmbeddedServer, controller: RunningController) -> AsyncIterator[AsyncCluster]:
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        yield cluster


@pytest.fixture
async def other(own_server: EmbeddedServer, controller: RunningController) -> AsyncIterator[AsyncCluster]:
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, OTHER), OTHER) as cluster:
        yield cluster


def _recorded(controller: RunningController, jobs: list[JobId]) -> int:
    entries = [controller.controller.job_index.get(JobKey(NS, job)) for job in jobs]
    return sum(len(entry.tasks) for entry in entries if entry is not None)


def _are_recorded(controller: RunningController, jobs: list[JobId], tasks: int) -> bool:
    return _recorded(controller, jobs) >= tasks


async def test_jobs_of_many_tasks_are_recorded_beside_those_of_others(
    controller: RunningController, attacker: AsyncCluster, other: AsyncCluster
) -> None:
    jobs = await attacker.launch_many([job_request(cpu=1_000, replicas=TASKS) for _ in range(4)])
    before = _recorded(controller, jobs)
    job = await other.launch(job_request(cpu=1_000, replicas=70))
    assert (await other.poll(job)).tasks is not None
    entry = controller.controller.job_index.get(JobKey(OTHER, job))
    assert entry is not None
    await wait_until_async(lambda: len(entry.tasks) == 70)
    assert _recorded(controller, jobs) - before < 2 * TASKS
    for all_of in range(1, len(jobs) + 1):  # however long all of them take, they go on
        await wait_until_async(functools.partial(_are_recorded, controller, jobs, all_of * TASKS))
    assert _recorded(controller, jobs) == len(jobs) * TASKS


async def test_a_namespace_has_its_part_of_the_replacements_that_wait(
    controller: RunningController, attacker: AsyncCluster, other: AsyncCluster
) -> None:
    for name in ("a", "b", "c"):
        await attacker.launch(job_request(job_id=name, cpu=1_000))
    await other.launch(job_request(job_id="a", cpu=1_000))
    controller.controller.intake.parked.submissions.update({JobKey(NS, JobId(name)): None for name in "xy"})  # type: ignore[misc]
    with pytest.raises(JobRefusedError, match="2 submissions of namespace 'default' wait already"):
        await attacker.launch(job_request(job_id="c", on_conflict="replace"))
    await other.launch(job_request(job_id="a", cpu=1_000, on_conflict="replace"))
    controller.controller.intake.parked.submissions.clear()


async def test_unfinished_jobs_have_so_many_different_needs(
    controller: RunningController, attacker: AsyncCluster, other: AsyncCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five thousand of them, among which each offer was looked for, kept the controller from all else for seconds at a time."""
    monkeypatch.setattr(checks, "MAX_NEEDS", 3)
    first = await attacker.launch(job_request(cpu=1_001))
    for cpu in (1_002, 1_003, 1_003):
        await attacker.launch(job_request(cpu=cpu, after=[first]))
    with pytest.raises(JobRefusedError, match="ask for 3 different ones, which is the most"):
        await attacker.launch(job_request(cpu=1_004))
    await other.launch(job_request(cpu=1_004))
    await attacker.terminate(first)
    await attacker.wait(first, raise_on_failure=False)
    await attacker.launch(job_request(cpu=1_004))
