"""One namespace submits as much as it can while no controller is there: others' submissions are taken all the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import MessageTooLargeError, NamespaceFullError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import MAX_INLINE_BYTES, MAX_SUBMISSION_BYTES, SUBMITTED_BYTES, submissions_of
from fluster_bus.messages import Entrypoint, JobId, JobRequest, JobStatus, Namespace
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.streams import append_data
from fluster_bus.storage.submitting import store_request, submit
from fluster_services.config import LOCAL_TIMING
from fluster_services.controller.state.job_index import JobKey
from tests.component.controllers import NS, RunningController, job_request

pytestmark = pytest.mark.anyio

OTHER = Namespace("other")
SMALL, LARGE = b'{"name":"x","entrypoint":{"command":["true"]}}', b"x" * (MAX_SUBMISSION_BYTES - 200)


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(namespaces=(NS, OTHER)) as server:
        yield server


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def _controller(server: EmbeddedServer) -> RunningController:
    return await RunningController(server, LOCAL_TIMING, (NS, OTHER)).start()


async def _bus(server: EmbeddedServer, stack: AsyncExitStack, role: Role, namespace: str | None = None) -> Bus:
    bus = await Bus.connect(server.credentials(role, namespace), name=str(role))
    stack.push_async_callback(bus.close)
    return bus


async def _flood(bus: Bus, data: bytes) -> int:
    """How many of these were taken until one is refused, sent as fast as the connection takes them."""
    subject = subjects.jobs_submit(NS)
    for _ in range(submissions_of(2) + 100):
        await bus.publish(subject, data)
    await bus.flush()
    with pytest.raises(NamespaceFullError, match="as many submissions of the namespace wait to be recorded as may"):
        await append_data(bus, subject, data, message_id="last")
    return submissions_of(2)


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
async def test_a_flood_by_one_namespace_leaves_the_queue_to_others(
    server: EmbeddedServer, stack: AsyncExitStack, data: bytes
) -> None:
    await (await _controller(server)).stop()  # it has made the streams
    attacker = await _bus(server, stack, Role.JOB, NS)
    taken = await _flood(attacker, data)
    others = await _bus(server, stack, Role.CLIENT, OTHER)
    for number in range(100):
        request = JobRequest(name=f"job{number}", entrypoint=Entrypoint(command=("true",)))
        await submit(others, OTHER, request, message_id=f"other.{number}")
    service = await _bus(server, stack, Role.SERVICE)
    state = (await service.jetstream.stream_info(buckets.SUBMIT_STREAM)).state
    assert state.messages == taken + 100
    assert state.bytes < SUBMITTED_BYTES


async def test_what_is_larger_than_the_queue_takes_is_refused_by_the_server(
    server: EmbeddedServer, stack: AsyncExitStack
) -> None:
    await (await _controller(server)).stop()
    attacker = await _bus(server, stack, Role.CLIENT, NS)
    with pytest.raises(MessageTooLargeError):
        await append_data(attacker, subjects.jobs_submit(NS), b"x" * (MAX_SUBMISSION_BYTES + 1), message_id="large")


async def test_a_large_request_goes_another_way_and_is_run_as_any(
    server: EmbeddedServer, stack: AsyncExitStack
) -> None:
    running = await _controller(server)
    stack.push_async_callback(running.stop)
    cluster = await stack.enter_async_context(await AsyncCluster.connect(server.credentials(Role.CLIENT, NS)))
    words = ("true", "x" * (4 * MAX_INLINE_BYTES))
    job = await cluster.launch(JobRequest(name="large", entrypoint=Entrypoint(command=words)))
    details = (await cluster.poll(job, details=True)).details
    assert details is not None
    assert details.command == words
    await cluster.terminate(job)
    assert (await cluster.wait(job)).status is JobStatus.KILLED


@pytest.mark.parametrize(
    "forged",
    [
        {"stored_request": "0" * 64, "size": 10},  # nothing is there
        {"stored_request": "0" * 64, "size": 1 << 39},  # more than a request may have
        {"stored_request": "0" * 63 + "*", "size": 10},
        {"stored_request": "../../etc", "size": 10},
        {"stored_request": ["x"], "size": -1},
    ],
)
async def test_what_says_that_it_is_stored_and_is_not_is_refused_with_an_event(
    server: EmbeddedServer, stack: AsyncExitStack, forged: dict[str, object]
) -> None:
    running = await _controller(server)
    stack.push_async_callback(running.stop)
    attacker = await _bus(server, stack, Role.CLIENT, NS)
    data = json.dumps({**forged, "name": "forged"}).encode()
    sequence = await append_data(attacker, subjects.jobs_submit(NS), data, message_id="forged")
    refused = await running.controller.intake.outcomes.wait_looked_at(_no_job(), sequence)
    assert refused is not None
    assert refused.job_id == "forged"
    cluster = await stack.enter_async_context(await AsyncCluster.connect(server.credentials(Role.CLIENT, NS)))
    await cluster.launch(job_request("after"))


async def test_a_stored_request_that_is_larger_than_it_says_is_not_read(
    server: EmbeddedServer, stack: AsyncExitStack
) -> None:
    running = await _controller(server)
    stack.push_async_callback(running.stop)
    attacker = await _bus(server, stack, Role.CLIENT, NS)
    stored = await store_request(attacker, NS, b"x" * 2_000_000)
    small = stored.model_copy(update={"size": 10, "name": "forged"})
    sequence = await append_data(attacker, subjects.jobs_submit(NS), small.to_json(), message_id="forged")
    refused = await running.controller.intake.outcomes.wait_looked_at(_no_job(), sequence)
    assert refused is not None
    assert "over the limit of 10" in refused.reason


def _no_job() -> JobKey:
    return JobKey(NS, JobId("none"))
