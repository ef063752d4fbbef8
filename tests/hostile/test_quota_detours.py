"""A tenant would have more than its quota: by replicas and arrays, by jobs of jobs, or by a worker itself. It has no more."""

from __future__ import annotations

from typing import Any

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.errors import QuotaExceededError
from fluster_bus.core.errors import CredentialsError
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, WorkerId
from tests.component.controllers import job_request
from tests.component.tenants import A, Tenants
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

CPUS = 3


async def check_held(tenants: Tenants) -> None:
    """As many tasks as the quota allows are held, and also after three have ended; the others wait for the quota."""
    controller = tenants.running.controller
    for _ in range(CPUS):
        await tenants.wait_held(a=CPUS)
        await wait_until_async(lambda: controller.dispatch.is_idle)
        assert tenants.held()[A] == CPUS
        assert controller.job_index.shares.used(A).milli_cpus == 1_000 * CPUS
        await tenants.end_one(A)
    await tenants.wait_held(a=CPUS)


@pytest.mark.parametrize("fields", [{"replicas": 9}, {"array": "0-8"}, {"array": "10-90:10"}])
async def test_tasks_of_one_job_count_each(fields: dict[str, Any]) -> None:
    async with Tenants() as tenants:
        await tenants.set(A, cpus=CPUS)
        for _ in range(2):
            await tenants.add_worker(cpu=8)
        await tenants.clusters[A].launch(job_request(**fields))
        await check_held(tenants)


async def test_jobs_of_jobs_count_as_others_do() -> None:
    async with Tenants() as tenants:
        await tenants.set(A, cpus=CPUS, waiting_jobs=9)
        for _ in range(2):
            await tenants.add_worker(cpu=8)
        async with await AsyncCluster.connect(tenants.server.credentials(Role.JOB, A), A) as job:
            parent = await job.launch(job_request("parent", job_id="parent"))
            await tenants.wait_held(a=1)
            await job.launch_many([job_request("child", parent=parent) for _ in range(4)])
            await job.launch(job_request("grandchild", parent=JobId("not-there"), replicas=4))
            await check_held(tenants)
            with pytest.raises(QuotaExceededError, match="needs 4 CPUs"):
                await job.launch(job_request("large", parent=parent, cpu=CPUS + 1))
            with pytest.raises(QuotaExceededError, match="wait, as many as its quota allows"):
                await job.launch_many([job_request("child", parent=parent) for _ in range(20)])
        await wait_until_async(lambda: tenants.running.controller.dispatch.is_idle)
        assert tenants.held()[A] == CPUS


@pytest.mark.parametrize("role", [Role.CLIENT, Role.JOB])
async def test_no_tenant_has_a_worker_run_a_job_past_the_quota(role: Role) -> None:
    async with Tenants() as tenants:
        await tenants.set(A, cpus=CPUS)
        worker = await tenants.add_worker(cpu=8)
        async with await AsyncCluster.connect(tenants.server.credentials(role, A), A) as tenant:
            with pytest.raises(CredentialsError):
                await tenant.run_on_worker(WorkerId("w0"), job_request(cpu=CPUS + 1))
            with pytest.raises(CredentialsError):
                await tenant.drain_worker(WorkerId("w0"))
            await tenant.launch(job_request())
            await tenants.wait_held(a=1)
        assert len(worker.claimed) == 1
