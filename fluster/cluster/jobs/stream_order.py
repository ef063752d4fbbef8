"""The order in which a task wrote to its stdout and stderr, which are stored apart."""

from __future__ import annotations

from fluster.cluster.jobs.log_chunks import LogChunk, merged
from fluster_bus.messages import LogBatch


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
