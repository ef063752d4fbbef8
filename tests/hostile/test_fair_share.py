"""One namespace submits as much as it can, with the highest priority there is: others have their turn, and no line is without end."""

from __future__ import annotations

import pytest

from fluster.errors import QuotaExceededError
from fluster_bus.messages import JobId, ResourceConfig
from tests.component.controllers import job_request
from tests.component.tenants import A, B, Tenants
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


async def test_a_flood_of_the_highest_priority_keeps_no_other_namespace_waiting() -> None:
    async with Tenants() as tenants:
        for _ in range(2):
            await tenants.add_worker(cpu=4)
        flood = [job_request(priority=1_000, replicas=20) for _ in range(10)]
        await tenants.clusters[A].launch_many(flood)
        await tenants.wait_held(a=8)
        await tenants.clusters[B].launch_many([job_request() for _ in range(8)])
        while tenants.held()[B] < 4:
            await tenants.end_one(A)
            await wait_until_async(lambda: sum(tenants.held().values()) == 8)
        assert sum(len(worker.claimed) for worker in tenants.workers) < 24, "by turns, and not by chance"
        # Operators may let it go first.
        await tenants.set(A, max_priority=1_000)
        for _ in range(4):
            await tenants.end_one(B)
            await wait_until_async(lambda: sum(tenants.held().values()) == 8)
        assert tenants.held()[A] >= 7


async def test_large_tasks_of_one_namespace_have_no_workers_kept_free_while_another_has_less() -> None:
    async with Tenants() as tenants:
        worker = await tenants.add_worker(cpu=4)
        await tenants.clusters[A].launch_many([job_request("small") for _ in range(30)])
        await tenants.wait_held(a=4)
        await tenants.clusters[A].launch_many([job_request("large", cpu=4) for _ in range(3)])
        await tenants.clusters[B].launch_many([job_request() for _ in range(3)])
        for _ in range(4):
            await tenants.end_one(A)
            await wait_until_async(lambda: len(worker.held) == 4)
        assert tenants.held()[B] >= 2
        assert tenants.running.controller.dispatch.reservation is None


async def test_so_many_jobs_wait_as_the_quota_allows_whatever_way_they_come() -> None:
    async with Tenants() as tenants:
        ours = tenants.clusters[A]
        await tenants.set(A, waiting_jobs=5)
        first = await ours.launch(job_request("first", job_id="first"))
        with pytest.raises(QuotaExceededError) as caught:
            await ours.launch_many([job_request(after=(JobId(first),)) for _ in range(200)])
        assert len(caught.value.accepted) == 4, "those that wait for others wait, too"
        # A job that ended does not get around it.
        await ours.terminate(JobId(first))
        await ours.wait(JobId(first), timeout=30)
        with pytest.raises(QuotaExceededError):
            await ours.launch_many([job_request() for _ in range(200)])
        assert tenants.running.controller.job_index.waiting(A) == 5
        with pytest.raises(QuotaExceededError):
            await ours.launch(job_request("first", job_id="first", on_conflict="replace"))
        assert tenants.running.controller.job_index.waiting(A) == 5
        await tenants.clusters[B].launch_many([job_request() for _ in range(20)])


async def test_tasks_of_many_kinds_take_no_more_than_the_quota_together() -> None:
    async with Tenants() as tenants:
        await tenants.set(A, cpus=4, memory=3 << 30)
        for _ in range(3):
            await tenants.add_worker(cpu=8)
        kinds = [
            job_request(f"kind{memory}", replicas=3).model_copy(
                update={"resources": ResourceConfig.with_cpu(cpu, memory=memory)}
            )
            for cpu in (0.5, 1, 1.5, 3)
            for memory in (0, 1 << 20, 1 << 29, 1 << 30)
        ]
        await tenants.clusters[A].launch_many([*kinds, job_request("gang", replicas=3, gang=True)])
        shares, dispatch = tenants.running.controller.job_index.shares, tenants.running.controller.dispatch
        for _ in range(30):
            await wait_until_async(lambda: dispatch.is_idle)
            held = [row.value.resources for worker in tenants.workers for row in worker.held.values()]
            assert sum(each.cpu for each in held) <= 4
            assert sum(each.memory for each in held) <= 3 << 30
            assert shares.used(A).milli_cpus <= 4_000
            await wait_until_async(lambda: tenants.held()[A] > 0)
            await tenants.end_one(A)
