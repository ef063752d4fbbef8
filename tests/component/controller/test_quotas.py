"""Quotas and turns of two teams, with a real server, a real controller, and toy workers."""

from __future__ import annotations

import pytest

from fluster.errors import JobRefusedError, QuotaExceededError
from fluster_bus.messages import JobId, JobStatus
from tests.component.controllers import job_request
from tests.component.tenants import A, B, Tenants
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


async def test_a_quota_is_kept_and_raised_and_lowered_while_jobs_run_and_after_a_restart() -> None:
    async with Tenants() as tenants:
        ours, theirs = tenants.clusters[A], tenants.clusters[B]
        await tenants.set(A, cpus=3)
        for _ in range(2):
            await tenants.add_worker(cpu=4)
        jobs = await ours.launch_many([job_request() for _ in range(8)])
        await tenants.wait_held(a=3)
        waits = "waits for the quota of namespace team-a: 3 of 3 CPUs are used"
        await tenants.wait_explained(A, jobs[-1], waits)
        await theirs.launch_many([job_request() for _ in range(6)])
        await tenants.wait_held(a=3, b=5)
        await tenants.end_one(B)
        await tenants.wait_held(a=3, b=5)
        await tenants.end_one(B)
        await tenants.wait_held(a=3, b=4)
        await tenants.set(A, cpus=4)
        await tenants.wait_held(a=4, b=4)
        await tenants.set(A, cpus=1)
        await tenants.wait_explained(A, jobs[-1], "waits for the quota of namespace team-a: 4 of 1 CPU are used")
        await tenants.restart_controller()
        await wait_until_async(lambda: tenants.running.controller.job_index.shares.used(A).milli_cpus == 4_000)
        await tenants.set(A, cpus=3)
        assert tenants.held()[A] == 4, "what runs goes on"
        await tenants.end_one(A)
        await wait_until_async(lambda: tenants.running.controller.job_index.shares.used(A).milli_cpus == 3_000)
        await tenants.wait_explained(A, jobs[-1], waits)
        await tenants.end_one(A)
        await tenants.wait_held(a=3, b=4)
        assert len({key for worker in tenants.workers for key in worker.claimed}) == 5 + 6


async def test_what_never_fits_into_a_quota_is_refused_with_the_remedy() -> None:
    async with Tenants() as tenants:
        ours = tenants.clusters[A]
        await tenants.set(A, cpus=3, gpus=0)
        with pytest.raises(
            QuotaExceededError, match=r"it needs 4 CPUs, more than the quota of namespace team-a .* --cpus 4"
        ):
            await ours.launch(job_request(cpu=4))
        with pytest.raises(QuotaExceededError, match="its 4 tasks need 4 CPUs together"):
            await ours.launch(job_request(replicas=4, gang=True))
        with pytest.raises(QuotaExceededError) as caught:
            await ours.launch_many([job_request("fits"), job_request("large", cpu=4), job_request("too", replicas=4)])
        assert [job_id.split("-")[0] for job_id in caught.value.accepted] == ["fits", "too"]
        await tenants.clusters[B].launch(job_request(cpu=4))
        # One that was taken in before the quota was made that small waits, and the reason is given.
        await tenants.set(A)
        large = await ours.launch(job_request(cpu=4, scheduling_timeout_s=60))
        await tenants.set(A, cpus=3)
        await tenants.wait_explained(A, large, "it needs 4 CPUs, more than the quota of namespace team-a")


