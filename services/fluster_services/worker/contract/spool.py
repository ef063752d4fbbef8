"""The spool: a task's output on disk, in the format that Kubernetes' runtimes write (CRI).

One line is one record:

    2026-03-01T12:00:00.123456Z stdout F the text
    2026-03-01T12:00:00.123456Z stderr P the first piece of a line that was too long

`F` is a full line or the last piece of one, `P` a piece whose line goes on in the stream's next record. The text is kept byte for
byte, and decoded by who reads it. Records are only ever appended, so the offset behind any of them is a place to go on from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from io import FileIO
from itertools import islice, takewhile
from operator import methodcaller
from pathlib import Path
from typing import Literal, NamedTuple

from fluster_services.worker.contract.attempt_directory import open_task_fd, open_task_file

Stream = Literal["stdout", "stderr"]
_MAX_RECORD_BYTES = 1 << 20  # a line has less
_STREAMS: dict[bytes, Stream] = {b"stdout": "stdout", b"stderr": "stderr"}

_DEFAULT_READ_BYTES = 1024 * 1024


class SpoolError(Exception):
    """The spool does not hold what was asked of it."""


class SpoolRecord(NamedTuple):
    """One line of output, or a piece of one."""

    offset: int  # of the record's first byte
    time: float  # wall clock, when the keeper read it
    stream: Stream
    text: str  # without its newline
    is_partial: bool  # its line goes on in the stream's next record


class SpoolRun(NamedTuple):
    """Records that follow each other and are alike but for their texts, as those are that the keeper read at once."""

    offset: int  # of the first record's first byte
    time: float
    stream: Stream
    is_partial: bool
    head: bytes  # with which each begins
    lines: list[bytes]

    @property
    def texts(self) -> list[str]:
        """The text of each."""
        start = len(self.head)
        return b"\n".join([line[start:] for line in self.lines]).decode("utf-8", "replace").split("\n")

    def records(self) -> Iterator[SpoolRecord]:
        """Each by itself."""
        offset = self.offset
        for line, text in zip(self.lines, self.texts, strict=True):
            yield SpoolRecord(offset, self.time, self.stream, text, self.is_partial)
            offset += len(line) + 1


class LineCutter:
    """Cuts a stream of bytes into lines, and lines that are too long into pieces; keeps less than one line in memory."""

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """Return the (text, is_partial) that `data` completes."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        pieces: list[tuple[bytes, bool]] = []
        for line in lines:
            pieces.append((self._cut(line, pieces) if len(line) > self._max_line_bytes else line, False))
        if len(self._rest) > self._max_line_bytes:
            self._rest = self._cut(self._rest, pieces)
        return pieces

    @property
    def overwrites(self) -> bool:
        """Whether what there is of the last line begins anew with a carriage return, as a progress bar does."""
        return b"\r" in self._rest

    def take_unfinished(self) -> list[tuple[bytes, bool]]:
        """Return what there is of the last line, as a piece; but for half a character."""
        end = len(self._rest) - _cut_character(self._rest)
        piece, self._rest = self._rest[:end], self._rest[end:]
        return [(piece, True)] if piece else []

    def finish(self) -> list[tuple[bytes, bool]]:
        """Return what is left when the stream has ended without a newline."""
        rest, self._rest = self._rest, b""
        return [(rest, False)] if rest else []

    def _cut(self, line: bytes, pieces: list[tuple[bytes, bool]]) -> bytes:
        start = 0
        while len(line) - start > self._max_line_bytes:
            end = _character_boundary(line, start + self._max_line_bytes)
            pieces.append((line[start:end], True))
            start = end
        return line[start:]


def _character_boundary(line: bytes, end: int) -> int:
    """Return the last place up to `end` that splits no UTF-8 character."""
    for candidate in range(end, end - 4, -1):
        if line[candidate] & 0xC0 != 0x80:
            return candidate
    return end  # not UTF-8


def _cut_character(text: bytes) -> int:
    """Return how many bytes at the end begin a UTF-8 character that is not whole."""
    for count in range(1, min(len(text), 3) + 1):
        byte = text[-count]
        if byte & 0xC0 != 0x80:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return count if count < needed else 0
    return 0


