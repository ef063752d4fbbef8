"""Jobs that launch jobs, and wait for jobs, as many and as deep as a tenant likes: the controller looks at few of them at a time."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.cluster.client import AsyncCluster
from fluster.errors import JobRefusedError
from fluster_bus.messages import JobId, Namespace
from fluster_services.controller.state.dirty_jobs import DirtyJobs
from fluster_services.controller.state.families import MAX_DEPTH, Families
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.submissions import checks
from tests.component.controllers import NS, RunningController, job_request
from tests.waiting import wait_until_async

MANY = 2_000


class Counted(str):
    """A key that counts how often anything is looked up by one."""

    __slots__ = ()
    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return super().__hash__()


def test_the_end_of_one_of_many_costs_no_look_at_the_others() -> None:
    """Two levels below a job, 5,000 that had ended took half a second, again for each that ended."""
    families: Families[Counted] = Families()
    families.put(Counted("g"), parent=None, task=None, is_finished=False)
    families.put(Counted("p"), parent=Counted("g"), task=0, is_finished=True)
    for number in range(MANY):
        families.put(Counted(number), parent=Counted("p"), task=0, is_finished=False)
    for number in range(MANY - 1):
        families.put(Counted(number), parent=Counted("p"), task=0, is_finished=True)
    Counted.looked_up = 0
    assert families.launching_tasks(Counted("g")) == {0}
    assert families.unfinished(Counted("p")) == str(MANY - 1)
    families.put(Counted(MANY - 1), parent=Counted("p"), task=0, is_finished=True)
    assert families.relieved(Counted(MANY - 1)) == ["p", "g"]
    assert families.launching_tasks(Counted("g")) == frozenset()
    assert families.unfinished(Counted("p")) is None
    assert Counted.looked_up < 100


def _below(launched_by: dict[int, tuple[int, int]], key: int) -> set[int]:
    found, ahead = {key}, [key]
    while ahead:
        above = ahead.pop()
        ahead += [child for child, (parent, _) in launched_by.items() if parent == above and child not in found]
        found.update(ahead)
    return found


NUMBER = st.integers(min_value=0, max_value=5)
STEPS = st.lists(st.tuples(NUMBER, st.none() | NUMBER, st.integers(0, 1), st.booleans(), st.booleans()), max_size=12)


@given(STEPS)
def test_families_know_what_a_search_would_find(steps: list[tuple[int, int | None, int, bool, bool]]) -> None:
    families: Families[int] = Families()
    launched_by: dict[int, tuple[int, int]] = {}
    unfinished: set[int] = set()
    for key, parent, task, is_finished, is_removed in steps:
        if is_removed:
            families.remove(key)
            launched_by = {child: link for child, link in launched_by.items() if key not in (child, link[0])}
            unfinished.discard(key)
        elif parent is None or families.may_launch(parent, key):
            families.put(key, parent=parent, task=task, is_finished=is_finished)
            launched_by.pop(key, None)
            if parent is not None:
                launched_by[key] = parent, task
            (unfinished.discard if is_finished else unfinished.add)(key)
        for each in range(6):
            left = _below(launched_by, each) & unfinished
            assert families.is_live(each) == bool(left)
            assert (families.unfinished(each) in left) if left else families.unfinished(each) is None
            assert families.children(each) == {child for child, (above, _) in launched_by.items() if above == each}
            live = {t for child, (above, t) in launched_by.items() if above == each and families.is_live(child)}
            assert families.launching_tasks(each) == live


def test_jobs_in_a_circle_end_every_search() -> None:
    """From records of older controllers; new ones are refused."""
    families: Families[int] = Families()
    for key, parent in ((1, 2), (2, 1), (3, 3)):
        families.put(key, parent=parent, task=0, is_finished=False)
    assert not families.may_launch(1, 2)
    assert not families.may_launch(3, 3)
    assert not families.may_launch(2, 4)
    for key, parent in ((1, 2), (2, 1), (3, 3)):
        families.put(key, parent=parent, task=0, is_finished=True)
        assert families.unfinished(key) in (None, 2)
        families.relieved(key)
    families.remove(1)
    families.remove(3)
    assert families.unfinished(2) is None


async def _order(jobs: DirtyJobs, count: int) -> list[str]:
    taken = [await jobs.take() for _ in range(count)]
    for key in taken:
        jobs.done(key)
    return [key.namespace for key in taken]


@pytest.mark.anyio
async def test_what_follows_from_the_jobs_of_one_namespace_keeps_no_other_waiting() -> None:
    jobs = DirtyJobs()
    for number in range(100):
        jobs.mark(JobKey(Namespace("a"), JobId(f"j{number}")))
    jobs.mark(JobKey(Namespace("b"), JobId("j")))
    assert await _order(jobs, 3) == ["a", "b", "a"]
    assert await _order(jobs, 98) == ["a"] * 98
    waiting = asyncio.create_task(jobs.take())
    await asyncio.sleep(0)
    assert not waiting.done(), "nothing is left"
    jobs.mark(JobKey(Namespace("b"), JobId("k")))
    assert (await waiting).job_id == "k"


@pytest.mark.anyio
async def test_a_job_that_changes_while_it_is_looked_at_is_looked_at_again_after_that() -> None:
    jobs, key = DirtyJobs(), JobKey(Namespace("a"), JobId("j"))
    jobs.mark(key)
    assert await jobs.take() == key
    jobs.mark(key)
    jobs.mark(key)
    again = asyncio.create_task(jobs.take())
    await asyncio.sleep(0)
    assert not again.done(), "by one at a time"
    jobs.done(key)
    assert await again == key
    jobs.done(key)
    third = asyncio.create_task(jobs.take())
    await asyncio.sleep(0)
    assert not third.done(), "it was marked twice, and is looked at once"
    third.cancel()


@pytest.mark.anyio
async def test_a_job_is_taken_by_one_of_those_that_wait_also_when_the_one_that_was_woken_is_cancelled() -> None:
    jobs, key = DirtyJobs(), JobKey(Namespace("a"), JobId("j"))
    takers = [asyncio.create_task(jobs.take()) for _ in range(3)]
    await asyncio.sleep(0)
    jobs.mark(key)
    takers[0].cancel()
    assert await takers[1] == key
    await asyncio.sleep(0)
    assert not takers[2].done(), "there was one job"
    jobs.mark(JobKey(Namespace("a"), JobId("k")))
    assert (await takers[2]).job_id == "k"


@pytest.mark.anyio
async def test_jobs_are_launched_from_within_one_another_so_often_and_in_no_circle(
    cluster: AsyncCluster, controller: RunningController
) -> None:
    parent = None
    for number in range(MAX_DEPTH):
        request = job_request(job_id=f"j{number}", parent=parent, cpu=1_000)
        parent = await cluster.launch(request)
    with pytest.raises(JobRefusedError, match="100 jobs were launched from within one another"):
        await cluster.launch(job_request(job_id="one-more", parent=parent))
    await cluster.launch(job_request(job_id="x", parent="y", cpu=1_000))
    with pytest.raises(JobRefusedError, match="'y' is above it itself"):
        await cluster.launch(job_request(job_id="y", parent="x"))
    await cluster.terminate(JobId("j0"))
    job_index = controller.controller.job_index
    await wait_until_async(lambda: job_index.unfinished(JobKey(NS, JobId("j0"))) is None)


@pytest.mark.anyio
async def test_jobs_that_wait_name_so_many_others(
    cluster: AsyncCluster, controller: RunningController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MAX_DEPENDENCIES", 5)
    first = [await cluster.launch(job_request(cpu=1_000)) for _ in range(3)]
    waiting = await cluster.launch(job_request(after=first))
    with pytest.raises(JobRefusedError, match="let one job wait for them"):
        await cluster.launch(job_request(after=first))
    await cluster.terminate(waiting)
    await cluster.wait(waiting, raise_on_failure=False)
    await cluster.launch(job_request(after=first))
