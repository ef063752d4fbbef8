"""Lines of tasks' output, as they are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from fluster.terminal_text import shown

if TYPE_CHECKING:
    from fluster.cluster.log_chunks import LogChunk


def print_chunks(lists: Iterable[Iterable[LogChunk]], *, as_json: bool, numbered: bool) -> None:
    """What went to stderr goes to stderr. The pieces of a line are put together again, each as it comes."""
    printer = _Printer(numbered=numbered)
    for chunks in lists:
        for chunk in chunks:
            if as_json:
                sys.stdout.write("".join(f"{line.model_dump_json()}\n" for line in chunk.messages()))
            else:
                printer.print(chunk)
        sys.stdout.flush()  # whoever follows wants to see it now
        sys.stderr.flush()
    printer.end_line()


class _Printer:
    def __init__(self, *, numbered: bool) -> None:
        self._numbered = numbered
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
        label = f"{chunk.task}| " if self._numbered else ""
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