class SpoolWriter:
    """Appends to a spool. It never raises for want of room: what cannot be stored is counted, and a mark says so in its place."""

    def __init__(self, path: str | Path, max_log_bytes: int) -> None:
        self._path = path
        self._fd: int | None = None  # not before there is something to store: most short tasks say nothing
        self._max_log_bytes = max_log_bytes
        self._stored: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self._is_capped: dict[Stream, bool] = {"stdout": False, "stderr": False}
        self._lost_bytes = 0  # since the last mark, for want of disk space
        self._lost_because = ""
        self.end = 0
        self.dropped_bytes = 0

    def append(self, stream: Stream, pieces: Sequence[tuple[bytes, bool]], now: float) -> None:
        """Store (text, is_partial) of one stream, all read at `now`."""
        if not pieces:
            return
        if self._is_capped[stream]:
            self.dropped_bytes += _size(pieces)
            return
        records = _encode(stream, pieces, now)
        room = self._max_log_bytes - self._stored[stream]
        fitting = len(records)
        if sum(map(len, records)) > room:
            fitting, total = 0, 0
            while total + len(records[fitting]) <= room:
                total += len(records[fitting])
                fitting += 1
        self._store(stream, records[:fitting], _size(pieces[:fitting]), now)
        if fitting < len(records):
            self._is_capped[stream] = True
            self.dropped_bytes += _size(pieces[fitting:])
            mark = f"[fluster: output above {self._max_log_bytes} bytes was dropped]"
            self._write(b"".join(_encode(stream, [(mark.encode(), False)], now)))

    def close(self) -> None:
        """Close the file; what was appended is there."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _store(self, stream: Stream, records: list[bytes], text_bytes: int, now: float) -> None:
        block = b"".join(records)
        self._stored[stream] += len(block)
        if self._lost_bytes:
            mark = f"[fluster: {self._lost_bytes} bytes of output were lost: {self._lost_because}]"
            block = b"".join(_encode("stderr", [(mark.encode(), False)], now)) + block
        if self._write(block):
            self._lost_bytes = 0
        else:
            self._lost_bytes += text_bytes
            self.dropped_bytes += text_bytes

    def _write(self, block: bytes) -> bool:
        if not block:
            return True
        view = memoryview(block)
        try:
            if self._fd is None:
                self._fd = open_task_fd(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                self.end = os.fstat(self._fd).st_size
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:  # a full disk must not end the task; half a record must not stay
            self._lost_because = error.strerror or str(error)
            if self._fd is not None:
                os.ftruncate(self._fd, self.end)
            return False
        self.end += len(block)
        return True


def _size(pieces: Sequence[tuple[bytes, bool]]) -> int:
    return sum(len(text) + (not is_partial) for text, is_partial in pieces)


def _encode(stream: Stream, pieces: Sequence[tuple[bytes, bool]], now: float) -> list[bytes]:
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    full, partial = (f"{stamp} {stream} {tag} ".encode() for tag in "FP")
    return [(partial if is_partial else full) + text + b"\n" for text, is_partial in pieces]


def _opened(path: str | Path) -> FileIO:
    try:
        return open_task_file(path)
    except FileNotFoundError:
        raise
    except OSError as cause:
        raise SpoolError(f"{path} cannot be read: {cause}") from cause


def read_spool_end(path: str | Path, *, max_bytes: int) -> tuple[list[SpoolRecord], bool]:
    """Return the records in about the last `max_bytes`, and whether those are all. Raises as `read_spool` does."""
    with _opened(path) as file:
        start = max(0, os.fstat(file.fileno()).st_size - max_bytes)
        if start > 0:  # to the end of the record that it lies in
            file.seek(start - 1)
            rest = file.read(max_bytes)
            newline = rest.find(b"\n")
            if newline < 0:
                return [], False
            start += newline
    records: list[SpoolRecord] = []
    offset = start
    while offset - start < max_bytes:  # the task may be writing faster than this reads
        more, offset = read_spool(path, offset)
        if not more:
            break
        records += more
    return records, start == 0


def read_spool(
    path: str | Path, start_offset: int = 0, *, max_bytes: int = _DEFAULT_READ_BYTES
) -> tuple[list[SpoolRecord], int]:
    """The records of what `read_spool_runs` returns."""
    runs, following = read_spool_runs(path, start_offset, max_bytes=max_bytes)
    return [record for run in runs for record in run.records()], following


def read_spool_runs(
    path: str | Path, start_offset: int = 0, *, max_bytes: int = _DEFAULT_READ_BYTES
) -> tuple[list[SpoolRun], int]:
    """Return records from `start_offset` on and the offset to go on from; nothing new is an empty list and the same offset.

    About `max_bytes` are read, at least one whole record if there is one. A record that is still being written is left for the
    next time. Raises SpoolError if `start_offset` is not one that was returned earlier, and for what no keeper wrote; FileNotFoundError if
    the spool does not exist.
    """
    with _opened(path) as file:
        if start_offset > 0:
            file.seek(start_offset - 1)
            if file.read(1) != b"\n":
                raise SpoolError(
                    f"{path}: no record begins at offset {start_offset}; go on from an offset that was returned"
                )
        block = file.read(max_bytes)
        while (last := block.rfind(b"\n")) < 0:
            more = file.read(max_bytes)
            if not more:
                return [], start_offset
            block += more
            if len(block) > max_bytes + _MAX_RECORD_BYTES:
                raise SpoolError(f"{path}: what begins at offset {start_offset} is not a record: it does not end")
    try:
        return list(_runs(block[:last].split(b"\n"), start_offset)), start_offset + last + 1
    except SpoolError as error:
        raise SpoolError(f"{path}: {error}") from error.__cause__


def _runs(lines: list[bytes], offset: int) -> Iterator[SpoolRun]:
    """A task may write 100,000 lines a second: what is done for each of them is left to functions in C."""
    first = 0
    while first < len(lines):
        line = lines[first]
        try:
            stamp, name, tag, text = line.split(b" ", 3)
            moment = datetime.fromisoformat(stamp.decode()).timestamp()
            stream = _STREAMS[name]
        except (ValueError, KeyError, OverflowError, OSError) as cause:  # of a time that is none, too
            raise SpoolError(f"{line[:80]!r} at offset {offset} is not a record") from cause
        head = line[: len(line) - len(text)]
        alike = list(takewhile(methodcaller("startswith", head), islice(lines, first, None)))
        yield SpoolRun(offset, moment, stream, tag == b"P", head, alike)
        first += len(alike)
        offset += sum(map(len, alike)) + len(alike)
