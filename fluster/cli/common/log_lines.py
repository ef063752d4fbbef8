"""Lines of tasks' output, as they are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TextIO

from fluster.terminal import shown

if TYPE_CHECKING:
    from fluster.cluster.jobs.log_chunks import LogChunk
    from fluster_bus.messages import LogLine


def print_chunks(
    lists: Iterable[Iterable[LogChunk]],
    *,
    as_json: bool,
    numbered: bool,
    array_id_of: Callable[[int], int] | None = None,
) -> str:
    """Print lines, each after the number of its task if they are `numbered`: of a task of an array, its number there.

    `array_id_of` gives a task's number in the array; without it the job is none. What went to stderr goes to stderr. The pieces of a line are put together again, each as it comes.
    Returns the last line, or the last piece of it.
    """
    printer = _Printer((array_id_of or _its_rank) if numbered else None)
    last = ""
    for chunks in lists:
        for chunk in chunks:
            last = chunk.lines[-1][1]
            if as_json:
                more = None if array_id_of is None else {"array_id": array_id_of(chunk.task)}
                sys.stdout.write("".join(f"{_as_json(line, more)}\n" for line in chunk.messages()))
            else:
                printer.print(chunk)
        sys.stdout.flush()  # a reader that follows is to see it now
        sys.stderr.flush()
    printer.end_line()
    return last


def _its_rank(task: int) -> int:
    return task


def _as_json(line: LogLine, more: dict[str, int] | None) -> str:
    if more is None:
        return line.model_dump_json()
    return json.dumps({**line.model_dump(mode="json"), **more}, ensure_ascii=False)


class _Printer:
    def __init__(self, number: Callable[[int], int] | None) -> None:
        self._number = number  # of a task, before each of its lines
        self._stream: TextIO = sys.stdout  # which was written to last
        self._unfinished: tuple[int, int, str] | None = None  # whose piece was written last, if its line goes on

    def print(self, chunk: LogChunk) -> None:
        """Write the lines of a chunk all at once."""
        writer = chunk.task, chunk.attempt, chunk.stream
        if self._unfinished != writer:
            self.end_line()
        stream = sys.stderr if chunk.stream == "stderr" else sys.stdout
        if stream is not self._stream:  # both may be one file, or one terminal
            self._stream.flush()
            self._stream = stream
        label = f"{self._number(chunk.task)}| " if self._number is not None else ""
        between = f"\n{label}"
        text = "".join([text if goes_on else text + between for _time, text, goes_on in chunk.lines])
        goes_on = chunk.lines[-1][2]
        text = (label if self._unfinished is None else "") + (text if goes_on else text.removesuffix(label))
        stream.write(shown(text, stream))
        self._unfinished = writer if goes_on else None

    def end_line(self) -> None:
        """End a line of which no piece will be the last here."""
        if self._unfinished is not None:
            self._unfinished = None
            self._stream.write("\n")
            self._stream.flush()
