"""The lines of a job's tasks, from the log stream."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from fluster.cluster.arguments import check_job_id, check_number, log_start
from fluster.cluster.job_states import UNANSWERED, JobStates
from fluster.cluster.job_wait import wait_finished
from fluster.cluster.stream_order import StreamOrder
from fluster_bus import subjects
from fluster_bus.bus import Bus
from fluster_bus.feeds import CaughtUp, Entry, Feed
from fluster_bus.messages import JobId, LogBatch, LogLine, Namespace

# A batch is stored after its lines were written: how much later at most is not known, so this much earlier is begun.
_STORED_LATER = timedelta(minutes=10)
_ATTEMPTS, _PAUSE_S = 20, 0.25
_HELD_S = 0.5  # for the other stream's lines, which are stored a moment later


@dataclass(frozen=True)
class LogQuery:
    """What is asked for, as `AsyncCluster.logs` takes it."""

    job_id: JobId
    follow: bool = False
    tail: int | None = None
    since: datetime | timedelta | None = None
    grep: str | None = None
    task: int | None = None
    attempt: int | None = None

    def filter(self, *, first_attempt: int) -> LogFilter:
        """The lines that are wanted. Raises TypeError, ValueError."""
        check_number("task", self.task, 0)
        check_number("attempt", self.attempt, 1)
        if self.tail is not None and self.tail < 0:
            raise ValueError(f"tail={self.tail} lines cannot be kept: give 0 or more")
        start = log_start(self.since, datetime.now(UTC))
        try:
            pattern = re.compile(self.grep) if self.grep is not None else None
        except re.error as error:
            raise ValueError(f"grep={self.grep!r} is no regular expression: {error}") from error
        return LogFilter(self.task, self.attempt, first_attempt, start, pattern)


async def read_logs(
    bus: Bus, namespace: Namespace, states: JobStates, query: LogQuery
) -> AsyncGenerator[list[LogLine]]:
    """The lines that are asked for, in lists. Raises as `AsyncCluster.logs` does."""
    query.filter(first_attempt=1)  # what is wrong is told before anybody is asked
    [info] = await states.get([check_job_id(query.job_id)])
    wanted = query.filter(first_attempt=info.first_attempt)
    finished = wait_finished(bus, namespace, {query.job_id}, states) if query.follow else None
    lists = job_logs(bus, namespace, query.job_id, wanted=wanted, tail=query.tail, until=finished)
    async with aclosing(lists):
        async for lines in lists:
            yield lines


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
) -> AsyncGenerator[list[LogLine]]:
    """The lines stored so far, only the last `tail` of them if that is given; with `until`, also those that come
    before it returns. Each list has some that were there at once.

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
    order = StreamOrder()
    last: deque[LogLine] = deque(maxlen=tail)
    try:
        since = wanted.since - _STORED_LATER if wanted.since is not None else None
        async for entry in _stored(bus, feed, since=since):
            read = entry.sequence + 1
            lines = _lines(entry, wanted, order)
            if tail is not None:
                last.extend(lines)
            elif lines:
                yield lines
        if ended is None or tail is not None:
            last.extend(order.flush())
        yield list(last)
        if ended is None:
            return
        async with aclosing(_until(feed.follow(read), ended, order)) as entries:
            async for each in entries:
                if each is None:
                    yield order.flush()
                    continue
                read = each.sequence + 1
                if lines := _lines(each, wanted, order):
                    yield lines
        await ended
        async for entry in _stored(bus, feed, read):
            if lines := _lines(entry, wanted, order):
                yield lines
        yield order.flush()
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


async def _until(
    entries: AsyncIterator[Entry | CaughtUp], ended: asyncio.Task[None], order: StreamOrder
) -> AsyncGenerator[Entry | None]:
    """What comes before `ended` is done; None when lines have waited too long for others."""
    while True:
        following = asyncio.ensure_future(anext(entries))
        try:
            while not following.done():
                timeout_s = _HELD_S if order.holds else None
                await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED, timeout=timeout_s)
                if following.done():
                    break
                if ended.done():
                    return
                yield None
            entry = following.result()
        finally:
            following.cancel()
        if isinstance(entry, Entry):
            yield entry


def _lines(entry: Entry, wanted: LogFilter, order: StreamOrder) -> list[LogLine]:
    """Those that are wanted, as far as they may be shown now."""
    place = subjects.parse_logs(entry.subject)
    batch = LogBatch.from_json(entry.data)
    job_id, goes_on = JobId(place.job), set(batch.going_on)
    # Its parts were checked as those of the batch, and there may be a hundred thousand of them.
    blank = LogLine(job_id=job_id, task=place.task, attempt=place.attempt, stream=place.stream, time=0.0, text="")
    lines = [
        blank.model_copy(update={"time": time, "text": text, "goes_on": number in goes_on})
        for number, (time, text) in enumerate(batch.lines)
    ]
    return order.add(place.task, place.attempt, batch, [line for line in lines if wanted.wants(line)])
