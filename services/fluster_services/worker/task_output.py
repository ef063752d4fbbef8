"""What a task writes to its standard streams, on the way to the spool."""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from functools import partial

from fluster_services.worker.attempt_directory import LOG_FILE
from fluster_services.worker.spool import LineCutter, SpoolWriter, Stream

_READ_BYTES = 64 * 1024
_TAIL_LINES = 20
_TAIL_LINE_BYTES = 2000
# What is still in a pipe when all its writers are dead. A stranger that holds it open may go on writing for ever.
_MAX_DRAIN_BYTES = 2 * 1024 * 1024


class TaskOutput:
    """The reading ends of a task's pipes, and the spool in the working directory."""

    def __init__(self, selector: selectors.BaseSelector, *, max_line_bytes: int, max_log_bytes: int) -> None:
        self.spool = SpoolWriter(LOG_FILE, max_log_bytes)
        self._selector = selector
        self._max_line_bytes = max_line_bytes
        self._cutters: dict[Stream, LineCutter] = {}
        self._pipes: dict[Stream, int] = {}
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)

    def open(self, stream: Stream) -> int:
        """Return the end of a new pipe that the task is to write to; who is given it closes it."""
        self._pipes[stream], end = os.pipe()
        os.set_blocking(self._pipes[stream], False)
        self._cutters[stream] = LineCutter(self._max_line_bytes)
        self._selector.register(self._pipes[stream], selectors.EVENT_READ, partial(self._read, stream))
        return end

    def tail(self) -> list[str]:
        """The last lines of both streams, also beyond the spool's cap."""
        return [line.decode("utf-8", "replace") for line in self._tail]

    def close(self) -> None:
        """Take what is left in the pipes, and no more."""
        for stream in tuple(self._pipes):
            drained = 0
            while stream in self._pipes and drained < _MAX_DRAIN_BYTES and (read := self._read(stream)):
                drained += read
            if stream in self._pipes:
                self._close_pipe(stream)
        self.spool.close()

    def _read(self, stream: Stream) -> int:
        """Spool what one read gives; return how much that was."""
        try:
            data = os.read(self._pipes[stream], _READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._spool_pieces(stream, self._cutters[stream].feed(data))
        else:
            self._close_pipe(stream)
        return len(data)

    def _close_pipe(self, stream: Stream) -> None:
        self._spool_pieces(stream, self._cutters[stream].finish())
        fd = self._pipes.pop(stream)
        self._selector.unregister(fd)
        os.close(fd)

    def _spool_pieces(self, stream: Stream, pieces: list[tuple[bytes, bool]]) -> None:
        self.spool.append(stream, pieces, time.time())
        self._tail.extend(text[:_TAIL_LINE_BYTES] for text, _ in pieces[-_TAIL_LINES:])
