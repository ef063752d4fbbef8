"""Claims whose acknowledgement was lost: they end as one thing or the other, for good."""

import time

import pytest

from fluster_bus.bus import Bus
from fluster_bus.errors import RevisionConflictError
from fluster_bus.messages import JobId, JobStatus, Namespace, Offer, TaskRecord, WorkerId
from fluster_bus.streams import tasks_table
from fluster_services import lifecycle
from fluster_services.worker.claims import Claims

pytestmark = pytest.mark.anyio

MINE, OTHER = WorkerId("mine"), WorkerId("other")


async def waiting_task(bus: Bus, namespace: Namespace) -> tuple[TaskRecord, Offer]:
    record = TaskRecord(job_id=JobId("job"), namespace=namespace, task=0, order=1)
    revision = await tasks_table(bus, namespace).create("job.0", record)
    return record, Offer(namespace=namespace, job_id=record.job_id, task=0, attempt=1, revision=revision)


def claimed(record: TaskRecord, worker_id: WorkerId) -> TaskRecord:
    found = lifecycle.claim(record, attempt=1, worker_id=worker_id, now=time.time())
    assert found is not None
    return found


async def test_one_that_never_arrived_is_made_again_and_can_not_arrive_later(bus: Bus, namespace: Namespace) -> None:
    record, offer = await waiting_task(bus, namespace)
    row = await Claims(bus, MINE, (namespace,)).settle(offer)
    assert row is not None
    assert (row.value.state, row.value.worker_id) == (JobStatus.BUILDING, MINE)
    with pytest.raises(RevisionConflictError):  # the first one, that was on its way all the time
        await tasks_table(bus, namespace).update("job.0", claimed(record, MINE), offer.revision)


async def test_one_that_had_arrived_stands(bus: Bus, namespace: Namespace) -> None:
    record, offer = await waiting_task(bus, namespace)
    revision = await tasks_table(bus, namespace).update("job.0", claimed(record, MINE), offer.revision)
    row = await Claims(bus, MINE, (namespace,)).settle(offer)
    assert row is not None
    assert row.revision == revision


@pytest.mark.parametrize("what", ["another worker", "a wish to stop it", "a newer attempt"])
async def test_what_is_not_to_be_had_any_more_is_left_alone(bus: Bus, namespace: Namespace, what: str) -> None:
    record, offer = await waiting_task(bus, namespace)
    changed = {
        "another worker": claimed(record, OTHER),
        "a wish to stop it": lifecycle.request_kill(record, now=time.time(), reason="enough"),
        "a newer attempt": record.model_copy(update={"attempt": 2}),
    }[what]
    assert changed is not None
    revision = await tasks_table(bus, namespace).update("job.0", changed, offer.revision)
    assert await Claims(bus, MINE, (namespace,)).settle(offer) is None
    row = await tasks_table(bus, namespace).get("job.0")
    assert row is not None
    assert row.revision == revision


async def test_of_a_task_that_is_gone_nothing_is_left(bus: Bus, namespace: Namespace) -> None:
    _, offer = await waiting_task(bus, namespace)
    await tasks_table(bus, namespace).delete("job.0")
    assert await Claims(bus, MINE, (namespace,)).settle(offer) is None
