"""What a controller refuses, and what it takes though it looks like something else."""

from __future__ import annotations

import pytest

from fluster.cluster.client import AsyncCluster
from fluster.errors import JobRefusedError
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import MAX_INLINE_BYTES
from fluster_bus.messages import Event, JobId, Namespace, TaskRecord
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.streams import records_table
from fluster_bus.storage.submitting import store_request
from fluster_bus.storage.tables import Row, sequence_of_ack
from fluster_services.controller.leading.event_log import EventLog
from fluster_services.controller.state.job_index import JobKey
from tests.component.controllers import (
    NS,
    F,
    RunningController,
    S,
    StartController,
    StartWorker,
    job_request,
    published_events,
)
from tests.component.toy_worker import STAY_RUNNING
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


async def test_an_id_that_is_taken(cluster: AsyncCluster) -> None:
    job_id = JobId("mine")
    assert await cluster.launch(job_request(job_id=job_id)) == job_id
    with pytest.raises(JobRefusedError, match="'mine' exists already"):
        await cluster.launch(job_request(job_id=job_id))
    raw = job_request("another", job_id=job_id)
    for _ in range(10):
        answer = await cluster.bus.request(subjects.jobs_submit(NS), raw.to_json())
        assert b"error" not in answer.data
    bus = cluster.bus
    await wait_until_async(lambda: _refusals(bus, 11))
    with pytest.raises(JobRefusedError, match="'mine' exists already"):
        await cluster.launch(raw)
    assert len(await cluster.list_jobs()) == 1
    await cluster.terminate(job_id)
    await cluster.wait(job_id, timeout=60)
    await wait_until_async(lambda: _job_events(bus, job_id, [1, 2]))


async def test_a_submission_that_the_stream_stored_twice_is_one(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController
) -> None:
    worker = await start_worker()
    sent = job_request("train", job_id=JobId("mine"), submission="3f2a").to_json()
    places = []
    for _ in range(2):
        answer = await cluster.bus.request(subjects.jobs_submit(NS), sent)
        places.append(sequence_of_ack(answer, "submit"))
        looked_at = controller.controller.intake.outcomes.wait_looked_at(JobKey(NS, JobId("mine")), places[-1])
        assert await looked_at is None, "it is not refused"
        assert (await cluster.wait(JobId("mine"), timeout=60)).status is S
    assert places[0] < places[1]
    assert len(worker.starts) == 1


async def test_a_refusal_does_not_hide_what_becomes_of_the_job_that_has_the_id(
    start_controller: StartController, own_server: EmbeddedServer, start_worker: StartWorker
) -> None:
    first = await start_controller()
    worker = await start_worker(plan=STAY_RUNNING)
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        await cluster.launch(job_request("other"))
        job_id = await cluster.launch(job_request(job_id=JobId("mine")))
        with pytest.raises(JobRefusedError, match="exists already"):
            await cluster.launch(job_request("another", job_id=job_id))
        await wait_until_async(lambda: _refusals(first.bus, 1))
        await wait_until_async(lambda: len(worker.held) == 2)
        await first.stop()
        second = await start_controller()
        for key in worker.now_held():
            await worker.end(key)
        assert (await cluster.wait(job_id, timeout=60)).status is S
        await wait_until_async(lambda: _job_events(second.bus, job_id, [1, 2]))


