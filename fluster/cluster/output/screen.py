"""Lines for this program's stderr, written by a thread of their own, so that a slow reader delays nothing else."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading

from fluster.terminal import shown

_MAX_WAITING = 10_000  # lines, before those that come are left out


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
