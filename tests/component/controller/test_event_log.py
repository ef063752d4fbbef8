"""Which transitions a controller tells that begins to lead, with a real stream."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.messages import Entrypoint, Event, JobId, JobRecord, JobRequest, Namespace
from fluster_bus.storage.streams import append
from fluster_services import job_lifecycle
from fluster_services.controller.leading import event_log
from fluster_services.controller.leading.event_log import EventLog
from fluster_services.controller.leading.seat import Seat

pytestmark = pytest.mark.anyio

MINE = JobId("mine")


def _job(namespace: Namespace, *, order: int, now: float) -> JobRecord:
    """With two transitions."""
    request = JobRequest(name="job", entrypoint=Entrypoint(command=("true",)), after=(JobId("other"),))
    job = job_lifecycle.new_job(namespace, MINE, request, order=order, now=now)
    released = job_lifecycle.release_job(job, now=now + 1)
    assert released is not None
    return released


async def _tell(bus: Bus, job: JobRecord, *numbers: int) -> None:
    for number in numbers:
        event = Event(job_id=MINE, transition=job.transitions[number - 1])
        subject = subjects.events(job.namespace, MINE)
        await append(bus, subject, event, message_id=f"{job.order}.{number}")


def _queued(log: EventLog) -> list[Event]:
    return [queue.get_nowait() for queue in log._queues.values() for _ in range(queue.qsize())]  # noqa: SLF001 - what waits to be published, before it is


@pytest.mark.parametrize("told", [0, 1, 2])
@pytest.mark.parametrize("stands_by", [True, False])
async def test_a_job_is_told_of_that_has_the_id_of_one_that_was_removed(
    bus: Bus, namespace: Namespace, told: int, stands_by: bool
) -> None:
    """The stream was quiet: what it told last is of the one that had the id before."""
    before, now = _job(namespace, order=1, now=1_000), _job(namespace, order=2, now=2_000_000_000)
    await _tell(bus, before, 1, 2)
    log = EventLog(bus, cast("Seat", None))
    if stands_by:
        await log.load(namespace)
        log.forget_all_but(namespace, [])
        log.on_record(now)
        await _tell(bus, now, *range(1, told + 1))
    else:
        await _tell(bus, now, *range(1, told + 1))
        await log.load(namespace)
        log.on_record(now)
        log.on_record(now)
    await log.lead(namespace)
    assert [event.transition for event in _queued(log)] == [*now.transitions[told:]]


@pytest.mark.parametrize("stands_by", [True, False])
@pytest.mark.parametrize("off", [timedelta(days=8), timedelta(0), -timedelta(days=8)], ids=["ahead", "right", "behind"])
async def test_what_is_told_does_not_depend_on_the_clocks_of_those_who_wrote_it(
    bus: Bus, namespace: Namespace, off: timedelta, stands_by: bool
) -> None:
    """Half of it is in the stream when this controller begins, the other half comes to light afterwards."""
    now = datetime.now(UTC)
    begun = _job(namespace, order=1, now=(now + off).timestamp())
    new = begun.model_copy(update={"job_id": JobId("new")})
    log = EventLog(bus, cast("Seat", None))
    await _tell(bus, begun, 1)
    await log.load(namespace)
    if not stands_by:
        await log.lead(namespace)
    log.on_record(begun, stored_at=now)
    log.on_record(new, stored_at=now, is_new=True)
    if stands_by:
        await log.lead(namespace)
    told = [(event.job_id, event.transition.number) for event in _queued(log)]
    assert told == [(MINE, 2), ("new", 1), ("new", 2)]


@pytest.mark.parametrize("off", [timedelta(days=8), timedelta(0)], ids=["ahead", "right"])
async def test_what_was_told_long_ago_is_not_told_again(bus: Bus, namespace: Namespace, off: timedelta) -> None:
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    await _tell(bus, _job(namespace, order=1, now=1_000), 1)
    other = _job(namespace, order=2, now=(long_ago + off).timestamp()).model_copy(update={"job_id": JobId("other")})
    log = EventLog(bus, cast("Seat", None))
    await log.load(namespace)
    await log.lead(namespace)
    log.on_record(other, stored_at=long_ago)
    assert _queued(log) == []


async def test_one_that_stands_by_keeps_so_many_and_no_more(
    bus: Bus, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_MAX_STANDBY", 3)
    log = EventLog(bus, cast("Seat", None))
    for number in range(5):
        event = event_log.refusal(number, "job", "no", now=0)
        log.refuse(namespace, event)
    assert [event.transition.number for _, _, event, _ in log._standby] == [2, 3, 4]  # noqa: SLF001 - bounded memory
