"""Controllers in the process of a test, on a real server, and what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import Entrypoint, Event, JobId, JobRequest, JobStatus, Namespace, ResourceConfig
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.feeds import Feed
from fluster_services.config import Timing
from fluster_services.controller.controller import Controller, ControllerConfig
from tests.component.toy_worker import ToyWorker
from tests.insides import nats_client_of
from tests.waiting import wait_until_async

NS = Namespace("default")
IMPATIENT = Timing(
    heartbeat_s=0.1, fence_after_s=1.0, worker_timeout_s=2.0, kill_grace_s=0.1, unschedulable_after_s=0.3
)
S, F, K, W, U = (
    JobStatus.SUCCEEDED,
    JobStatus.FAILED,
    JobStatus.KILLED,
    JobStatus.WORKER_FAILED,
    JobStatus.UNSCHEDULABLE,
)


class RunningController:
    """A controller on a connection of its own; when the test ends it must still be there."""

    def __init__(
        self, server: EmbeddedServer, timing: Timing, namespaces: tuple[Namespace, ...] = (NS,), **more: Any
    ) -> None:
        """`more` are further fields of its ControllerConfig."""
        self._server = server
        self._namespaces = namespaces
        self._timing = timing
        self._more = more
        self.bus: Bus
        self.controller: Controller
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> RunningController:
        address = self._server.credentials(Role.SERVICE)
        self.bus = await Bus.connect(address, name="controller")
        config = ControllerConfig(address=address, timing=self._timing, namespaces=self._namespaces, **self._more)
        self.controller = Controller(self.bus, config)
        ready = asyncio.Event()
        self._task = asyncio.create_task(self.controller.run(ready.set))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        waiting.cancel()
        if self._task.done():
            await self._task
        assert ready.is_set()
        return self

    async def stop(self) -> None:
        """As a kill is: nothing is finished first."""
        if self._task is None:
            return
        task, self._task = self._task, None
        if task.done():
            await task  # raises what it died of
            raise AssertionError("the controller ended by itself")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await nats_client_of(self.bus).close()
        await self.bus.close()
        self.controller.job_index.sanity_check()
        self.controller.dispatch.scheduler.sanity_check()


StartController = Callable[..., Awaitable[RunningController]]
StartWorker = Callable[..., Awaitable[ToyWorker]]


def job_request(name: str = "job", *, cpu: float = 1, **fields: object) -> JobRequest:
    return JobRequest(
        name=name,
        entrypoint=Entrypoint(command=("true",)),
        resources=ResourceConfig.with_cpu(cpu),
        retry_backoff_s=0,
        **fields,  # type: ignore[arg-type]
    )


async def published_events(bus: Bus) -> list[Event]:
    feed = Feed(
        bus,
        buckets.events_stream(NS),
        subject=subjects.events_of_all(NS),
        watch=subjects.watch_events(NS),
    )
    return [Event.from_json(entry.data) async for entry in feed.stored()]


async def check_events(bus: Bus, jobs: list[JobId]) -> None:
    """Each transition of each record is published exactly once, and in order."""

    async def told() -> bool:
        """Everything that happened, up to the ends of all jobs."""
        ended = {
            event.job_id
            for event in await published_events(bus)
            if event.task is None and event.transition.state.finished()
        }
        return set(jobs) <= ended

    await wait_until_async(told)
    records: dict[tuple[str, int | None], list[int]] = {}
    for event in await published_events(bus):
        records.setdefault((event.job_id, event.task), []).append(event.transition.number)
    for key, numbers in records.items():
        assert numbers == list(range(1, len(numbers) + 1)), key
    assert {job_id for job_id, _ in records} == set(jobs)


async def are_registered(cluster: AsyncCluster, expected: set[str]) -> bool:
    """Whether these workers, and no others, are registered."""
    return {worker.info.worker_id for worker in await cluster.list_workers()} == expected
