"""Many lines of a task's output at once: a message for each would cost more than all that is done with it.

Also the order in which a task wrote to its stdout and stderr, which are stored apart.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from fluster_bus.messages import JobId, LogBatch, LogLine

Written = tuple[float, str, bool]  # seconds since the epoch, the text, and whether its line goes on in the next


@dataclass(frozen=True, slots=True, eq=False)
class LogChunk:
    """Lines that follow each other in one attempt's stdout or stderr."""

    job_id: JobId
    task: int
    attempt: int
    stream: str
    lines: list[Written]

    def with_lines(self, lines: list[Written]) -> LogChunk:
        return LogChunk(self.job_id, self.task, self.attempt, self.stream, lines)

    def messages(self) -> list[LogLine]:
        """A message for each line."""
        # Its parts were checked as those of the batch that was read, and there may be a hundred thousand of them.
        blank = LogLine(job_id=self.job_id, task=self.task, attempt=self.attempt, stream=self.stream, time=0.0, text="")
        return [
            blank.compact_copy({"time": time, "text": text, "goes_on": goes_on}) for time, text, goes_on in self.lines
        ]


def chunks_of(lines: Iterable[LogLine]) -> Iterator[LogChunk]:
    """The chunks of which these are the messages."""
    for (job_id, task, attempt, stream), run in groupby(
        lines, lambda line: (line.job_id, line.task, line.attempt, line.stream)
    ):
        yield LogChunk(job_id, task, attempt, stream, [(line.time, line.text, line.goes_on) for line in run])


async def messages_of(lists: AsyncGenerator[list[LogChunk]]) -> AsyncGenerator[list[LogLine]]:
    """The messages of each list of chunks."""
    async with aclosing(lists):
        async for chunks in lists:
            yield [line for chunk in chunks for line in chunk.messages()]


def merged(first: LogChunk, second: LogChunk) -> list[LogChunk]:
    """The lines of both by their times; of those at the same time the first chunk's come first."""
    lines = heapq.merge(*([(chunk, line) for line in chunk.lines] for chunk in (first, second)), key=_time)
    return [chunk.with_lines([line for _, line in run]) for chunk, run in groupby(lines, itemgetter(0))]


def _time(place: tuple[LogChunk, Written]) -> float:
    return place[1][0]


class LastLines:
    """The last lines of all that were added, at most so many."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._chunks: deque[LogChunk] = deque()
        self._held = 0

    def add(self, chunks: Iterable[LogChunk]) -> None:
        for chunk in chunks:
            self._chunks.append(chunk)
            self._held += len(chunk.lines)
        while self._chunks and self._held - len(self._chunks[0].lines) >= self._count:
            self._held -= len(self._chunks.popleft().lines)

    def take(self) -> list[LogChunk]:
        chunks = list(self._chunks)
        if chunks and self._held > self._count:
            chunks[0] = chunks[0].with_lines(chunks[0].lines[self._held - self._count :])
        return chunks


class StreamOrder:
    """Puts together what one chunk of an attempt's spool gave for either stream: its first batch waits for the second."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[int, LogChunk]] = {}  # {(task, attempt): where it begins, its lines}

    @property
    def holds(self) -> bool:
        """Whether lines wait for others."""
        return bool(self._held)

    def add(self, batch: LogBatch, chunk: LogChunk) -> list[LogChunk]:
        """The lines that may be shown now that those of `batch`, which are in `chunk`, have come."""
        key = chunk.task, chunk.attempt
        held = self._held.pop(key, None)
        if batch.more:
            self._held[key] = batch.offset, chunk
            shown = [held[1]] if held is not None else []
        elif held is None:
            shown = [chunk]
        else:
            offset, earlier = held
            shown = merged(earlier, chunk) if offset == batch.offset else [earlier, chunk]
        return [each for each in shown if each.lines]

    def flush(self) -> list[LogChunk]:
        """The lines that were held: what they wait for is not there."""
        held, self._held = self._held, {}
        return [chunk for _offset, chunk in held.values() if chunk.lines]