async def test_so_many_jobs_may_wait_and_no_more_also_after_a_restart() -> None:
    async with Tenants() as tenants:
        ours = tenants.clusters[A]
        await tenants.set(A, waiting_jobs=3)
        jobs = await ours.launch_many([job_request("first"), job_request("second", replicas=5)])
        after = await ours.launch(job_request(after=(jobs[0],)))
        refusal = "3 jobs of namespace team-a wait, as many as its quota allows"
        with pytest.raises(QuotaExceededError, match=refusal):
            await ours.launch(job_request())
        with pytest.raises(QuotaExceededError, match=refusal) as caught:
            await ours.launch_many([job_request() for _ in range(20)])
        assert caught.value.accepted == ()
        await tenants.restart_controller()
        with pytest.raises(QuotaExceededError, match=refusal):
            await ours.launch(job_request())
        await tenants.clusters[B].launch(job_request())
        await ours.terminate(after)
        await ours.wait(after, timeout=30)
        with pytest.raises(QuotaExceededError) as caught:
            await ours.launch_many([job_request() for _ in range(70)])
        assert len(caught.value.accepted) == 1, "of many at once as many are taken in as there is room for"
        await tenants.add_worker(cpu=2)
        await tenants.wait_held(a=1, b=1)
        await wait_until_async(lambda: tenants.running.controller.job_index.waiting(A) == 2)
        await ours.launch(job_request("mine", job_id="mine"))
        # What takes the place of one that has ended waits as one that is new does.
        await ours.terminate(jobs[0])
        await ours.wait(jobs[0], timeout=30)
        assert (await ours.poll(JobId("mine"))).status in (JobStatus.PENDING, JobStatus.BUILDING, JobStatus.RUNNING)
        waiting = tenants.running.controller.job_index.waiting(A)
        await tenants.set(A, waiting_jobs=waiting)
        with pytest.raises(JobRefusedError, match="as its quota allows"):
            await ours.launch(job_request("again", job_id=after, on_conflict="replace"))
        assert (await ours.poll(after)).status is JobStatus.KILLED, "it is as it was"
        same = await ours.launch(job_request("mine", job_id="mine", on_conflict="keep"))
        assert same == "mine", "which adds nothing"


async def test_a_team_that_comes_late_has_its_turn_before_one_that_has_the_cluster() -> None:
    async with Tenants() as tenants:
        ours, theirs = tenants.clusters[A], tenants.clusters[B]
        await tenants.add_worker(cpu=4)
        flood = await ours.launch_many([job_request() for _ in range(30)])
        await tenants.wait_held(a=4)
        (job, *_) = await theirs.launch_many([job_request() for _ in range(4)])
        await wait_until_async(lambda: tenants.running.controller.dispatch.is_idle)
        said = "namespace team-b goes first: it holds 0 % of the cluster, team-a 100 %, equal weights"
        await tenants.wait_explained(A, flood[-1], said)
        await tenants.wait_explained(B, job, "; next in line")
        await _let_end_until(tenants, a=2, b=2)
        await tenants.set(B, weight=3)
        await _let_end_until(tenants, a=1, b=3)
        assert sum(len(worker.claimed) for worker in tenants.workers) < 20, "by turns, and not by chance"


async def _let_end_until(tenants: Tenants, *, a: int, b: int) -> None:
    """Tasks of team A end until both hold so many. Now and then room is come upon by an offer that was on its way just then."""
    while tenants.held() != {A: a, B: b}:
        await tenants.end_one(A)
        await wait_until_async(lambda: sum(tenants.held().values()) == a + b)


async def test_a_gang_waits_for_its_quota_as_a_whole_and_is_gathered_when_there_is_room() -> None:
    async with Tenants() as tenants:
        ours = tenants.clusters[A]
        await tenants.set(A, cpus=4)
        for _ in range(2):
            await tenants.add_worker(cpu=4)
        await ours.launch_many([job_request() for _ in range(2)])
        await tenants.wait_held(a=2)
        gang = await ours.launch(job_request("gang", replicas=3, gang=True))
        said = "waits for the quota of namespace team-a: 2 of 4 CPUs are used, and they need 3"
        await wait_until_async(tenants.running.controller.gangs.waiting)
        await tenants.wait_explained(A, gang, said)
        await tenants.end_one(A)
        await tenants.wait_held(a=4)
        await wait_until_async(lambda: len([key for worker in tenants.workers for key, *_ in worker.went]) == 3)
        small = await ours.launch(job_request())
        await tenants.wait_explained(A, small, "waits for the quota of namespace team-a: 4 of 4 CPUs are used")
