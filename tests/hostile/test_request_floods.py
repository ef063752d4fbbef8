"""One namespace floods the controller with requests: heartbeats, and requests of the others, are answered all the same."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Self

import pytest

from fluster.cluster.client import AsyncCluster
from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusyError, ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.direct import wire
from fluster_bus.messages import (
    Capacity,
    Heartbeat,
    JobId,
    JobRecord,
    JobStatus,
    ListReply,
    ListRequest,
    Namespace,
    OwnerRequest,
    StatusReply,
    StatusRequest,
    WorkerId,
)
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.tables import Row
from fluster_services import job_lifecycle
from fluster_services.config import LOCAL_TIMING
from fluster_services.controller.answers import request_lines
from fluster_services.controller.answers.request_lines import LineLimits
from fluster_services.job_lifecycle import job_info
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController, job_request
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

OTHER = Namespace("other")
FLOOD, JOBS = 300, 1_000
PATIENCE_S = 60.0


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(namespaces=(NS, OTHER)) as server:
        yield server


@pytest.fixture
async def controller(own_server: EmbeddedServer) -> AsyncIterator[RunningController]:
    running = await RunningController(own_server, LOCAL_TIMING, (NS, OTHER)).start()
    yield running
    await running.stop()


def record_finished(running: RunningController, count: int, *, namespace: Namespace = NS, replicas: int = 1) -> None:
    """Have the controller know jobs that have ended, the last of them submitted last."""
    job_index = running.controller.job_index
    for number in range(1, count + 1):
        request = job_request(replicas=replicas)
        job = job_lifecycle.new_job(namespace, JobId(f"job-{number}"), request, order=number, now=time.time())
        for task in job_lifecycle.new_tasks(job):
            ended = task.model_copy(update={"state": JobStatus.SUCCEEDED, "finished_at": time.time()})
            job_index.apply(Row(f"{job.job_id}.{task.task}", ended, 1))
        job_index.apply(Row(job.job_id, job.model_copy(update={"state": JobStatus.SUCCEEDED}), 1))


class Flood:
    """Requests of the attacker, all sent at once."""

    def __init__(self, bus: Bus, subject: str, request: bytes) -> None:
        self._bus = bus
        self._request = subject, request
        self.answered = self.refused = 0

    async def _ask(self) -> None:
        subject, request = self._request
        try:
            await self._bus.request(subject, request, timeout_s=PATIENCE_S)
            self.answered += 1
        except BusyError:
            self.refused += 1

    async def __aenter__(self) -> Self:
        self._asking = [asyncio.create_task(self._ask()) for _ in range(FLOOD)]
        await wait_until_async(lambda: self.answered + self.refused > 0, PATIENCE_S)
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await asyncio.gather(*self._asking)
        assert self.answered + self.refused == FLOOD


async def write_raw(address: BusAddress, commands: bytes) -> None:
    """Send what no client library would."""
    reader, writer = await asyncio.open_connection(*address.servers[0].removeprefix("nats://").split(":"))
    writer.write(wire.connect(user=address.user, **{"pass": address.password}, verbose=False, headers=True))
    writer.write(commands + wire.PING)
    assert b"-ERR" not in await asyncio.wait_for(reader.readuntil(b"PONG"), PATIENCE_S)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("reply", [f"fluster.{NS}.x", f"_INBOX.{NS}..x", f"_INBOX.{NS}.{'x' * 4_000}"])
async def test_answers_that_are_asked_for_where_none_may_go_fill_no_log(
    controller: RunningController,
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    caplog: pytest.LogCaptureFixture,
    reply: str,
) -> None:
    attacker = await connect_bus(own_server, Role.CLIENT, NS, name="attacker")
    request = wire.publish(subjects.jobs_verb(NS, "list"), b"{}", reply)
    await write_raw(own_server.credentials(Role.CLIENT, NS), request * FLOOD)
    await AsyncCluster(attacker, NS).list_jobs()
    await controller.bus.flush()
    assert 0 < sum("not an inbox" in each or "may not use" in each for each in caplog.messages) <= 20


async def test_heartbeats_and_requests_of_others_come_before_a_flood(
    controller: RunningController, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    record_finished(controller, JOBS)
    record_finished(controller, 1, namespace=OTHER)
    attacker = await connect_bus(own_server, Role.CLIENT, NS, name="attacker")
    worker = await connect_bus(own_server, Role.SERVICE, name="worker")
    other = await connect_bus(own_server, Role.CLIENT, OTHER, name="other")
    beat = Heartbeat(worker_id=WorkerId("w1"), free=Capacity()).to_json()
    poll = StatusRequest(job_ids=(JobId("job-1"),)).to_json()
    lease = OwnerRequest(owner="program-1").to_json()
    async with Flood(attacker, subjects.jobs_verb(NS, "list"), ListRequest(limit=JOBS).to_json()) as flood:
        for _ in range(10):
            before = flood.answered
            await asyncio.gather(
                worker.request(subjects.heartbeats("w1"), beat, timeout_s=PATIENCE_S),
                other.request(subjects.jobs_verb(OTHER, "status"), poll, timeout_s=PATIENCE_S),
                other.request(subjects.jobs_verb(OTHER, "own"), lease, timeout_s=PATIENCE_S),
            )
            assert flood.answered - before <= 3


@pytest.fixture
def short_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests wait in a controller that starts after this."""
    monkeypatch.setattr(request_lines, "LineLimits", functools.partial(LineLimits, max_waiting=10))