async def test_a_controller_that_comes_later_tells_of_a_job_that_has_the_id_of_one_that_was_removed(
    start_controller: StartController,
    own_server: EmbeddedServer,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = await start_controller()
    await start_worker()
    async with await AsyncCluster.connect(own_server.credentials(Role.CLIENT, NS)) as cluster:
        job_id = await cluster.launch(job_request(job_id=JobId("mine")))
        assert (await cluster.wait(job_id, timeout=60)).status is S
        await wait_until_async(lambda: _job_events(first.bus, job_id, [1, 2]))
        table = records_table(first.bus, NS)
        for row in [*await table.rows(buckets.task_key_of_any(job_id)), *await table.rows(job_id)]:
            await table.delete(row.key)
        await first.stop()
        # Looked at on its way: the server forgets what it dropped as doubled only after minutes.
        told: list[int] = []

        async def append(_log: EventLog, _namespace: Namespace, events: list[Event]) -> None:
            told.extend(event.transition.number for event in events if event.task is None)

        monkeypatch.setattr(EventLog, "_append", append)
        await start_controller()
        await cluster.launch(job_request(job_id=job_id, cpu=2))
        assert (await cluster.wait(job_id, timeout=60)).status is S
        await wait_until_async(lambda: told == [1, 2], describe=lambda: told)


async def test_a_worker_that_declines_what_it_said_it_has_room_for_is_asked_again(
    cluster: AsyncCluster, start_worker: StartWorker
) -> None:
    worker = await start_worker(cpu=3)  # no level: the offer is made by name
    look, looks = worker.claims.look, 0

    async def look_late(namespace: Namespace, job_id: str, task: int) -> Row[TaskRecord] | None:
        """As a server does that is behind the others: the first time the record is not there yet."""
        nonlocal looks
        looks += 1
        return await look(namespace, job_id, task) if looks > 1 else None

    worker.claims.look = look_late  # type: ignore[method-assign]
    job_id = await cluster.launch(job_request(cpu=3))
    assert (await cluster.wait(job_id, timeout=60)).status is S


async def _refusals(bus: Bus, count: int) -> bool:
    return sum(event.transition.reason.startswith("refused") for event in await published_events(bus)) == count


async def _job_events(bus: Bus, job_id: str, numbers: list[int]) -> bool:
    told = [event for event in await published_events(bus) if event.job_id == job_id and event.task is None]
    return [event.transition.number for event in told if "refused" not in event.transition.reason] == numbers


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense",
        b"",
        b'{"name": "a.b", "entrypoint": {"command": ["true"]}}',
        b'{"name": "job", "entrypoint": {"callable": "f", "args": 5}}',
        b'{"name": "job", "entrypoint": {"command": ["true"]}, "resources": {"memory": 1e999}}',
        b'{"name": "job", "job_id": "job", "entrypoint": {"command": ["' + b"x" * (8_300_000) + b'"]}}',
        b'{"name": "job", "entrypoint": {"command": ["true"]}, "ports": ["' + b"x" * 1_000_000 + b'"]}',
    ],
    ids=["no JSON", "empty", "bad name", "callable", "infinite", "huge", "long value"],
)
async def test_what_is_no_job_is_refused_with_an_event(
    cluster: AsyncCluster, start_worker: StartWorker, controller: RunningController, data: bytes
) -> None:
    if len(data) > MAX_INLINE_BYTES:
        data = (await store_request(cluster.bus, NS, data)).to_json()
    await cluster.bus.request(subjects.jobs_submit(NS), data)
    await wait_until_async(lambda: _refusals(cluster.bus, 1))
    (refused,) = await published_events(cluster.bus)
    assert refused.transition.state is F
    assert len(refused.transition.reason) < 20_000
    await wait_until_async(lambda: _nothing_left(controller.bus))
    await start_worker()
    job_id = await cluster.launch(job_request())
    assert (await cluster.wait(job_id, timeout=60)).status is S, "the next one is not held up"


async def _nothing_left(bus: Bus) -> bool:
    return (await bus.jetstream.stream_info(buckets.SUBMIT_STREAM)).state.messages == 0


async def test_a_namespace_that_the_cluster_does_not_have(
    own_server: EmbeddedServer, controller: RunningController, cluster: AsyncCluster
) -> None:
    with pytest.raises(
        ServiceError, match="no namespace 'nowhere': an operator adds it with `fluster namespace add nowhere`"
    ):
        await AsyncCluster.connect(own_server.credentials(Role.OPERATOR), namespace="nowhere")
    async with await AsyncCluster.connect(own_server.credentials(Role.OPERATOR)) as operator:
        for namespace in ("nowhere", "sys", "a$b"):
            subject = subjects.jobs_submit(NS).replace(NS, namespace)
            await operator.bus.request(subject, job_request().to_json())
        await wait_until_async(lambda: _nothing_left(controller.bus))
    assert await cluster.list_jobs() == []
