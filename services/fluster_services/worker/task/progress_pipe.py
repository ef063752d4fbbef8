"""The pipe through which a task tells its keeper of progress, and a few words when the disk has no room for them.

The pipe is there before the task is, and needs no room. On it each dot says that the progress file is new; a word is a line of
JSON, {"name of the file that could not be written": what was to be in it}, short enough to be written in one piece.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fluster.json_lines import BadLineError, JsonLines, encoded
from fluster.progress_file import PROGRESS_PIPE, Progress, make_progress_pipe, read_progress
from fluster_bus.core.json_types import JsonObject
from fluster_services.worker.contract.attempt_directory import write_json
from fluster_services.worker.linux.timers import Timers

_MAX_LINE_BYTES = select.PIPE_BUF
_MAX_CHARACTERS = 1_000
_MAX_NAMES = 4
_READ_BYTES = 64 * 1024
_INTERVAL_S = 0.25  # however often the task tells
_TIMER = "progress"


def leave_word(file: Path, data: Mapping[str, object], *, pipe_folder: Path | None = None) -> None:
    """Write `data` to `file`; where that cannot be done, tell the keeper what is most important of it. Raises nothing.

    The keeper's pipe is in `pipe_folder`, which is that of the file unless given.
    """
    try:
        write_json(file, data)
    except OSError:
        with suppress(OSError):  # without a pipe the exit code has to do
            _tell(_line(file.name, data), (pipe_folder or file.parent) / PROGRESS_PIPE)


def _line(name: str, data: Mapping[str, object]) -> bytes:
    characters = _MAX_CHARACTERS
    while True:
        short = {key: value[:characters] if isinstance(value, str) else value for key, value in data.items()}
        line = b"\n" + encoded({name: short})
        if len(line) <= _MAX_LINE_BYTES or not characters:
            return line
        characters //= 2


def _tell(line: bytes, pipe: Path) -> None:
    fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.set_blocking(fd, True)  # full of dots it is emptied in a moment
        os.write(fd, line)
    finally:
        os.close(fd)


class PipeWords:
    """What was reported through one pipe, by the name of the file in which it should have been."""

    def __init__(self) -> None:
        self._words: dict[str, dict[str, object]] = {}
        self._lines = JsonLines(_MAX_LINE_BYTES)

    def feed(self, data: bytes) -> None:
        """Take what was read from the pipe; the task's own code may have written anything to it."""
        for told in self._lines.feed(data):
            if len(self._words) >= _MAX_NAMES:
                return
            if not isinstance(told, BadLineError):
                self._words.update({name: word for name, word in told.items() if isinstance(word, dict)})

    def get(self, name: str) -> JsonObject | None:
        """What should have been in the file of that name; None when nothing was reported."""
        return self._words.get(name)


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
