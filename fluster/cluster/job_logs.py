"""The lines of a job's tasks, from the log stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

from fluster_bus import subjects
from fluster_bus.bus import Bus
from fluster_bus.feeds import CaughtUp, Entry, Feed
from fluster_bus.messages import JobId, LogBatch, LogLine, Namespace


async def job_logs(
    bus: Bus, namespace: Namespace, job_id: JobId, *, until: Coroutine[Any, Any, None] | None = None
) -> AsyncGenerator[LogLine]:
    """The lines stored so far; with `until`, also those that come before it returns.

    All of them: a worker has its logs acknowledged by the stream before it writes that the task has ended.
    """
    tail = subjects.logs_of_job(namespace, job_id)
    feed = Feed(bus, subjects.logs_stream(namespace), subject=tail, watch=subjects.watch_logs(namespace, f"{job_id}.>"))
    read = 1
    if until is not None:
        ended = asyncio.create_task(until)
        try:
            async with aclosing(_until(feed.follow(), ended)) as entries:
                async for entry in entries:
                    read = entry.sequence + 1
                    for line in _lines(entry):
                        yield line
            await ended
        finally:
            ended.cancel()
    async for entry in feed.stored(read):
        for line in _lines(entry):
            yield line


async def _until(entries: AsyncIterator[Entry | CaughtUp], ended: asyncio.Task[None]) -> AsyncGenerator[Entry]:
    """What comes before `ended` is done."""
    while True:
        following = asyncio.ensure_future(anext(entries))
        try:
            await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            entry = following.result()
        finally:
            following.cancel()
        if isinstance(entry, Entry):
            yield entry


def _lines(entry: Entry) -> Iterator[LogLine]:
    place = subjects.parse_logs(entry.subject)
    for time, text in LogBatch.from_json(entry.data).lines:
        yield LogLine(
            job_id=JobId(place.job),
            task=place.task,
            attempt=place.attempt,
            stream=place.stream,
            time=time,
            text=text,
        )
