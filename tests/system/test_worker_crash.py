"""A worker that ends in the middle of a start: what has begun is its successor's, and is not begun a second time."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import DisconnectedError
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, JobStatus, WorkerId
from fluster_bus.messages.parts.resources import GIB
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.keeper.template import TemplateHandle
from fluster_services.worker.presence.presence import Draining
from fluster_services.worker.runtimes.process_runtime import ProcessRuntime
from fluster_services.worker.worker import Worker
from tests.system.daemons import DEFAULT, PATIENT, Daemons
from tests.system.job_requests import command
from tests.system.processes import Family
from tests.system.runtime_site import Site
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

PATIENCE_S = 60


class Lives:
    """One worker of this process, run again and again over the same folder, with connections of its own."""

    def __init__(self, daemons: Daemons, site: Site, folder: Path) -> None:
        self._daemons = daemons
        self._site = site
        self._folder = folder
        self.running: asyncio.Task[None] | None = None

    async def begin(self, *, prepare: Callable[[Bus], object] = lambda _bus: None) -> None:
        """Run it until `end`, or until it ends by itself; returns when it takes offers."""
        self._site.runtime = runtime = ProcessRuntime(self._site.state_dir, self._site.template)
        bus = await Bus.connect(self._daemons.server.credentials(Role.SERVICE), name="w1")
        prepare(bus)
        config = WorkerConfig(
            address=bus.address,
            worker_id=WorkerId("w1"),
            state_dir=self._folder,
            total=Capacity(cpu=16, memory=64 * GIB),
            job_credentials={DEFAULT: self._daemons.server.credentials(Role.JOB, DEFAULT)},
            timing=PATIENT,
            working_dir=self._folder,
        )
        ready = asyncio.Event()

        async def serve() -> None:
            try:
                await Worker(bus, config, runtime, Draining()).run(ready.set)
            finally:
                ready.set()
                await bus.close()

        self.running = asyncio.create_task(serve())
        await ready.wait()

    def cancel(self) -> None:
        """End it in good order."""
        assert self.running is not None
        self.running.cancel()

    async def end(self) -> None:
        """Return when it has ended."""
        self.cancel()
        assert self.running is not None
        await asyncio.wait({self.running})


@pytest.fixture
def begin_then(shared_template: tuple[TemplateHandle, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have something done once: when a keeper was forked and `has_begun`, but no process heard of it."""
    template, _ = shared_template
    fork = template.fork_keeper

    def arrange(has_begun: Callable[[], bool], action: Callable[[], object]) -> None:
        async def fork_then(draft: Path, directory: Path) -> int:
            pid = await fork(draft, directory)
            monkeypatch.setattr(template, "fork_keeper", fork)
            await wait_until_async(has_begun, PATIENCE_S)
            action()
            return pid

        monkeypatch.setattr(template, "fork_keeper", fork_then)

    return arrange


async def test_what_had_begun_is_not_begun_again(
    site: Site, tmp_path: Path, family: Family, begin_then: Callable[..., None]
) -> None:
    await site.runtime.close()
    starts, gate = tmp_path / "starts", tmp_path / "gate"
    starts.touch()
    with Daemons(tmp_path / "cluster", family) as daemons:
        await asyncio.to_thread(daemons.start_controller)
        lives = Lives(daemons, site, tmp_path)
        begin_then(lambda: starts.read_text() != "", lives.cancel)
        await lives.begin()
        async with await AsyncCluster.connect(daemons.address) as cluster:
            script = f"echo $FLUSTER_ATTEMPT >> {starts}; while ! test -e {gate}; do sleep 0.02; done; exit 3"
            job_id = await cluster.launch(command("sh", "-c", script))
            assert lives.running is not None
            await asyncio.wait({lives.running}, timeout=PATIENCE_S)
            assert lives.running.cancelled()
            await lives.begin()
            gate.touch()
            info = await cluster.wait(job_id, timeout=PATIENCE_S)
        await lives.end()
    assert (info.status, info.exit_code, info.tasks[0].preemptions) == (JobStatus.FAILED, 3, 0)
    assert starts.read_text() == "1\n"


async def test_a_connection_lost_while_offers_are_first_listened_to_is_no_reason_to_end(
    site: Site, tmp_path: Path, family: Family
) -> None:
    """By then some are listened to, and what they offered has begun."""
    await site.runtime.close()

    def lose_first_flush(bus: Bus) -> None:
        flush = bus.flush

        async def lost() -> None:
            bus.flush = flush  # type: ignore[method-assign]
            raise DisconnectedError("the connection is lost; it is being rebuilt")

        bus.flush = lost  # type: ignore[method-assign]

    with Daemons(tmp_path / "cluster", family) as daemons:
        await asyncio.to_thread(daemons.start_controller)
        lives = Lives(daemons, site, tmp_path)
        await lives.begin(prepare=lose_first_flush)
        async with await AsyncCluster.connect(daemons.address) as cluster:
            info: Any = await cluster.wait(await cluster.launch(command("true")), timeout=PATIENCE_S)
        await lives.end()
    assert info.status is JobStatus.SUCCEEDED
