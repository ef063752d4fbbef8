"""Requests that are too large for the queue of submissions: where they are stored, and until when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import NamespaceFullError, RequestTimeoutError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import MIN_BUDGET_BYTES, PAYLOADS, REQUESTS, NamespaceBounds, shares, stream_of
from fluster_bus.messages import EnvironmentConfig, JobId, JobRequest, JobStatus, NamespaceReply, NamespaceRequest
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.objects import CHUNK_BYTES
from fluster_bus.storage.submissions import Submission
from fluster_bus.storage.submitting import store_request
from fluster_bus.storage.tables import sequence_of_ack
from tests.component.conftest import ConnectBus
from tests.component.controllers import IMPATIENT, NS, RunningController, job_request, published_events
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

StartSmall = Callable[[], Awaitable[RunningController]]
SIZES = shares(MIN_BUDGET_BYTES)


@pytest.fixture
async def start_small(own_server: EmbeddedServer) -> AsyncIterator[StartSmall]:
    """Starts controllers that give their namespace as little room as can be."""
    started: list[RunningController] = []

    async def start() -> RunningController:
        bounds = NamespaceBounds(budget_bytes=MIN_BUDGET_BYTES)
        started.append(RunningController(own_server, IMPATIENT, bounds=bounds, controller_id=f"c{len(started)}"))
        return await started[-1].start()

    yield start
    for running in started:
        await running.stop()


def _large(name: str = "job") -> JobRequest:
    return job_request(name, environment=EnvironmentConfig(env_vars={"LARGE": "x" * 100_000}))


async def _messages(bus: Bus, kind: str) -> int:
    return (await bus.jetstream.stream_info(stream_of(kind, NS))).state.messages


async def _is_empty(bus: Bus, kind: str = REQUESTS.name) -> bool:
    return await _messages(bus, kind) == 0


async def test_a_large_request_is_stored_until_its_job_is_recorded(
    own_server: EmbeddedServer, connect_bus: ConnectBus, start_small: StartSmall
) -> None:
    running = await start_small()
    operator = await connect_bus(own_server)
    client = AsyncCluster(await connect_bus(own_server, Role.CLIENT, NS), NS)
    job = await client.launch(_large())
    await wait_until_async(lambda: _is_empty(operator))
    await running.stop()
    second = await client.launch(_large())  # while no controller is there
    assert await _messages(operator, REQUESTS.name) >= 2
    await start_small()
    for each in (job, second):
        details = (await client.poll(each, details=True)).details
        assert details is not None
        assert len(details.environment.env_vars["LARGE"]) == 100_000
    await wait_until_async(lambda: _is_empty(operator))
    assert await _is_empty(operator, PAYLOADS.name)


async def test_what_is_refused_is_removed_too(
    own_server: EmbeddedServer, connect_bus: ConnectBus, start_small: StartSmall
) -> None:
    await start_small()
    operator = await connect_bus(own_server)
    data = json.dumps({"name": "a.b", "x": "x" * 100_000}).encode()
    stored = (await store_request(operator, NS, data)).model_copy(update={"submission": "s1"})
    assert (stored.kind, await _messages(operator, REQUESTS.name)) == (REQUESTS.name, 2)
    await operator.request(subjects.jobs_submit(NS), stored.to_json())
    await wait_until_async(lambda: _is_empty(operator))
    await wait_until_async(lambda: _is_refused(operator))


async def _is_refused(bus: Bus) -> bool:
    return [each.transition.state for each in await published_events(bus)] == [JobStatus.FAILED]


async def test_payloads_push_out_no_request(
    own_server: EmbeddedServer, connect_bus: ConnectBus, start_small: StartSmall
) -> None:
    await (await start_small()).stop()
    client = AsyncCluster(await connect_bus(own_server, Role.CLIENT, NS), NS)
    job = await client.launch(_large())
    for number in range(2 * SIZES[PAYLOADS.name] // CHUNK_BYTES):
        subject = subjects.object_part(PAYLOADS.name, NS, "0" * 64, number)
        sequence_of_ack(await client.bus.request(subject, bytes(CHUNK_BYTES)), subject)
    await start_small()
    assert (await client.poll(job)).status is JobStatus.PENDING


async def test_requests_that_have_no_room_are_refused_and_those_before_are_kept(
    own_server: EmbeddedServer, connect_bus: ConnectBus, start_small: StartSmall
) -> None:
    await (await start_small()).stop()
    bus = await connect_bus(own_server, Role.CLIENT, NS)
    client = AsyncCluster(bus, NS)
    job = await client.launch(_large())

    async def fill() -> None:
        for number in range(SIZES[REQUESTS.name] // 2_000_000 + 1):
            await store_request(bus, NS, bytes([number]) * 2_000_000)

    with pytest.raises(NamespaceFullError, match="namespace 'default' has used up its share of the store for requests"):
        await fill()
    await start_small()
    assert (await client.poll(job)).status is JobStatus.PENDING


async def test_where_an_older_controller_leads_requests_are_among_the_payloads(
    own_server: EmbeddedServer, connect_bus: ConnectBus, start_small: StartSmall
) -> None:
    await (await start_small()).stop()
    operator = await connect_bus(own_server)

    async def answer(_request: NamespaceRequest, _subject: str) -> NamespaceReply:
        return NamespaceReply(object_bytes={"bundles": 1 << 29, PAYLOADS.name: 1 << 29})

    older = await operator.serve(subjects.ensure_namespace(NS), NamespaceRequest, answer)
    await operator.flush()
    client = AsyncCluster(await connect_bus(own_server, Role.CLIENT, NS), NS)
    job = await client.launch(_large())
    assert await _is_empty(operator)
    assert await _messages(operator, PAYLOADS.name) == 2
    await older.unsubscribe()
    # A controller of this release takes it from there, too.
    await start_small()
    assert (await client.poll(job)).status is JobStatus.PENDING
    assert await _messages(operator, PAYLOADS.name) == 2


async def test_where_there_is_no_stream_for_requests_they_are_among_the_payloads(
    own_server: EmbeddedServer, connect_bus: ConnectBus, start_small: StartSmall
) -> None:
    await (await start_small()).stop()
    operator = await connect_bus(own_server)
    await operator.jetstream.delete_stream(stream_of(REQUESTS.name, NS))
    async with asyncio.timeout(20):  # a store that is just coming back is waited for longer
        stored = await store_request(operator, NS, b"x" * 100_000)
    assert stored.kind == PAYLOADS.name


async def test_a_submission_that_was_recorded_and_comes_again_is_not_refused_for_its_request(
    own_server: EmbeddedServer, connect_bus: ConnectBus, start_small: StartSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, lost = Submission.done, asyncio.Event()

    async def lose_the_first(self: Submission) -> None:
        if lost.is_set():
            return await done(self)
        lost.set()
        await self.forget_request(await self.message())  # as by a controller that had the lead before
        raise RequestTimeoutError("lost")

    monkeypatch.setattr(Submission, "done", lose_the_first)
    await start_small()
    operator = await connect_bus(own_server)
    client = AsyncCluster(await connect_bus(own_server, Role.CLIENT, NS), NS)
    job = await client.launch(_large())

    async def is_settled() -> bool:
        return (await operator.jetstream.stream_info(buckets.SUBMIT_STREAM)).state.messages == 0

    await wait_until_async(is_settled)
    assert lost.is_set()
    assert (await client.poll(JobId(job))).status is JobStatus.PENDING
    assert [
        each.transition.state for each in await published_events(operator) if each.transition.state.finished()
    ] == []
