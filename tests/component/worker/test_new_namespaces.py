"""Namespaces that a worker serves from when the credentials of their jobs come into its folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.cluster.namespaces import NamespaceAdmin
from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, Done, JobId, Namespace, Offer, OfferReply, WorkerHealth, WorkerId
from fluster_bus.messages.parts.resources import GIB
from fluster_bus.server import EmbeddedServer
from fluster_bus.trust.authority import Authority
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.presence.presence import Draining
from fluster_services.worker.worker import Worker
from tests.component.controllers import IMPATIENT, NS, RunningController, job_request
from tests.component.guarded_server import GuardedServer
from tests.component.no_runtime import NoRuntime
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

TEAM = Namespace("team-a")
StartWorker = Callable[[BusAddress, BusAddress], Awaitable[Path]]


@pytest.fixture
async def start_worker(tmp_path: Path) -> AsyncIterator[StartWorker]:
    """(the worker's credentials, those of jobs of `default`) -> the folder for further ones"""
    async with AsyncExitStack() as stack:

        async def start(address: BusAddress, job: BusAddress) -> Path:
            folder = tmp_path / "jobs"
            folder.mkdir()
            config = WorkerConfig(
                address=address,
                worker_id=WorkerId("w1"),
                state_dir=tmp_path / "w1",
                total=Capacity(cpu=1, memory=GIB),
                job_credentials={NS: job},
                job_credentials_dir=folder,
                timing=IMPATIENT,
            )
            config.state_dir.mkdir()
            bus = await Bus.connect(address, name="w1")
            stack.push_async_callback(bus.close)
            ready = asyncio.Event()
            running = asyncio.create_task(Worker(bus, config, NoRuntime(), Draining()).run(ready.set))

            async def end() -> None:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

            stack.push_async_callback(end)
            await ready.wait()
            return folder

        yield start


async def _health(operator: Bus) -> WorkerHealth:
    return await operator.ask(subjects.worker_verb("w1", "health"), Done(), WorkerHealth, timeout_s=10)


async def _is_served(operator: Bus) -> bool:
    workers = await AsyncCluster(operator, NS).list_workers()
    return [each.info.total.namespaces for each in workers] == [(NS, TEAM)]


async def test_a_signed_worker_says_why_it_cannot_serve_what_its_credentials_do_not_name(
    tmp_path: Path, start_worker: StartWorker
) -> None:
    authority = Authority.of_cluster(tmp_path / "authority")
    with EmbeddedServer(namespaces=(NS,), authority=authority) as server:
        guarded = GuardedServer(server, authority, (NS, TEAM))
        controller = RunningController(guarded, IMPATIENT)  # type: ignore[arg-type]
        await controller.start()
        operator = await Bus.connect(guarded.credentials(Role.OPERATOR), name="operator")
        try:
            folder = await start_worker(
                guarded.credentials(Role.WORKER, serves=(NS,)), guarded.credentials(Role.JOB, NS)
            )
            await NamespaceAdmin(operator).add(TEAM)
            assert (await _health(operator)).problems == ()
            guarded.credentials(Role.JOB, TEAM).save(folder / "team-a.creds")

            async def told() -> bool:
                problem = " ".join((await _health(operator)).problems)
                return (
                    "worker w1 cannot serve namespace 'team-a': its own credentials are signed for default; " in problem
                    and "`fluster credentials add worker NAME --namespace team-a`" in problem
                )

            await wait_until_async(told)
            assert (await _health(operator)).takes_work  # for what it does serve
            async with await AsyncCluster.connect(operator.address, TEAM) as cluster:
                job = await cluster.launch(job_request())
                why = await cluster.explain(job)
            assert "no worker runs jobs of namespace team-a (those that there are run jobs of default)" in why
            assert "`fluster credentials add worker NAME --namespace team-a`" in why
            (folder / "team-a.creds").unlink()

            async def is_well() -> bool:
                return (await _health(operator)).problems == ()

            await wait_until_async(is_well)
        finally:
            await operator.close()
            await controller.stop()


async def test_a_signed_worker_begins_to_serve_what_its_credentials_name_when_those_of_jobs_come(
    tmp_path: Path, start_worker: StartWorker
) -> None:
    authority = Authority.of_cluster(tmp_path / "authority")
    with EmbeddedServer(namespaces=(NS,), authority=authority) as server:
        guarded = GuardedServer(server, authority, (NS, TEAM))
        controller = RunningController(guarded, IMPATIENT)  # type: ignore[arg-type]
        await controller.start()
        operator = await Bus.connect(guarded.credentials(Role.OPERATOR), name="operator")
        try:
            worker = guarded.credentials(Role.WORKER, serves=(NS, TEAM))
            folder = await start_worker(worker, guarded.credentials(Role.JOB, NS))
            assert not await _is_served(operator)
            guarded.credentials(Role.JOB, TEAM).save(folder / "team-a.creds")
            await wait_until_async(lambda: _is_served(operator))
            assert BusAddress.parse(str(tmp_path / "w1/credentials/team-a.json")).namespaces == (TEAM,)
            # It listens before the namespace is there, and knows of no such task once it is.
            await NamespaceAdmin(operator).add(TEAM)
            offer = Offer(namespace=TEAM, job_id=JobId("none"), task=0, attempt=1, revision=1)
            reply = await operator.ask(subjects.worker_verb("w1", "offer"), offer, OfferReply, timeout_s=10)
            assert (reply.accepted, reply.reason) == (False, "no such record here")
        finally:
            await operator.close()
            await controller.stop()


async def test_a_server_with_passwords_is_waited_for_until_it_lets_the_worker(start_worker: StartWorker) -> None:
    with EmbeddedServer(namespaces=(NS,)) as server:
        controller = await RunningController(server, IMPATIENT).start()
        operator = await Bus.connect(server.credentials(Role.OPERATOR), name="operator")
        try:
            folder = await start_worker(server.credentials(Role.WORKER), server.credentials(Role.JOB, NS))
            BusAddress(server.credentials(Role.JOB, NS).url, "job_team-a", "p").save(folder / "job_team-a.json")

            async def told() -> bool:
                problem = " ".join((await _health(operator)).problems)
                return "worker w1 cannot serve namespace 'team-a' yet: the server does not let it; make the" in problem

            await wait_until_async(told)
            assert not await _is_served(operator)
            server.add_namespace(TEAM)
            await wait_until_async(lambda: _is_served(operator))
            assert (await _health(operator)).problems == ()
        finally:
            await operator.close()
            await controller.stop()
