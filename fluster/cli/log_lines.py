"""Lines of tasks' output, as they are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fluster.cli.output import write

if TYPE_CHECKING:
    from fluster_bus.messages import LogLine


def print_lines(lines: Iterable[LogLine], *, as_json: bool, follow: bool, numbered: bool) -> None:
    """What went to stderr goes to stderr. The pieces of a line are put together again, each as it comes."""
    unfinished: LogLine | None = None  # the piece that was written last, if its line goes on
    for line in lines:
        if as_json:
            write(line.model_dump_json())
            continue
        stream = sys.stderr if line.stream == "stderr" else sys.stdout
        goes_on = unfinished is not None and _writer(unfinished) == _writer(line)
        if unfinished is not None and not goes_on:
            _newline_after(unfinished)
        label = f"{line.task}| " if numbered and not goes_on else ""
        stream.write(f"{label}{line.text}" if line.goes_on else f"{label}{line.text}\n")
        unfinished = line if line.goes_on else None
        if follow:
            stream.flush()
    if unfinished is not None:
        _newline_after(unfinished)


def _writer(line: LogLine) -> tuple[int, int, str]:
    return line.task, line.attempt, line.stream


def _newline_after(line: LogLine) -> None:
    stream = sys.stderr if line.stream == "stderr" else sys.stdout
    stream.write("\n")
    stream.flush()
