"""What a task has left and no stream will ever take ends where it is: what is left of it is reported, and nothing is tried for ever."""

from __future__ import annotations

import io
import time
from typing import cast

import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets
from fluster_bus.messages import JobId, JobStatus, Namespace, TaskError, TaskRecord, TaskResult, WorkerId
from fluster_bus.storage.streams import tasks_table
from fluster_bus.storage.tables import Row
from fluster_services import lifecycle
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.pumps import publish_result
from fluster_services.worker.contract.runtime import RunningTask
from tests.component.worker.test_log_pump import Attempt, attempt, pump, stored  # noqa: F401 - a fixture

pytestmark = pytest.mark.anyio

ROOM = 4_000


async def _narrow(bus: Bus, stream: str) -> None:
    """Have a stream take small messages only."""
    config = (await bus.jetstream.stream_info(stream)).config
    await bus.jetstream.update_stream(config.evolve(max_msg_size=ROOM))


async def test_lines_that_no_stream_takes_are_told_of_and_what_follows_is_stored(
    bus: Bus,
    namespace: Namespace,
    attempt: Attempt,  # noqa: F811
) -> None:
    await _narrow(bus, buckets.logs_stream(namespace))
    running = pump(bus, attempt, namespace)
    attempt.say("stdout", "x" * 2 * ROOM, "y")
    await running.publish()
    attempt.say("stdout", "after")
    await running.publish()
    told, after = (await stored(bus, namespace))["stdout"]
    assert told.startswith("[fluster: 2 lines are left out, which could not be stored: ")
    assert after == "after"
    successor = pump(bus, attempt, namespace)
    await successor.resume()
    await successor.publish()
    assert len((await stored(bus, namespace))["stdout"]) == 2


async def test_an_end_that_no_record_takes_is_told_briefly(bus: Bus, namespace: Namespace) -> None:
    worker = WorkerId("mine")
    record = TaskRecord(job_id=JobId("job"), namespace=namespace, task=0, order=1)
    held = lifecycle.claim(record, attempt=1, worker_id=worker, now=time.time())
    assert held is not None
    table = tasks_table(bus, namespace)
    row = Row("job.0", held, await table.create("job.0", held))
    await _narrow(bus, buckets.bucket_stream(buckets.jobs_bucket(namespace)))
    error = TaskError(type="ValueError", message="m" * 2 * ROOM)
    claims = Claims(bus, worker, (namespace,))
    assert await claims.end(row, JobStatus.FAILED, "ValueError: " + "m" * ROOM, exit_code=1, error=error)
    written = await table.get("job.0")
    assert written is not None
    assert (written.value.state, written.value.exit_code) == (JobStatus.FAILED, 1)
    reason = written.value.transitions[-1].reason
    assert reason.startswith("ValueError: mmm")
    assert "the rest could not be stored: 'job.0' in bucket" in reason


class _Left:
    """As much of a running task as its result needs."""

    key = "default.job.0.1"

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read_result(self, start: int, max_bytes: int) -> bytes:
        return self._file.getbuffer()[start : start + max_bytes].tobytes()


async def test_a_result_that_no_stream_takes_is_told_as_such(bus: Bus, namespace: Namespace) -> None:
    await _narrow(bus, buckets.results_stream(namespace))
    record = TaskRecord(job_id=JobId("job"), namespace=namespace, task=0, order=1)
    running = cast("RunningTask", _Left(bytes(2 * ROOM)))
    result = await publish_result(bus, record, running, TaskResult(size=2 * ROOM))
    assert result is not None
    assert result.error is not None
    assert result.error.startswith("what it returned could not be stored: ")
