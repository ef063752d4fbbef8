"""The lines of a job's tasks, from the log stream."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from fluster.cluster.jobs.arguments import check_job_id, check_number, log_start
from fluster.cluster.jobs.job_states import UNANSWERED, JobStates
from fluster.cluster.jobs.job_wait import wait_finished
from fluster.cluster.jobs.log_chunks import LastLines, LogChunk, StreamOrder
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.carrier import wait_to_retry
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import BusError
from fluster_bus.messages import FlushRequest, JobId, LogBatch, Namespace
from fluster_bus.storage.feeds import CaughtUp, Entry, Feed

log = logging.getLogger(__name__)

# A batch is stored after its lines were written: how much later at most is not known, so this much earlier is begun.
_STORED_LATER = timedelta(minutes=10)
_ATTEMPTS, _PAUSE_S = 20, 0.25
_FLUSH_TIMEOUT_S = 5.0
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
            raise ValueError(f"grep={self.grep!r}: invalid regular expression: {error}") from error
        return LogFilter(self.task, self.attempt, first_attempt, start, pattern)


async def read_logs(
    bus: Bus, namespace: Namespace, states: JobStates, query: LogQuery
) -> AsyncGenerator[list[LogChunk]]:
    """The lines that are asked for, in lists of chunks. Raises as `AsyncCluster.logs` does."""
    query.filter(first_attempt=1)  # what is wrong is raised before a request is sent
    [info] = await states.get([check_job_id(query.job_id)])
    wanted = query.filter(first_attempt=info.first_attempt)
    if not query.follow and not info.status.finished():
        await _flush(bus, namespace, query.job_id)
    finished = wait_finished(bus, namespace, {query.job_id}, states) if query.follow else None
    lists = job_logs(bus, namespace, query.job_id, wanted=wanted, tail=query.tail, until=finished)
    async with aclosing(lists):
        async for chunks in lists:
            yield chunks


async def _flush(bus: Bus, namespace: Namespace, job_id: JobId) -> None:
    """Have what the job's tasks have written by now in the stream; where that cannot be, what is there has to do."""
    try:
        subject = subjects.jobs_verb(namespace, "flush")
        await bus.request(subject, FlushRequest(job_id=job_id).to_json(), timeout_s=_FLUSH_TIMEOUT_S)
    except BusError as error:
        log.info("the newest lines of %s may not be among its logs yet: %s", job_id, error)


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

    def applied(self, chunk: LogChunk) -> LogChunk:
        """The lines of `chunk` that are wanted."""
        if not (
            (self.task is None or chunk.task == self.task)
            and (chunk.attempt == self.attempt if self.attempt is not None else chunk.attempt >= self.first_attempt)
        ):
            return chunk.with_lines([])
        lines = chunk.lines
        if self.since is not None:
            since = self.since.timestamp()
            lines = [line for line in lines if line[0] >= since]
        if self.grep is not None:
            lines = [line for line in lines if self.grep.search(line[1])]
        return chunk.with_lines(lines)


async def job_logs(
    bus: Bus,
    namespace: Namespace,
    job_id: JobId,
    *,
    wanted: LogFilter,
    tail: int | None = None,
    until: Coroutine[object, None, None] | None = None,
) -> AsyncGenerator[list[LogChunk]]:
    """The lines stored so far, only the last `tail` of them if that is given; with `until`, also those that come
    before it returns. Each list has some that were there at once.

    All of them: a worker has its logs acknowledged by the stream before it writes that the task has ended.
    """
    feed = Feed(
        bus,
        buckets.logs_stream(namespace),
        subject=wanted.subject(namespace, job_id),
        watch=subjects.watch_logs(namespace, f"{job_id}.>"),
    )
    ended = asyncio.create_task(until) if until is not None else None
    read = 1
    order = StreamOrder()
    last = LastLines(tail or 0)
    try:
        since = wanted.since - _STORED_LATER if wanted.since is not None else None
        async for entry in _stored(bus, feed, since=since):
            read = entry.sequence + 1
            chunks = _chunks(entry, wanted, order)
            if tail is not None:
                last.add(chunks)
            elif chunks:
                yield chunks
        held = order.flush() if ended is None or tail is not None else []
        if tail is not None:
            last.add(held)
            held = last.take()
        yield held
        if ended is None:
            return
        async with aclosing(_until(feed.follow(read), ended, order)) as entries:
            async for each in entries:
                if each is None:
                    yield order.flush()
                    continue
                read = each.sequence + 1
                if chunks := _chunks(each, wanted, order):
                    yield chunks
        await ended
        async for entry in _stored(bus, feed, read):
            if chunks := _chunks(entry, wanted, order):
                yield chunks
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
            await wait_to_retry(bus, _PAUSE_S)
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


def _chunks(entry: Entry, wanted: LogFilter, order: StreamOrder) -> list[LogChunk]:
    """The lines that are wanted, as far as they may be shown now."""
    place = subjects.parse_logs(entry.subject)
    batch = LogBatch.from_json(entry.data)
    going_on = set(batch.going_on)
    lines = [(time, text, number in going_on) for number, (time, text) in enumerate(batch.lines)]
    chunk = LogChunk(JobId(place.job), place.task, place.attempt, place.stream, lines)
    return order.add(batch, wanted.applied(chunk))
