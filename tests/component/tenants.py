"""A cluster that two teams share, in the process of a test: a real server and controller, workers that run nothing."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from typing import Any, Self

from fluster.cluster.client import AsyncCluster
from fluster.cluster.namespaces import NamespaceAdmin
from fluster_bus.connection.bus import Bus
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, JobId, JobStatus, Namespace, WorkerId
from fluster_bus.messages.namespaces import NamespaceQuota
from fluster_bus.server import EmbeddedServer
from fluster_services.config import LOCAL_TIMING, Timing
from tests.component.controllers import RunningController
from tests.component.toy_worker import STAY_RUNNING, ToyWorker
from tests.waiting import wait_until_async

A, B = Namespace("team-a"), Namespace("team-b")
TEAMS = (A, B)
GIB = 1 << 30


class Tenants:
    """Use it as a context. What it started has ended when it is left."""

    def __init__(self, timing: Timing = LOCAL_TIMING) -> None:
        self._timing = timing
        self._stack = AsyncExitStack()
        self.server: EmbeddedServer
        self.running: RunningController
        self.workers: list[ToyWorker] = []
        self.clusters: dict[Namespace, AsyncCluster] = {}

    async def __aenter__(self) -> Self:
        self.server = self._stack.enter_context(EmbeddedServer(namespaces=TEAMS))
        self.running = await self._controller()
        self._admin = NamespaceAdmin(await self._bus(Role.OPERATOR, "operator"))
        for team in TEAMS:
            cluster = await AsyncCluster.connect(self.server.credentials(Role.CLIENT, team), team)
            self.clusters[team] = await self._stack.enter_async_context(cluster)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _controller(self) -> RunningController:
        running = await RunningController(self.server, self._timing, TEAMS).start()
        self._stack.push_async_callback(running.stop)
        return running

    async def restart_controller(self) -> None:
        """Another one leads, which knows what it reads."""
        await self.running.stop()
        self.running = await self._controller()

    async def _bus(self, role: Role, name: str) -> Bus:
        bus = await Bus.connect(self.server.credentials(role), name=name)
        self._stack.push_async_callback(bus.close)
        return bus

    async def add_worker(self, cpu: float = 4) -> ToyWorker:
        name = f"w{len(self.workers)}"
        worker = ToyWorker(
            await self._bus(Role.SERVICE, name),
            WorkerId(name),
            Capacity(cpu=cpu, memory=8 * GIB),
            lambda _record: STAY_RUNNING,
            namespaces=TEAMS,
        )
        self.workers.append(await worker.start())
        return worker

    async def set(self, team: Namespace, *, weight: float = 1.0, **quota: Any) -> None:
        """The team has that quota and that weight from now on."""
        changes: dict[Any, Any] = {**NamespaceQuota().model_dump(), **quota}
        await self._admin.set(team, changes, weight=weight)

    def held(self) -> Counter[Namespace]:
        """{team: how many of its tasks the workers hold}."""
        return Counter(row.value.namespace for worker in self.workers for row in worker.held.values())

    async def wait_held(self, **expected: int) -> None:
        """Return when the teams hold so many tasks each; `a=3, b=5`."""
        wanted = {team: expected.get(team[-1], 0) for team in TEAMS}
        await wait_until_async(lambda: {team: self.held()[team] for team in TEAMS} == wanted)

    async def wait_explained(self, team: Namespace, job: str, said: str) -> None:
        """Return when that is said of a job of the team. Its tasks are recorded a moment after it."""

        last = ""

        async def is_said() -> bool:
            nonlocal last
            last = await self.clusters[team].explain(JobId(job))
            return said in last

        await wait_until_async(is_said, describe=lambda: last)

    async def end_one(self, team: Namespace) -> None:
        """One of the team's tasks ends, while no offer is on its way that could come upon its room by chance."""
        await wait_until_async(lambda: self.running.controller.dispatch.is_idle)
        for worker in self.workers:
            for key, row in sorted(worker.held.items()):
                if row.value.namespace == team:
                    await worker.end(key, JobStatus.SUCCEEDED)
                    return
        raise AssertionError(f"{team} holds nothing")
