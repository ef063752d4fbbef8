"""What the tasks of several jobs wrote, such as a pool's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluster.cluster.client import AsyncCluster
    from fluster_bus.messages import JobId, LogLine

_MAX_WAITING = 10  # lists of lines that were read and not yet taken


async def merged_logs(
    cluster: AsyncCluster,
    job_ids: Sequence[JobId],
    *,
    follow: bool = False,
    tail: int | None = None,
    since: datetime | timedelta | None = None,
    grep: str | None = None,
) -> AsyncGenerator[list[LogLine]]:
    """The lines of each job, as `cluster.logs` gives them, in lists: one job after the other, with `tail` by their times, with
    `follow` as they come.
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
