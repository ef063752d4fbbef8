"""What a task tells of its progress, as its keeper sees it."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from pathlib import Path

from fluster.progress_file import Progress, make_progress_pipe, read_progress
from fluster_services.worker.linux.timers import Timers
from fluster_services.worker.task.pipe_words import PipeWords

_READ_BYTES = 64 * 1024
_INTERVAL_S = 0.25  # however often the task tells
_TIMER = "progress"


class ProgressWatch:
    """Looks at the progress file in `directory` when its pipe says that there is something new. Raises OSError when it cannot."""

    def __init__(self, selector: selectors.BaseSelector, timers: Timers, directory: Path) -> None:
        self.newest: Progress | None = None
        self.words = PipeWords()
        self._selector = selector
        self._timers = timers
        self._directory = directory
        self._fd = make_progress_pipe(directory)
        self._watch()

    def close(self) -> None:
        """Take its last word, and hear no more."""
        with contextlib.suppress(BlockingIOError):
            while self._take():  # no more than a pipe holds, with all that wrote to it gone
                pass
        self._look()
        if self._timers.at(_TIMER) is None:
            self._selector.unregister(self._fd)
        self._timers.cancel(_TIMER)
        os.close(self._fd)

    def _watch(self) -> None:
        self._selector.register(self._fd, selectors.EVENT_READ, self._on_word)

    def _look(self) -> None:
        self.newest = read_progress(self._directory) or self.newest

    def _take(self) -> int:
        data = os.read(self._fd, _READ_BYTES)
        self.words.feed(data)
        return len(data)

    def _on_word(self) -> None:
        self._take()
        self._look()
        # Not looked at for a while: a task that tells without end must not keep this process and the worker busy.
        self._selector.unregister(self._fd)
        self._timers.set(_TIMER, time.monotonic() + _INTERVAL_S, self._watch)
