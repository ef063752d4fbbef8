"""Claims whose acknowledgement was lost: they end as one thing or the other, for good."""

import time

import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import DisconnectedError, RevisionConflictError
from fluster_bus.messages import JobId, JobStatus, Namespace, Offer, TaskRecord, WorkerId
from fluster_bus.storage.streams import tasks_table
from fluster_bus.storage.tables import Table
from fluster_services import lifecycle
from fluster_services.worker.attempts.claims import Claims

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


def running(record: TaskRecord, worker_id: WorkerId, *, attempt: int = 1) -> TaskRecord:
    held = claimed(record, worker_id)
    begun = lifecycle.run(held, attempt=1, worker_id=worker_id, now=time.time())
    assert begun is not None
    return begun.model_copy(update={"attempt": attempt})


def test_an_attempt_is_mine_while_i_hold_it_and_it_is_the_newest() -> None:
    claims = Claims.__new__(Claims)
    claims._worker_id = MINE  # noqa: SLF001 - made without a bus, which the question does not need
    waiting = TaskRecord(job_id=JobId("job"), namespace=Namespace("default"), task=0, order=1)
    held = claimed(waiting, MINE)
    assert claims.is_mine(held, 1)
    ended = lifecycle.end(held, attempt=1, worker_id=MINE, now=1, state=JobStatus.FAILED, reason="")
    assert ended is not None
    not_mine = [waiting, waiting.model_copy(update={"worker_id": MINE}), claimed(waiting, OTHER), ended]
    assert [claims.is_mine(each, 1) for each in not_mine] == [False] * 4
    assert not claims.is_mine(held, 2)
    assert not claims.is_mine(held.model_copy(update={"attempt": 2}), 1)


@pytest.mark.parametrize(
    ("stored", "is_done"),
    [
        ((MINE, 1, JobStatus.RUNNING), True),
        ((OTHER, 1, JobStatus.RUNNING), False),
        ((MINE, 2, JobStatus.RUNNING), False),
        ((MINE, 1, JobStatus.KILLED), False),
    ],
)
async def test_a_change_whose_acknowledgement_was_lost_was_done_if_just_that_is_found(
    bus: Bus,
    namespace: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    stored: tuple[WorkerId, int, JobStatus],
    is_done: bool,
) -> None:
    """The first write is not acknowledged; by the time of the second this is in the record."""
    record, offer = await waiting_task(bus, namespace)
    claims = Claims(bus, MINE, (namespace,))
    row = await claims.settle(offer)
    assert row is not None
    table = tasks_table(bus, namespace)
    worker_id, attempt, state = stored
    update = Table.update

    async def lose(self: Table[TaskRecord], key: str, _value: TaskRecord, revision: int) -> int:
        monkeypatch.setattr(Table, "update", update)
        found = running(record, worker_id, attempt=attempt).model_copy(update={"state": state})
        await table.update(key, found, revision)
        raise DisconnectedError("the acknowledgement is lost")

    monkeypatch.setattr(Table, "update", lose)
    done = await claims.change(row, lambda task: lifecycle.run(task, attempt=1, worker_id=MINE, now=time.time()))
    assert (done is not None) == is_done
