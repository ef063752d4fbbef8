"""Results on stdout: tables for people, JSON for programs; lines of tasks' output, and a job's request in words."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

from fluster.cli.common.exit_codes import one_line
from fluster.terminal import shown

if TYPE_CHECKING:
    from fluster.cluster.jobs.log_chunks import LogChunk
    from fluster_bus.messages import EnvironmentConfig, JobInfo, LogLine, ResourceConfig

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
_SHOWN_HASH = 12  # hexadecimal digits


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


def shown_details(info: JobInfo) -> tuple[str, str, str, str]:
    """Its resources, command, variables and the rest of its environment; `-` for what an earlier controller does not
    tell.
    """
    details = info.details
    if details is None:
        return "-", "-", "-", "-"
    command = "(a callable)" if details.command is None else shlex.join(details.command)
    return (
        _resources(details.resources),
        command,
        _variables(details.environment) or "-",
        _environment(details.environment) or "-",
    )


def _resources(resources: ResourceConfig) -> str:
    from fluster_bus.messages.parts.counted import number_text

    device = resources.device
    words = [f"{resources.cpu:g} CPU", size(resources.memory)]
    if device.kind != "cpu":
        words.append(f"{device.count} x {device.variant} {device.kind.upper()}")
    if resources.disk:
        words.append(f"{size(resources.disk)} of disk")
    words += [f"{number_text(count)} {name}" for name, count in sorted(resources.resources.items())]
    words += [f"{name}={value}" for name, value in sorted(resources.labels.items())]
    return ", ".join(words)


def _variables(environment: EnvironmentConfig) -> str:
    variables = [f"{name}={value}" for name, value in sorted(environment.env_vars.items())]
    secrets = [f"{name}=***" for name in environment.secrets if name not in environment.env_vars]
    return " ".join([*variables, *secrets])


def _environment(environment: EnvironmentConfig) -> str:
    words = [
        # A path of the client says nothing elsewhere; what was packed is named by its hash.
        ("workspace", environment.bundle and environment.bundle[:_SHOWN_HASH]),
        ("cwd", environment.cwd),
        ("python", environment.python),
        ("image", environment.image),
        ("packages", ", ".join(environment.pip_packages)),
        ("requirements", environment.requirements and f"of {len(environment.requirements.splitlines())} lines"),
        ("packages", environment.uv_lock and "of uv.lock"),
        ("mounts", ", ".join(f"{source} at {path}" for path, source in environment.mounts.items())),
    ]
    return "; ".join(f"{name} {value}" for name, value in words if value)
