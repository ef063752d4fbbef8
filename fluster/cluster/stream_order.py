"""The order in which a task wrote to its stdout and stderr, which are stored apart."""

from __future__ import annotations

import heapq
from operator import attrgetter

from fluster_bus.messages import LogBatch, LogLine

_TIME = attrgetter("time")


class StreamOrder:
    """Puts together what one chunk of an attempt's output gave for either stream: its first batch waits for the second."""

    def __init__(self) -> None:
        self._held: dict[
            tuple[int, int], tuple[int, list[LogLine]]
        ] = {}  # {(task, attempt): where it begins, its lines}

    @property
    def holds(self) -> bool:
        """Whether lines wait for others."""
        return bool(self._held)

    def add(self, task: int, attempt: int, batch: LogBatch, lines: list[LogLine]) -> list[LogLine]:
        """The lines that may be shown now that those of `batch` have come."""
        held = self._held.pop((task, attempt), None)
        if batch.more:
            self._held[task, attempt] = batch.offset, lines
            return held[1] if held is not None else []
        if held is None:
            return lines
        offset, earlier = held
        if offset != batch.offset:
            return earlier + lines
        return list(heapq.merge(earlier, lines, key=_TIME))

    def flush(self) -> list[LogLine]:
        """The lines that were held: what they wait for is not there."""
        held, self._held = self._held, {}
        return [line for _offset, lines in held.values() for line in lines]
