"""Lines for this program's stderr, so many of one writer, written by a thread of their own, so that a slow reader delays nothing else."""

from __future__ import annotations

import asyncio
import math
import queue
import sys
import threading

from fluster.terminal import shown

_MAX_WAITING = 10_000  # lines, before those that come are left out
LINES_A_SECOND = 100


class Screen:
    """Used from one event loop; the thread begins with the first line."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[str | asyncio.Future[None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left_out = 0

    def show(self, line: str) -> None:
        """Have a line written."""
        if self._waiting.qsize() >= _MAX_WAITING:
            self._left_out += 1
            return
        if self._left_out:
            self._put(f"[fluster: {self._left_out:,} lines are left out: stderr is read too slowly]")
            self._left_out = 0
        self._put(line)

    def _put(self, line: str) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._write, name="fluster-output", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is about to end, and begins no more threads
                _write(line)
                return
            self._thread = thread
        self._waiting.put(line)

    async def flush(self, timeout_s: float) -> None:
        """Return when what was shown so far is written, or after that time."""
        if self._thread is None:
            return
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(written)
        await asyncio.wait([written], timeout=timeout_s)

    def _write(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, str):
                _write(item)
            else:
                loop = item.get_loop()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_settle, item)


def _settle(written: asyncio.Future[None]) -> None:
    if not written.done():
        written.set_result(None)


def _write(line: str) -> None:
    try:
        sys.stderr.write(shown(line, sys.stderr) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # it is closed, or there is none: it cannot be seen
        pass


class LineQuota:
    """The first lines of each second are shown, and then how many were not. Decides by the times that it is given."""

    def __init__(self, lines_a_second: int = LINES_A_SECOND) -> None:
        self._most = lines_a_second
        self._ends_at = -math.inf  # the second that began with a line
        self._shown = 0
        self._left_out = 0

    @property
    def owes(self) -> bool:
        """Whether lines were left out without a line that says so."""
        return self._left_out > 0

    def admit(self, now: float) -> bool:
        """Whether a line that comes at `now` is shown; after a second is over, `settle` is to be asked first."""
        if now >= self._ends_at:
            self._ends_at, self._shown = now + 1.0, 0
        if self._shown < self._most:
            self._shown += 1
            return True
        self._left_out += 1
        return False

    def settle(self, now: float) -> int:
        """How many lines were left out in a second that is over by `now`, told once."""
        if now < self._ends_at:
            return 0
        left_out, self._left_out = self._left_out, 0
        return left_out
