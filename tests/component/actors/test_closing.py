"""Waits on a cluster object end at once with an error when another task or thread closes it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from fluster.actors import ActorPool, ActorServer, AsyncActorPool, actor, deploy
from fluster.cluster import Cluster
from fluster.cluster.client import AsyncCluster
from fluster.cluster.refs import _arrived
from fluster.worker_pool import AsyncWorkerPool, WorkerPool
from fluster_bus.access.address import BusAddress
from fluster_bus.core import subjects
from fluster_bus.core.errors import ClosedError
from fluster_bus.core.roles import Role
from fluster_bus.messages import DrainReply, DrainRequest, JobId, WorkerId
from fluster_bus.server import EmbeddedServer
from tests.component.actor_env import Gate
from tests.component.conftest import freeze_server, thaw_server
from tests.component.controllers import StartWorker, job_request
from tests.component.toy_worker import GIB, STAY_RUNNING
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
_ROUND_TRIPS = 30  # after which all that can be answered is
JOB, WORKER, SOURCE = JobId("stays"), WorkerId("w1"), "source"


class Source(Gate):
    def items(self) -> Any:
        yield 1
        self.wait()

    def wait_with(self, _item: int) -> str:
        return self.wait()


class Plain:
    def method(self) -> None: ...


@actor(durable=True)
class Durable:
    def method(self) -> None: ...


def pool_of(cluster: Any, name: str, **options: Any) -> Any:
    return (AsyncActorPool if isinstance(cluster, AsyncCluster) else ActorPool)(cluster, name, **options)


def workers_of(cluster: Any) -> Any:
    return (AsyncWorkerPool if isinstance(cluster, AsyncCluster) else WorkerPool)(cluster, 1, name_prefix="nobody")


# What goes on for as long as the job does, and its worker is there, and no other serves.
WAITS: dict[str, Callable[[Any], Any]] = {
    "wait": lambda cluster: cluster.wait(JOB),
    "wait for several": lambda cluster: cluster.wait([JOB, JOB]),
    "wait_first": lambda cluster: cluster.wait_first([JOB]),
    "watch": lambda cluster: cluster.watch(JOB),
    "result": lambda cluster: cluster.result(JOB),
    "logs": lambda cluster: cluster.logs(JOB, follow=True),
    "drain_worker": lambda cluster: cluster.drain_worker(WORKER, wait=True),
    "deploy": lambda cluster: deploy(cluster, Plain),
    "wait_for_size": lambda cluster: pool_of(cluster, "nobody").wait_for_size(1, timeout=None),
    "wait_for_size of more": lambda cluster: pool_of(cluster, SOURCE).wait_for_size(2, timeout=None),
    "call": lambda cluster: pool_of(cluster, SOURCE).submit().wait(),
    "stream": lambda cluster: pool_of(cluster, SOURCE).submit().items(),
    "broadcast": lambda cluster: pool_of(cluster, SOURCE).broadcast().wait().results(),
    "map": lambda cluster: pool_of(cluster, SOURCE).map().wait_with([1]),
    "durable call": lambda cluster: pool_of(cluster, "durable", actor_class=Durable).submit().method(),
    "wait_for_workers": lambda cluster: workers_of(cluster).wait_for_workers(timeout=None),
    "task": lambda cluster: workers_of(cluster).submit(len, ""),
    "tasks": lambda cluster: workers_of(cluster).map(len, [""]).results(),
    "tasks in any order": lambda cluster: workers_of(cluster).imap_unordered(len, [""]),
}

# All that a cluster can be asked, which waits for an answer.
ASKS: dict[str, Callable[[Any], Any]] = {
    "put": lambda cluster: cluster.put(1),
    "get": lambda cluster: cluster.get(_arrived("id", "_INBOX.operator.nobody", b"")),
    "launch": lambda cluster: cluster.launch(job_request()),
    "launch_many": lambda cluster: cluster.launch_many([job_request(), job_request()]),
    "poll": lambda cluster: cluster.poll(JOB),
    "wait": WAITS["wait"],
    "wait_first": WAITS["wait_first"],
    "watch": WAITS["watch"],
    "result": WAITS["result"],
    "terminate": lambda cluster: cluster.terminate(JOB),
    "explain": lambda cluster: cluster.explain(JOB),
    "list_jobs": lambda cluster: cluster.list_jobs(),
    "logs": lambda cluster: cluster.logs(JOB),
    "list_workers": lambda cluster: cluster.list_workers(),
    "list_nodes": lambda cluster: cluster.list_nodes(),
    "drain_worker": WAITS["drain_worker"],
    "worker_health": lambda cluster: cluster.worker_health(WORKER),
    "run_on_worker": lambda cluster: cluster.run_on_worker(WORKER, job_request()),
    "stack": lambda cluster: cluster.stack(JOB),
    "register_endpoint": lambda cluster: cluster.register_endpoint("a", "b"),
    "unregister_endpoint": lambda cluster: cluster.unregister_endpoint("a"),
    "lookup_endpoints": lambda cluster: cluster.lookup_endpoints("a"),
    "list_endpoints": lambda cluster: cluster.list_endpoints(),
}


async def awaited(call: Callable[[Any], Any], cluster: AsyncCluster) -> object:
    value = call(cluster)
    value = await value if inspect.isawaitable(value) else value
    return [each async for each in value] if isinstance(value, AsyncIterator) else value


def blocked(call: Callable[[Any], Any], cluster: Cluster) -> object:
    value = call(cluster)
    value = value.result() if isinstance(value, Future) else value
    return list(value) if isinstance(value, Iterator) else value


@pytest.fixture
async def address(
    own_server: EmbeddedServer, start_worker: StartWorker, cluster: AsyncCluster
) -> AsyncIterator[BusAddress]:
    """Of a cluster where a job stays, and calls do."""
    worker = await start_worker(WORKER, STAY_RUNNING, cpu=100, memory=100 * GIB)

    async def drain(_request: DrainRequest, _subject: str) -> DrainReply:
        return DrainReply(worker_id=WORKER, running=1)

    await worker.bus.serve(subjects.worker_verb(WORKER, "drain"), DrainRequest, drain)
    await cluster.launch(job_request(job_id=JOB))
    address, source = own_server.credentials(Role.OPERATOR), Source()
    serving = await asyncio.to_thread(Cluster, address)
    server = ActorServer(serving)
    server.register(SOURCE, source)
    await asyncio.to_thread(server.serve_background)
    yield address
    source.opened.set()
    await asyncio.to_thread(serving.close)


def check_closed(outcomes: dict[str, BaseException | str]) -> None:
    assert {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, ClosedError)} == {}


async def outcomes_of(waiting: dict[str, asyncio.Task[object]]) -> dict[str, BaseException | str]:
    """How they end that wait for a cluster object that is being closed."""
    _done, late = await asyncio.wait(waiting.values(), timeout=PATIENCE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return {
        name: "still waits" if task in late else task.exception() or f"gives {task.result()!r}"
        for name, task in waiting.items()
    }


async def test_whoever_awaits_something_is_told(address: BusAddress, caplog: pytest.LogCaptureFixture) -> None:
    cluster = await AsyncCluster.connect(address)
    waiting = {name: asyncio.create_task(awaited(call, cluster)) for name, call in WAITS.items()}
    for _ in range(_ROUND_TRIPS):
        await cluster.list_jobs()
    assert {name: task.exception() or task.result() for name, task in waiting.items() if task.done()} == {}
    await cluster.close()
    check_closed(await outcomes_of(waiting))
    del waiting, cluster
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_whoever_asks_a_server_that_does_not_answer_is_told(
    own_server: EmbeddedServer, address: BusAddress
) -> None:
    public = {name: each for name, each in vars(AsyncCluster).items() if not name.startswith("_")}
    asking = {n for n, each in public.items() if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)}
    asking |= {"logs"}  # which returns an object to be iterated, line by line or in batches
    assert asking - {"close"} == set(ASKS)

    cluster = await AsyncCluster.connect(address)
    freeze_server(own_server)
    waiting = {name: asyncio.create_task(awaited(call, cluster)) for name, call in ASKS.items()}
    await wait_until_async(lambda: cluster.bus.awaited_replies >= len(ASKS))
    closing = asyncio.create_task(cluster.close())
    outcomes = await outcomes_of(waiting)
    thaw_server(own_server)
    await closing
    check_closed(outcomes)


async def test_whoever_blocks_is_told(address: BusAddress) -> None:
    cluster = await asyncio.to_thread(Cluster, address)
    waiting: dict[str, Future[object]] = {name: Future() for name in WAITS}

    def wait(name: str) -> None:
        try:
            waiting[name].set_result(blocked(WAITS[name], cluster))
        except BaseException as error:
            waiting[name].set_exception(error)

    for name in WAITS:
        threading.Thread(target=wait, args=[name], daemon=True).start()
    for _ in range(_ROUND_TRIPS):
        await asyncio.to_thread(cluster.list_jobs)
    assert {name: future.exception() or future.result() for name, future in waiting.items() if future.done()} == {}
    await asyncio.to_thread(cluster.close)
    check_closed(await outcomes_of({name: asyncio.create_task(_told(future)) for name, future in waiting.items()}))


async def _told(future: Future[object]) -> object:
    return await asyncio.wrap_future(future)
