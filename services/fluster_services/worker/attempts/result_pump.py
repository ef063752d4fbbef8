"""Carries what a callable returned from where its task left it to the stream of results."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from typing import BinaryIO, cast

from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import HOPELESS, BusError, StreamNotFoundError
from fluster_bus.core.object_kinds import PAYLOADS
from fluster_bus.messages import TaskRecord, TaskResult
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.results import RESULT_CHUNK_BYTES, ResultStore
from fluster_services.worker.attempts.dropped import is_gone
from fluster_services.worker.contract.runtime import RunningTask
from fluster_services.worker.task.task_result import MAX_RESULT_BYTES

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
    while True:
        try:
            if result.size > MAX_RESULT_BYTES:
                file = _ResultFile(running, result.size)
                payloads = ObjectStore(bus, record.namespace, PAYLOADS)
                return TaskResult(
                    size=result.size, json_size=result.json_size, object=await payloads.put_file(cast("BinaryIO", file))
                )
            store = ResultStore(bus, record.namespace)
            await store.put(record.job_id, record.task, record.attempt, _chunks(running, result.size))
        except HOPELESS as error:
            return TaskResult(error=f"what it returned could not be stored: {error}")
        except StreamNotFoundError as error:
            if await is_gone(bus, record.namespace):
                return TaskResult(error=f"what it returned could not be stored: {error}")
            await asyncio.sleep(_PAUSE_S)
        except BusError as error:
            log.info("the result of %s waits: %s", running.key, error)
            await bus.wait_connected()
            await asyncio.sleep(_PAUSE_S)
        except OSError as error:
            return TaskResult(error=f"what it returned could not be read from its worker's disk: {error}")
        else:
            return result


class _ResultFile(io.RawIOBase):
    """What a task left, as a file."""

    def __init__(self, running: RunningTask, size: int) -> None:
        super().__init__()
        self._running = running
        self._size = size
        self._place = 0

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._place
        data = self._running.read_result(self._place, left if size < 0 else min(size, left))
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET:
            raise io.UnsupportedOperation("a place in it is counted from its start")
        self._place = offset
        return offset

    def tell(self) -> int:
        return self._place


def _chunks(running: RunningTask, size: int) -> Iterator[bytes]:
    for start in range(0, size, RESULT_CHUNK_BYTES):
        yield running.read_result(start, min(RESULT_CHUNK_BYTES, size - start))
