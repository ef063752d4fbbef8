"""Results on stdout: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from fluster.cli.common.exit_codes import one_line
from fluster.terminal import shown

_WIDE = 10_000  # columns, where there is no terminal: a table in a file or a pipe is not cut
_STYLES = {
    "RUNNING": "cyan",
    "SUCCEEDED": "green",
    "FAILED": "red",
    "WORKER_FAILED": "red",
    "UNSCHEDULABLE": "red",
    "KILLED": "yellow",
    "lost": "red",
}


def write(text: str) -> None:
    """A line of the result, at once: a reader that follows is to see it now."""
    sys.stdout.write(shown(text, sys.stdout) + "\n")
    sys.stdout.flush()


def write_json(value: object) -> None:
    """`value`, indented for people on a terminal."""
    write(json.dumps(value, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def jsonable(value: object) -> object:
    """`value` where JSON has a form for it, else what Python shows."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value


def write_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns, the last one cut to the terminal's width. Without colours where there is no terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    looked_at = sys.stdout.isatty()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=True, overflow="ellipsis" if number == len(columns) - 1 else "fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell), style=_STYLES.get(cell, "")) for cell in row))
    console = Console(highlight=False, width=None if looked_at else _WIDE)
    with console.capture() as captured:
        console.print(table)
    write("\n".join(line.rstrip() for line in captured.get().splitlines()))


def age(since: float | None, now: float | None = None) -> str:
    """How long ago that was: `12s`, `5m`, `3h`, `2d`."""
    if since is None:
        return "-"
    seconds = max(0.0, (time.time() if now is None else now) - since)
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def duration(started_at: float | None, finished_at: float | None, now: float | None = None) -> str:
    """How long it ran, or runs by now: `0.31s`, `12.5s`, `1:02:03`."""
    if started_at is None:
        return "-"
    seconds = max(0.0, (finished_at or (time.time() if now is None else now)) - started_at)
    if seconds < 60:
        return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """Bytes in the largest unit that leaves them readable: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
