"""What the callables of jobs returned: bytes that workers store for the namespace's clients to read.

A result is a row of chunks, messages of one stream, named by job, task, attempt and number. Only workers may write
them, so what a client unpickles is what a job of its own namespace returned. How many there are is in the task's record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.core.errors import ObjectCorruptError, ObjectNotFoundError
from fluster_bus.storage.stored_messages import StoredMessages, side_by_side

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

RESULT_CHUNK_BYTES = 512 << 10
_AT_ONCE = 8


@dataclass(frozen=True)
class ResultStore:
    """The results of a namespace's jobs."""

    bus: Bus
    namespace: str

    @property
    def _messages(self) -> StoredMessages:
        return StoredMessages(self.bus, subjects.results_stream(self.namespace))

    async def put(self, job_id: str, task: int, attempt: int, chunks: Iterable[bytes]) -> None:
        """Store the chunks, each of RESULT_CHUNK_BYTES but for the last; doing it again changes nothing.

        Raises StorageError, BusError.
        """
        for number, chunk in enumerate(chunks):
            await self._messages.append(subjects.result_part(self.namespace, job_id, task, attempt, number), chunk)

    async def get(self, job_id: str, task: int, attempt: int, size: int) -> bytes:
        """The `size` bytes that were put. Raises ObjectNotFoundError, ObjectCorruptError, StorageError, BusError."""
        count = -(-size // RESULT_CHUNK_BYTES)
        chunks: list[bytes] = []
        for start in range(0, count, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, count))
            chunks += await side_by_side(self._chunk(job_id, task, attempt, number) for number in numbers)
        data = b"".join(chunks)
        if len(data) != size:
            raise ObjectCorruptError(
                f"the result of task {task} of job {job_id} has {len(data):,} bytes, not the {size:,} of its record"
            )
        return data

    async def remove(self, job_id: str) -> None:
        """Remove all results of a job. Only whoever may change streams can. Raises BusError."""
        request = json.dumps({"filter": subjects.results_of_job(self.namespace, job_id)}).encode()
        await self.bus.request(subjects.stream_purge(subjects.results_stream(self.namespace)), request)

    async def _chunk(self, job_id: str, task: int, attempt: int, number: int) -> bytes:
        found = await self._messages.last(subjects.result_part(self.namespace, job_id, task, attempt, number))
        if found is None:
            raise ObjectNotFoundError(
                f"the result of task {task} of job {job_id} is not kept any longer: results are kept for "
                "7 days (FLUSTER_RESULTS_KEPT_S of the controller), or until newer ones take their room"
            )
        return found.data
