"""Lines of logs in lists, which cost less than one by one: those of one job, and of several, such as a pool's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from fluster_bus.messages import JobId, LogLine

T = TypeVar("T")

_MAX_WAITING = 10  # lists of lines that were read and not yet taken


class Batched(AsyncGenerator[T, None]):
    """The items of lists. Who takes the lists themselves, from `batches`, pays for one step a list."""

    def __init__(self, batches: AsyncGenerator[list[T]]) -> None:
        self.batches = batches
        self._ready: deque[T] = deque()

    async def asend(self, _value: None) -> T:
        """The next item."""
        while not self._ready:
            self._ready.extend(await anext(self.batches))
        return self._ready.popleft()

    async def athrow(self, *error: Any) -> T:
        """As with any generator; the items that are left are dropped."""
        self._ready.clear()
        return (await self.batches.athrow(*error))[0]

    async def aclose(self) -> None:
        """End it."""
        self._ready.clear()
        await self.batches.aclose()


class Logs(Protocol):
    """What has the logs of jobs: a cluster."""

    def logs(
        self,
        job_id: JobId,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | timedelta | None = None,
        grep: str | None = None,
    ) -> Batched[LogLine]: ...


async def merged_logs(
    cluster: Logs,
    job_ids: Sequence[JobId],
    *,
    follow: bool = False,
    tail: int | None = None,
    since: datetime | timedelta | None = None,
    grep: str | None = None,
) -> AsyncGenerator[list[LogLine]]:
    """The lines of each job, as `cluster.logs` gives them, in lists: one job after the other, with `tail` by their
    times, with `follow` as they come.
    """
    sources = [cluster.logs(job_id, follow=follow, tail=tail, since=since, grep=grep).batches for job_id in job_ids]
    if follow and len(sources) > 1:
        async with aclosing(_as_they_come(sources)) as batches:
            async for lines in batches:
                yield lines
        return
    last: list[LogLine] = []
    for source in sources:
        async with aclosing(source) as batches:
            async for lines in batches:
                if tail is None or len(sources) == 1:
                    yield lines
                else:
                    last += lines
    if last and tail:
        yield sorted(last, key=lambda line: line.time)[-tail:]


async def _as_they_come(sources: Sequence[AsyncGenerator[list[LogLine]]]) -> AsyncGenerator[list[LogLine]]:
    arrived: asyncio.Queue[list[LogLine] | None] = asyncio.Queue(_MAX_WAITING)

    async def read(source: AsyncGenerator[list[LogLine]]) -> None:
        try:
            async with aclosing(source) as batches:
                async for lines in batches:
                    await arrived.put(lines)
        finally:
            if not leaving:
                await arrived.put(None)

    leaving = False
    readers = [asyncio.create_task(read(source)) for source in sources]
    try:
        for _ in readers:
            while (lines := await arrived.get()) is not None:
                yield lines
        for reader in readers:
            reader.result()
    finally:
        leaving = True
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
