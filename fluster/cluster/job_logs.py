"""The lines of a job's tasks, from the log stream."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from fluster.cluster.job_states import UNANSWERED
from fluster_bus import subjects
from fluster_bus.bus import Bus
from fluster_bus.feeds import CaughtUp, Entry, Feed
from fluster_bus.messages import JobId, LogBatch, LogLine, Namespace

# A batch is stored after its lines were written: how much later at most is not known, so this much earlier is begun.
_STORED_LATER = timedelta(minutes=10)
_ATTEMPTS, _PAUSE_S = 20, 0.25


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted; what is None does not matter."""

    task: int | None = None
    attempt: int | None = None
    first_attempt: int = 1  # when none is picked: lower ones are of jobs that had the id before
    since: datetime | None = None
    grep: re.Pattern[str] | None = None

    def subject(self, namespace: Namespace, job_id: JobId) -> str:
        """Where such lines are, as far as a subject can tell."""
        if self.task is None and self.attempt is None:
            return subjects.logs_of_job(namespace, job_id)
        task, attempt = (subjects.ANY_TOKEN if each is None else str(each) for each in (self.task, self.attempt))
        return subjects.logs(namespace, job_id, task, attempt)

    def wants(self, line: LogLine) -> bool:
        return (
            (self.task is None or line.task == self.task)
            and (line.attempt == self.attempt if self.attempt is not None else line.attempt >= self.first_attempt)
            and (self.since is None or line.time >= self.since.timestamp())
            and (self.grep is None or self.grep.search(line.text) is not None)
        )


async def job_logs(
    bus: Bus,
    namespace: Namespace,
    job_id: JobId,
    *,
    wanted: LogFilter,
    tail: int | None = None,
    until: Coroutine[Any, Any, None] | None = None,
) -> AsyncGenerator[LogLine]:
    """The lines stored so far, only the last `tail` of them if that is given; with `until`, also those that come
    before it returns.

    All of them: a worker has its logs acknowledged by the stream before it writes that the task has ended.
    """
    feed = Feed(
        bus,
        subjects.logs_stream(namespace),
        subject=wanted.subject(namespace, job_id),
        watch=subjects.watch_logs(namespace, f"{job_id}.>"),
    )
    ended = asyncio.create_task(until) if until is not None else None
    read = 1
    last: deque[LogLine] = deque(maxlen=tail)
    try:
        since = wanted.since - _STORED_LATER if wanted.since is not None else None
        async for entry in _stored(bus, feed, since=since):
            read = entry.sequence + 1
            for line in _lines(entry, wanted):
                if tail is not None:
                    last.append(line)
                else:
                    yield line
        for line in last:
            yield line
        if ended is None:
            return
        async with aclosing(_until(feed.follow(read), ended)) as entries:
            async for entry in entries:
                read = entry.sequence + 1
                for line in _lines(entry, wanted):
                    yield line
        await ended
        async for entry in _stored(bus, feed, read):
            for line in _lines(entry, wanted):
                yield line
    finally:
        if ended is not None:
            ended.cancel()


async def _stored(bus: Bus, feed: Feed, start: int = 1, *, since: datetime | None = None) -> AsyncGenerator[Entry]:
    """What is stored, also when the server dies and comes back meanwhile."""
    for attempt in itertools.count():
        try:
            async for entry in feed.stored(start, since=since):
                start, since = entry.sequence + 1, None
                yield entry
        except UNANSWERED:
            if attempt == _ATTEMPTS:
                raise
            await bus.wait_connected()
            await asyncio.sleep(_PAUSE_S)
        else:
            return


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


def _lines(entry: Entry, wanted: LogFilter) -> Iterator[LogLine]:
    place = subjects.parse_logs(entry.subject)
    for time, text in LogBatch.from_json(entry.data).lines:
        line = LogLine(
            job_id=JobId(place.job),
            task=place.task,
            attempt=place.attempt,
            stream=place.stream,
            time=time,
            text=text,
        )
        if wanted.wants(line):
            yield line
