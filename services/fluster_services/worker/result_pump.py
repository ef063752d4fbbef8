"""Carries what a callable returned from where its task left it to the stream of results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from fluster_bus.bus import Bus
from fluster_bus.errors import BusError
from fluster_bus.messages import TaskRecord, TaskResult
from fluster_bus.results import RESULT_CHUNK_BYTES, ResultStore
from fluster_services.worker.runtime import RunningTask

log = logging.getLogger(__name__)

_PAUSE_S = 0.5


async def publish_result(
    bus: Bus, record: TaskRecord, running: RunningTask, result: TaskResult | None
) -> TaskResult | None:
    """What the task's record shall tell of its result, once that is stored. Waits for the bus when it is away.

    It is stored before the record says so; a worker that dies between leaves it to its successor, who does it again.
    """
    if result is None or not result.size:
        return result
    store = ResultStore(bus, record.namespace)
    while True:
        try:
            await store.put(record.job_id, record.task, record.attempt, _chunks(running, result.size))
        except BusError as error:
            log.info("the result of %s waits: %s", running.key, error)
            await bus.wait_connected()
            await asyncio.sleep(_PAUSE_S)
        except OSError as error:
            return TaskResult(error=f"what it returned could not be read from its worker's disk: {error}")
        else:
            return result


def _chunks(running: RunningTask, size: int) -> Iterator[bytes]:
    for start in range(0, size, RESULT_CHUNK_BYTES):
        yield running.read_result(start, min(RESULT_CHUNK_BYTES, size - start))
