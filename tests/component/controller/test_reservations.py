"""A large task that small ones overtake, with a real server, a real controller, and toy workers."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.core import buckets
from fluster_bus.core.roles import Role
from fluster_bus.messages import WorkerId
from fluster_bus.server import EmbeddedServer
from fluster_services.config import LOCAL_TIMING
from tests.component.controllers import IMPATIENT, NS, S, StartController, StartWorker, job_request
from tests.component.toy_worker import STAY_RUNNING, SUCCEED, ToyWorker, started_at_most_once
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


AGING = dataclasses.replace(LOCAL_TIMING, reserve_after_s=0.2)


async def _end_one(worker: ToyWorker) -> None:
    await worker.end(worker.now_held()[0])


@pytest.mark.parametrize("cpu", [4, 3], ids=["on a level", "between two"])
async def test_a_worker_is_kept_free_for_a_large_task(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker, cpu: int
) -> None:
    running = await start_controller(AGING)
    workers = [await start_worker(f"w{each}", STAY_RUNNING, cpu=cpu, heartbeat_s=0.1) for each in range(2)]
    dispatch = running.controller.dispatch
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([job_request("small") for _ in range(2 * cpu)])
        await wait_until_async(lambda: all(len(worker.held) == cpu for worker in workers))
        large = await cluster.launch(job_request("large", cpu=cpu))
        jobs.append(large)
        for turn in range(1_000):
            if dispatch.reservation is not None:
                break
            # One small task ends, and another takes its room, past the large one.
            jobs.append(await cluster.launch(job_request("small")))
            await _end_one(workers[turn % 2])
            await wait_until_async(
                lambda: dispatch.reservation is not None or all(len(worker.held) == cpu for worker in workers)
            )
        assert dispatch.reservation is not None
        key, (kept,) = dispatch.reservation
        assert key.job_id == large
        said = await cluster.explain(large)
        assert said.endswith(f"others have overtaken it for long, so {kept} is kept free for it")
        free, other = sorted(workers, key=lambda worker: worker.worker_id != kept)
        small = await cluster.launch_many([job_request("small") for _ in range(2 * cpu)])
        jobs += small
        assert (await cluster.explain(small[-1])).endswith(f"{kept} is kept free for {large}, which waits for longer")
        while len(free.held) > 1:
            before = len(free.held)
            await _end_one(free)
            await _end_one(other)
            await wait_until_async(lambda: len(other.held) == cpu)
            assert len(free.held) == before - 1, "what ends there is not followed by what is behind the large one"
        await _end_one(free)
        await wait_until_async(lambda: free.now_held() == [buckets.attempt_key(NS, large, 0, 1)])
        await wait_until_async(lambda: dispatch.reservation is None)
        while len(dispatch.scheduler) or any(worker.held for worker in workers):
            for worker in workers:
                if worker.held:
                    await _end_one(worker)
            await wait_until_async(lambda: not len(dispatch.scheduler) or any(worker.held for worker in workers))
        assert {info.status for info in await cluster.wait(jobs, timeout=60)} == {S}
        assert started_at_most_once(*workers)


async def test_another_worker_is_kept_free_when_the_first_is_lost(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    timing = dataclasses.replace(IMPATIENT, reserve_after_s=0.1, unschedulable_after_s=60)
    running = await start_controller(timing)
    workers = {each: await start_worker(each, STAY_RUNNING, cpu=2, heartbeat_s=0.1) for each in ("w1", "w2")}
    dispatch = running.controller.dispatch
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        await cluster.launch_many([job_request("small") for _ in range(4)])
        await wait_until_async(lambda: all(len(worker.held) == 2 for worker in workers.values()))
        large = await cluster.launch(job_request("large", cpu=2))
        while dispatch.reservation is None:
            await cluster.launch(job_request("small"))
            await _end_one(workers["w2"])
            await wait_until_async(
                lambda: dispatch.reservation is not None or all(len(worker.held) == 2 for worker in workers.values())
            )
        _, (kept,) = dispatch.reservation
        other = WorkerId("w1" if kept == "w2" else "w2")
        await workers[kept].vanish()
        await wait_until_async(lambda: dispatch.reservation is not None and dispatch.reservation[1] == (other,))
        # The tasks of the one that is lost go first: they were submitted before.
        wanted, held = buckets.attempt_key(NS, large, 0, 1), workers[other].held
        while wanted not in held:
            if held:
                await _end_one(workers[other])
            await wait_until_async(lambda: held)


async def test_a_gang_that_came_later_does_not_take_the_worker_that_is_kept_free(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    running = await start_controller(AGING)
    (worker,) = [await start_worker("w1", STAY_RUNNING, cpu=4, heartbeat_s=0.1)]
    dispatch = running.controller.dispatch
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        await cluster.launch_many([job_request("small") for _ in range(4)])
        await wait_until_async(lambda: len(worker.held) == 4)
        large = await cluster.launch(job_request("large", cpu=4))
        while dispatch.reservation is None:
            await cluster.launch(job_request("small"))
            await _end_one(worker)
            await wait_until_async(lambda: dispatch.reservation is not None or len(worker.held) == 4)
        gang = await cluster.launch(job_request("gang", gang=True, replicas=2))
        wanted = buckets.attempt_key(NS, large, 0, 1)
        while wanted not in worker.held:
            assert not any(gang in key for key in worker.held), "it overtook as well"
            if worker.held:
                await _end_one(worker)
            await wait_until_async(lambda: worker.held)
        await _end_one(worker)
        await wait_until_async(lambda: any(gang in key for key in worker.held))


async def test_workers_are_kept_free_for_a_gang(
    own_server: EmbeddedServer, start_controller: StartController, start_worker: StartWorker
) -> None:
    running = await start_controller(AGING)
    workers = [await start_worker(f"w{each}", STAY_RUNNING, cpu=2, heartbeat_s=0.1) for each in range(3)]
    dispatch = running.controller.dispatch
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        jobs = await cluster.launch_many([job_request("small") for _ in range(6)])
        await wait_until_async(lambda: all(len(worker.held) == 2 for worker in workers))
        gang = await cluster.launch(job_request("gang", gang=True, replicas=2, cpu=2))
        jobs.append(gang)
        turns = itertools.cycle(workers)
        while dispatch.reservation is None:
            # One small task ends, and another takes its room, past the gang.
            jobs.append(await cluster.launch(job_request("small")))
            await _end_one(next(turns))
            await wait_until_async(
                lambda: dispatch.reservation is not None or all(len(worker.held) == 2 for worker in workers)
            )
        key, kept = dispatch.reservation
        assert (key.job_id, len(kept)) == (gang, 2)
        said = await cluster.explain(gang)
        assert said.endswith(f"others have overtaken it for long, so {kept[0]} and {kept[1]} are kept free for it")
        behind = await cluster.launch_many([job_request("small") for _ in range(8)])
        behind.append(await cluster.launch(job_request("small-gang", gang=True, replicas=2)))
        told = f"{kept[0]} and {kept[1]} are kept free for {gang}, which waits for longer"
        assert [(await cluster.explain(each)).endswith(told) for each in behind] == [True] * 9
        free = [worker for worker in workers if worker.worker_id in kept]
        (other,) = [worker for worker in workers if worker.worker_id not in kept]
        for _ in range(5):  # four tasks ran there, and perhaps one more was on its way
            small = [(worker, held) for worker in free for held in worker.now_held() if f".{gang}." not in held]
            for worker, held in small[:1]:
                await worker.end(held)
            await _end_one(other)
            await wait_until_async(lambda: len(other.held) == 2)
        await wait_until_async(lambda: all(_holds(worker, gang) for worker in free))
        await wait_until_async(lambda: dispatch.reservation is None)
        for worker in workers:
            worker.plan = lambda _record: SUCCEED
            for held in worker.now_held():
                await worker.end(held)
        assert {info.status for info in await cluster.wait(jobs + behind, timeout=60)} == {S}
        assert started_at_most_once(*workers)


def _holds(worker: ToyWorker, job_id: str) -> bool:
    return any(f".{job_id}." in key for key in worker.held)
