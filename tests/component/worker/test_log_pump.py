"""Output on its way from the spool to the stream, with workers that die in between."""

from pathlib import Path
from typing import cast

import pytest

from fluster.cluster.jobs.job_logs import LogFilter, job_logs
from fluster.cluster.jobs.log_chunks import messages_of
from fluster_bus.connection.bus import Bus
from fluster_bus.messages import JobId, Namespace, TaskRecord
from fluster_services.worker.attempts.pumps import LogPump
from fluster_services.worker.contract.runtime import RunningTask
from fluster_services.worker.contract.spool import SpoolRun, SpoolWriter, Stream, read_spool_runs

pytestmark = pytest.mark.anyio

JOB = JobId("talker")


class Attempt:
    """As much of a running task as its output needs: a spool, and a name."""

    def __init__(self, path: Path, namespace: Namespace) -> None:
        self.key = f"{namespace}.{JOB}.0.1"
        self.path = path
        self._writer = SpoolWriter(path, 1 << 20)

    def say(self, stream: Stream, *lines: str) -> None:
        self._writer.append(stream, [(line.encode(), False) for line in lines], 1.0)

    def read_log(self, start_offset: int = 0, *, max_bytes: int = 1 << 20) -> tuple[list[SpoolRun], int]:
        return read_spool_runs(self.path, start_offset, max_bytes=max_bytes)


@pytest.fixture
def attempt(tmp_path: Path, namespace: Namespace) -> Attempt:
    return Attempt(tmp_path / "spool", namespace)


def pump(bus: Bus, attempt: Attempt, namespace: Namespace) -> LogPump:
    record = TaskRecord(job_id=JOB, namespace=namespace, task=0, order=1)
    return LogPump(bus, record, cast("RunningTask", attempt))


async def stored(bus: Bus, namespace: Namespace) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"stdout": [], "stderr": []}
    lists = messages_of(job_logs(bus, namespace, JOB, wanted=LogFilter()))
    for line in [line async for lines in lists for line in lines]:
        found[line.stream].append(line.text)
    return found


async def test_a_successor_goes_on_where_the_worker_stopped(bus: Bus, namespace: Namespace, attempt: Attempt) -> None:
    attempt.say("stderr", "e1")
    attempt.say("stdout", "o1", "o2")
    await pump(bus, attempt, namespace).publish()
    attempt.say("stdout", "o3")
    successor = pump(bus, attempt, namespace)
    await successor.resume()
    await successor.publish()
    attempt.say("stderr", "e2")
    await successor.publish()
    assert await stored(bus, namespace) == {"stdout": ["o1", "o2", "o3"], "stderr": ["e1", "e2"]}


async def test_nothing_is_lost_or_doubled_when_the_worker_died_between_two_streams(
    bus: Bus, namespace: Namespace, attempt: Attempt
) -> None:
    """Of a chunk with lines of both streams it had stored one stream's, and then the chunk grew."""
    attempt.say("stderr", "e1")
    attempt.say("stdout", "o1")
    first = pump(bus, attempt, namespace)
    (stream, batch), _never_stored = first.batches(*_chunk(attempt))
    await first.append(stream, batch)
    attempt.say("stderr", "e2")
    attempt.say("stdout", "o2")
    second = pump(bus, attempt, namespace)
    await second.resume()
    (stream, batch), _never_stored = second.batches(*_chunk(attempt))
    await second.append(stream, batch)
    attempt.say("stderr", "e3")
    third = pump(bus, attempt, namespace)
    await third.resume()
    await third.publish()
    assert await stored(bus, namespace) == {"stdout": ["o1", "o2"], "stderr": ["e1", "e2", "e3"]}


async def test_a_batch_whose_acknowledgement_was_lost_is_stored_once(
    bus: Bus, namespace: Namespace, attempt: Attempt
) -> None:
    attempt.say("stdout", "o1")
    first = pump(bus, attempt, namespace)
    ((stream, batch),) = first.batches(*_chunk(attempt))
    await first.append(stream, batch)
    await first.publish()
    assert await stored(bus, namespace) == {"stdout": ["o1"], "stderr": []}


def _chunk(attempt: Attempt) -> tuple[list[SpoolRun], int, int]:
    records, following = attempt.read_log()
    return records, 0, following
