"""Requests of megabytes: the controller keeps none of them, and what they ask for is done all the same."""

from __future__ import annotations

import json
import time

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId, JobRecord, JobRequest, JobStatus
from fluster_bus.messages.jobs import MAX_REQUEST_BYTES
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.streams import jobs_table
from fluster_bus.storage.submissions import submissions
from fluster_bus.storage.submitting import store_request
from fluster_services import job_lifecycle
from fluster_services.controller.state.job_index import JobKey
from fluster_services.controller.state.slim_records import is_left
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController, StartController, StartWorker
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

MANY, KIB30 = 1_500, 30 << 10
MOST_BYTES_OUT = 40 << 20  # 32 MiB, and the one message with which they are passed
VARIABLES = {f"VARIABLE_{number}": "x" * 20 for number in range(5_000)}


def large(job_id: str, **fields: object) -> bytes:
    request = {"name": "job", "job_id": job_id, "entrypoint": {"command": ["true"]}, "newer": {"a": "x" * 50_000}}
    return json.dumps({**request, "environment": {"env_vars": VARIABLES}, **fields}).encode()


async def submit(bus: Bus, data: bytes) -> None:
    stored = await store_request(bus, NS, data)
    answer = await bus.request(subjects.jobs_submit(NS), stored.to_json())
    assert "error" not in json.loads(answer.data)


async def record(cluster: AsyncCluster, job_id: str) -> JobRecord:
    row = await jobs_table(cluster.bus, NS).get(job_id)
    assert row is not None
    assert isinstance(row.value, JobRecord)
    return row.value


async def test_a_large_request_is_kept_on_the_bus_and_read_there(
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    start_controller: StartController,
    start_worker: StartWorker,
) -> None:
    running = await start_controller()
    bus = await connect_bus(own_server)
    cluster = AsyncCluster(bus, NS)
    await submit(bus, large("stopped"))
    await submit(bus, large("done"))

    def kept(controller: RunningController, job_id: str) -> JobRecord | None:
        entry = controller.controller.job_index.get(JobKey(NS, JobId(job_id)))
        return entry.job.value if entry is not None and entry.job is not None and entry.tasks else None

    await wait_until_async(lambda: kept(running, "stopped") is not None and kept(running, "done") is not None)
    for name in ("stopped", "done"):
        known = kept(running, name)
        assert known is not None
        assert is_left(known.request)
        details = (await cluster.poll(JobId(name), details=True)).details
        assert details is not None
        assert dict(details.environment.env_vars) == VARIABLES
    await cluster.terminate(JobId("stopped"))
    assert (await cluster.wait(JobId("stopped"))).status is JobStatus.KILLED
    # One that takes over has read the same.
    await running.stop()
    second = await start_controller()
    known = kept(second, "done")
    assert known is not None
    assert is_left(known.request)
    await start_worker()
    assert (await cluster.wait(JobId("done"))).status is JobStatus.SUCCEEDED
    for name in ("stopped", "done"):
        told = await record(cluster, name)
        assert dict(told.request.environment.env_vars) == VARIABLES
        assert told.request.entrypoint.command == ("true",)
        assert b'"newer"' in told.to_json()


@pytest.mark.usefixtures("controller")
async def test_resources_which_each_task_has_are_refused_when_they_are_large(
    own_server: EmbeddedServer, connect_bus: ConnectBus, cluster: AsyncCluster
) -> None:
    bus = await connect_bus(own_server, Role.CLIENT, NS)
    await submit(bus, large("large", resources={"cpu": 1, "newer": ["x"] * 10_000}))
    await submit(bus, large("next"))

    async def listed() -> set[str]:
        return {info.job_id for info in await cluster.list_jobs()}

    async def is_next_listed() -> bool:
        return "next" in await listed()

    await wait_until_async(is_next_listed)
    assert await listed() == {"next"}


def _with_numbers(job_id: str, record_bytes: int) -> bytes:
    """A request whose record has so many bytes, or a few more: a number of five bytes has eighteen there."""

    def request(padding: int) -> bytes:
        fields = {
            "name": "job",
            "job_id": job_id,
            "entrypoint": {"command": ["true"]},
            "newer": ["x" * padding, "NUMBERS"],
        }
        return json.dumps(fields).replace('"NUMBERS"', ",".join(["1e15"] * 400_000)).encode()

    read = JobRequest.from_json(request(0))
    plain = len(job_lifecycle.new_job(NS, JobId(job_id), read, order=1, now=time.time()).to_json())
    return request(record_bytes - plain)


@pytest.mark.parametrize("short_by", [26, 100, 1_000_000])
async def test_a_request_that_grows_as_it_is_recorded_is_refused(
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    cluster: AsyncCluster,
    controller: RunningController,
    short_by: int,
) -> None:
    """With its headers it had more than a message may have: the server ended the connection, and so the controller."""
    bus = await connect_bus(own_server, Role.CLIENT, NS)
    data = _with_numbers("grows", controller.bus.max_payload - short_by)
    assert len(data) < MAX_REQUEST_BYTES
    await submit(bus, data)
    await submit(bus, large("next"))

    async def is_next_listed() -> bool:
        return "next" in {info.job_id for info in await cluster.list_jobs()}

    await wait_until_async(is_next_listed)
    assert {info.job_id for info in await cluster.list_jobs()} == {"next"}
    assert controller.bus.connected


async def test_what_is_on_its_way_to_the_controller_is_bounded_in_bytes(
    own_server: EmbeddedServer, connect_bus: ConnectBus, start_controller: StartController
) -> None:
    await (await start_controller()).stop()  # it has made the stream
    service = await connect_bus(own_server, Role.SERVICE, name="reader")
    client = await connect_bus(own_server, Role.CLIENT, NS, name="client")
    for number in range(MANY):
        request = {"name": f"job-{number}", "entrypoint": {"command": ["true"]}, "padding": "x" * KIB30}
        await client.request(subjects.jobs_submit(NS), json.dumps(request).encode())
    read = []
    async for submission in submissions(service):
        read.append(submission.sequence)
        await service.flush()
        consumer = await service.jetstream.consumer_info(buckets.SUBMIT_STREAM, buckets.SUBMIT_CONSUMER)
        assert (consumer.num_ack_pending or 0) * KIB30 <= MOST_BYTES_OUT
        assert len(await submission.without_data().message()) == submission.size
        await submission.done()
        if len(read) == MANY:
            break
    assert read == list(range(1, MANY + 1))