async def test_more_requests_than_may_wait_are_refused_and_a_client_asks_again(
    short_lines: None, controller: RunningController, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    record_finished(controller, 20)
    attacker = await connect_bus(own_server, Role.CLIENT, NS, name="attacker")
    subject, request = subjects.jobs_verb(NS, "list"), ListRequest(limit=20)
    async with Flood(attacker, subject, request.to_json()) as flood:
        asked = (attacker.ask(subject, request, ListReply, timeout_s=PATIENCE_S) for _ in range(100))
        assert {len(reply.jobs) for reply in await asyncio.gather(*asked)} == {20}
    assert flood.refused  # and asks that came at the same time were as well


async def test_a_request_that_is_too_large_is_refused_unread(
    controller: RunningController, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    attacker = await connect_bus(own_server, Role.CLIENT, NS, name="attacker")
    with pytest.raises(ServiceError, match="over the limit of 1,048,576") as raised:
        await attacker.request(subjects.jobs_verb(NS, "list"), b"[" * (2 << 20))
    assert raised.value.code == "MessageTooLargeError"


async def test_lists_come_in_pages_to_old_clients_and_new(
    controller: RunningController, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    record_finished(controller, 2_500)
    bus = await connect_bus(own_server, Role.CLIENT, NS, name="client")
    subject, newest_first = subjects.jobs_verb(NS, "list"), [JobId(f"job-{n}") for n in range(2_500, 0, -1)]
    first = await bus.ask(subject, ListRequest(limit=2_500), ListReply, timeout_s=PATIENCE_S)
    assert [job.job_id for job in first.jobs] == newest_first[:1_000]
    assert first.more
    old = await bus.ask(subject, ListRequest(limit=1_500, skip=1_000), ListReply, timeout_s=PATIENCE_S)
    assert [job.job_id for job in old.jobs] == newest_first[1_000:2_000]
    assert old.more
    exact = await bus.ask(subject, ListRequest(limit=500, after=old.cursor), ListReply, timeout_s=PATIENCE_S)
    assert [job.job_id for job in exact.jobs] == newest_first[2_000:]
    assert not exact.more
    client = AsyncCluster(bus, NS)
    assert [job.job_id for job in await client.list_jobs(limit=10_000)] == newest_first
    assert [job.job_id for job in await client.list_jobs(limit=1_200)] == newest_first[:1_200]
    assert await client.list_jobs(limit=10_000, states=[JobStatus.RUNNING]) == []


async def test_a_job_of_many_tasks_is_told_as_a_whole(
    controller: RunningController, own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    record_finished(controller, 1, replicas=2_000)
    entry = controller.controller.job_index.get((NS, JobId("job-1")))  # type: ignore[arg-type]
    assert entry is not None
    assert entry.job is not None
    assert isinstance(entry.job.value, JobRecord)
    bus = await connect_bus(own_server, Role.CLIENT, NS, name="client")
    request = StatusRequest(job_ids=(JobId("job-1"),))
    reply = await bus.ask(subjects.jobs_verb(NS, "status"), request, StatusReply, timeout_s=PATIENCE_S)
    assert reply.jobs == (job_info(entry.job.value, entry.task_records()),)
