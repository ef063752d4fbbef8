"""A task's output: from the pipes, in the order in which they can be read, to the spool."""

from __future__ import annotations

import os
import select
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from fluster_services.worker.contract.attempt_directory import LOG_FILE
from fluster_services.worker.contract.spool import LineCutter, SpoolWriter, Stream
from fluster_services.worker.linux.timers import Timers

_READ_BYTES = 64 * 1024
_TAIL_LINES = 20
_TAIL_LINE_BYTES = 2000
_OVERWRITTEN_S = 0.1  # between two pieces of a line that is written over
# What is still in the pipes when all their writers are dead. A stranger that holds one open may go on writing for ever.
_MAX_DRAIN_BYTES = 4 * 1024 * 1024


class ReadablePipes(Protocol):
    """Pipes of which a selector says that some can be read; `take` says which, in the order in which they became so.

    That is all that two pipes show of the order of writes to both.
    """

    def add(self, fd: int) -> None:
        """Look at one more."""

    def remove(self, fd: int) -> None:
        """Look at it no more."""

    def take(self) -> list[int]:
        """Those that can be read now. Each is left out from then on until `again`."""

    def again(self, fd: int) -> None:
        """One that was taken has been read."""

    def close(self) -> None:
        """Look at none of them."""


class EpollPipes:
    """Of the kernel's queue, in which a pipe takes its place when it becomes readable. Linux only.

    Apart from the selector, where what was readable at the last look comes first.
    """

    def __init__(self, selector: selectors.BaseSelector, on_readable: Callable[[], object]) -> None:
        self._selector = selector
        self._once = select.EPOLLIN | select.EPOLLONESHOT
        self._queue = select.epoll()
        selector.register(self._queue, selectors.EVENT_READ, on_readable)

    def add(self, fd: int) -> None:
        self._queue.register(fd, self._once)

    def remove(self, fd: int) -> None:
        self._queue.unregister(fd)

    def take(self) -> list[int]:
        return [fd for fd, _ in self._queue.poll(0)]

    def again(self, fd: int) -> None:
        self._queue.modify(fd, self._once)

    def close(self) -> None:
        self._selector.unregister(self._queue)
        self._queue.close()


class SelectPipes:
    """Where the system has none of these queues: those that are readable at one look, as they were added."""

    def __init__(self, selector: selectors.BaseSelector, on_readable: Callable[[], object]) -> None:
        self._selector = selector
        self._on_readable = on_readable
        self._fds: list[int] = []

    def add(self, fd: int) -> None:
        self._fds.append(fd)
        self._selector.register(fd, selectors.EVENT_READ, self._on_readable)

    def remove(self, fd: int) -> None:
        self._fds.remove(fd)
        self._selector.unregister(fd)

    def take(self) -> list[int]:
        readable = set(select.select(self._fds, [], [], 0)[0]) if self._fds else set()
        return [fd for fd in self._fds if fd in readable]

    def again(self, fd: int) -> None:
        """The selector tells each time that there is more."""

    def close(self) -> None:
        for fd in tuple(self._fds):
            self.remove(fd)


def readable_pipes(selector: selectors.BaseSelector, on_readable: Callable[[], object]) -> ReadablePipes:
    """What this system has; `selector` calls `on_readable` when there is something to take."""
    return EpollPipes(selector, on_readable) if sys.platform.startswith("linux") else SelectPipes(selector, on_readable)


class TaskOutput:
    """The reading ends of a task's pipes, and the spool in the working directory."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        timers: Timers,
        *,
        max_line_bytes: int,
        max_log_bytes: int,
        readable: Callable[[selectors.BaseSelector, Callable[[], object]], ReadablePipes] = readable_pipes,
    ) -> None:
        self.spool = SpoolWriter(LOG_FILE, max_log_bytes)
        self._timers = timers
        self._max_line_bytes = max_line_bytes
        self._cutters: dict[Stream, LineCutter] = {}
        self._pipes: dict[Stream, int] = {}
        self._readable = readable(selector, self._read)
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._unfinished: dict[Stream, bytes] = {}  # the line whose pieces come, as far as the tail wants it

    def open(self, stream: Stream) -> int:
        """Return the end of a new pipe that the task is to write to; who is given it closes it."""
        self._pipes[stream], end = os.pipe()
        os.set_blocking(self._pipes[stream], False)
        self._cutters[stream] = LineCutter(self._max_line_bytes)
        self._readable.add(self._pipes[stream])
        return end

    def tail(self) -> list[str]:
        """The last lines of both streams, also beyond the spool's cap."""
        lines = [*self._tail, *self._unfinished.values()]
        return [line.decode("utf-8", "replace") for line in lines[-_TAIL_LINES:]]

    def drain(self) -> None:
        """Take what is in the pipes, and no more."""
        drained = 0
        while self._pipes and drained < _MAX_DRAIN_BYTES and (read := self._read()):
            drained += read

    def close(self) -> None:
        """Take what is left in the pipes, and close them."""
        self.drain()
        for stream in tuple(self._pipes):
            self._close_pipe(stream)
        self._readable.close()
        self.spool.close()

    def _read(self) -> int:
        """Spool what one read of each readable pipe gives; return how much that was."""
        streams = {fd: stream for stream, fd in self._pipes.items()}
        # All is read before any is spooled, which takes longer: what is written meanwhile comes after it.
        read = [(streams[fd], self._take(fd)) for fd in self._readable.take()]
        for stream, data in read:
            if data == b"":
                self._close_pipe(stream)
            elif data:
                self._spool(stream, data)
        return sum(len(data) for _, data in read if data)

    def _take(self, fd: int) -> bytes | None:
        """What the pipe has, nothing at its end; None if there is nothing yet."""
        try:
            return os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return None
        finally:
            self._readable.again(fd)

    def _spool(self, stream: Stream, data: bytes) -> None:
        cutter = self._cutters[stream]
        self._spool_pieces(stream, cutter.feed(data))
        if cutter.overwrites and self._timers.at(stream) is None:
            # Not at once, as it may be the end of a line on Windows, nor more often than people read.
            at = time.monotonic() + _OVERWRITTEN_S
            self._timers.set(stream, at, partial(self._spool_unfinished, stream))

    def _spool_unfinished(self, stream: Stream) -> None:
        """Have a progress bar seen before its line ends."""
        cutter = self._cutters[stream]
        if cutter.overwrites:
            self._spool_pieces(stream, cutter.take_unfinished())

    def _close_pipe(self, stream: Stream) -> None:
        self._timers.cancel(stream)
        self._spool_pieces(stream, self._cutters[stream].finish())
        fd = self._pipes.pop(stream)
        self._readable.remove(fd)
        os.close(fd)

    def _spool_pieces(self, stream: Stream, pieces: list[tuple[bytes, bool]]) -> None:
        self.spool.append(stream, pieces, time.time())
        for text, is_partial in pieces[-_TAIL_LINES:]:
            line = self._unfinished.pop(stream, b"") + text
            # Of a line that is written over, a terminal shows the end.
            line = line[-_TAIL_LINE_BYTES:] if b"\r" in line[:-1] else line[:_TAIL_LINE_BYTES]
            if is_partial:
                self._unfinished[stream] = line
            else:
                self._tail.append(line)
