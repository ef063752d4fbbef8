"""What an attempt's keeper leaves: its complaints, its notes on the task, and the processes that it does not end, which are ended by force.

The notes are in a folder that the task can write to as well, so that none of them is believed as it stands.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fluster.progress_file import DIRECTORY_VARIABLE
from fluster_bus.core.json_types import JsonObject
from fluster_bus.running.fence_clock import boot_id
from fluster_services.worker.contract.attempt_directory import KEEPER_FILE, KEEPER_LOG_FILE, read_json_lines
from fluster_services.worker.contract.attempt_records import ExitRecord, LaunchSpec, TaskError, bounded, plain
from fluster_services.worker.linux import cgroups
from fluster_services.worker.linux.killing import BY_FORCE
from fluster_services.worker.linux.processes import be_quiet, descendants, leftovers, process_state

_MAX_REASON_CHARACTERS = 2_000
_MAX_LINES, _MAX_LINE_CHARACTERS = 20, 4_000
_MAX_PIDS = 100
_LARGEST = 1 << 53  # that JSON carries to every reader
_SHAPE = TypeAdapter(ExitRecord)
_START = {"keeper_pid": int, "task_pid": int, "started_at": float, "started_since_boot_s": float, "boot_id": str | None}

_PIDS_END = 1 << 31  # of what the kernel takes

_Number = TypeVar("_Number", int, float)


class Complaints:
    """What a keeper has to complain of, in a file of the attempt's directory that is made when there is something.

    The directory is the working directory.
    """

    def __init__(self) -> None:
        self._is_open = False

    def open(self) -> None:
        """Have what this process prints go to the file."""
        log = os.open(KEEPER_LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for target in (1, 2):
            os.dup2(log, target)
        os.close(log)
        self._is_open = True

    def add(self, key: str, what: str) -> None:
        """Write a line about the attempt `key`."""
        self.open()
        sys.stderr.write(f"{key}: {what}\n")

    def close(self) -> None:
        """The attempt is over: what follows is not written to its file."""
        if self._is_open:
            self._is_open = False
            be_quiet()


def kill_leftovers(directory: Path, spec: LaunchSpec) -> list[int]:
    """SIGKILL the processes of an attempt, but not its keeper; returns those that were found, so none once all are gone.

    They are found as the keeper's descendants while it lives, in the attempt's groups where the machine has any, and by the
    task's session and the environment they were executed with.
    """
    known = started(directory)
    if known is None:
        return []
    keeper_lives = keeper_state(known) is not None
    if spec.container is not None:
        if keeper_lives:  # the process that attends the container ends it; without a keeper it has done so by itself
            with suppress(ProcessLookupError):
                os.kill(known["task_pid"], BY_FORCE)
        return []
    found = set(cgroups.kill(spec.groups))
    found.update(_living(descendants(known["keeper_pid"])) if keeper_lives else ())
    mark = f"{DIRECTORY_VARIABLE}={directory}"
    found.update(leftovers(known["task_pid"], known["started_since_boot_s"], mark))
    # The main process first: it is not to see its children die, and end for that.
    for pid in sorted(found, key=lambda each: each != known["task_pid"]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return sorted(found)


def started(directory: Path) -> JsonObject | None:
    """What the keeper in `directory` wrote when it started its task; None if it did not, or before the machine's last start."""
    known = start_note(directory)
    return known if known is not None and known["boot_id"] == boot_id() else None


def keeper_state(known: JsonObject) -> str | None:
    """The kernel's letter for the state of a keeper, by what it wrote at its start; None when it is dead."""
    return process_state(known["keeper_pid"], started_by_s=known["started_since_boot_s"])


def kill_keeper(known: JsonObject) -> None:
    """SIGKILL the keeper that wrote `known` at its start. A stranger that was given its number meanwhile is left alone."""
    try:
        fd = os.pidfd_open(known["keeper_pid"])
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # the system has none: one may end between the look and the signal
        fd = None
    try:
        if keeper_state(known) is None:
            return
        with suppress(ProcessLookupError):
            if fd is not None:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            else:
                os.kill(known["keeper_pid"], signal.SIGKILL)
    finally:
        if fd is not None:
            os.close(fd)


def _living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if process_state(pid, started_by_s=float("inf")) is not None]


def start_note(directory: Path) -> JsonObject | None:
    """What the keeper in `directory` wrote when it started its task, each part of its type; None if there is no such note."""
    known = read_json_lines(directory / KEEPER_FILE).get("started")
    if not isinstance(known, dict) or not all(isinstance(known.get(name), kind) for name, kind in _START.items()):
        return None
    return known if all(1 < known[name] < _PIDS_END for name in ("keeper_pid", "task_pid")) else None


def exit_note(directory: Path) -> ExitRecord | None:
    """What it wrote when the task had ended; None if it did not."""
    data = read_json_lines(directory / KEEPER_FILE).get("exited")
    return None if data is None else exit_record(data)


def exit_record(data: object) -> ExitRecord:
    """The end that `data` tells: of the types that it should have, its texts cut and encodable, its numbers finite.

    What cannot be read is the end of a task that failed.
    """
    try:
        if not isinstance(data, Mapping):
            raise TypeError(type(data).__name__)
        record = _SHAPE.validate_python(dict(data))
    except (ValidationError, TypeError, ValueError, RecursionError):
        message = "what its keeper wrote of its end was written over, so that it cannot be known"
        return ExitRecord(exit_code=None, signal=None, reason="exited", error=TaskError("UnknownEnd", message))
    return dataclasses.replace(
        record,
        exit_code=_number(record.exit_code),
        signal=record.signal if record.signal is not None and 0 < record.signal < 128 else None,
        kill_reason=_optional(record.kill_reason),
        error=None if record.error is None else bounded(record.error),
        log_tail=[plain(line, _MAX_LINE_CHARACTERS) for line in record.log_tail[-_MAX_LINES:]],
        started_at=_number(record.started_at),
        finished_at=_number(record.finished_at),
        log_end=_size(record.log_end) or 0,
        memory_limit=_size(record.memory_limit),
        disk_limit=_size(record.disk_limit),
        dropped_bytes=_size(record.dropped_bytes) or 0,
        surviving_pids=[pid for pid in record.surviving_pids[:_MAX_PIDS] if 0 < pid < _LARGEST],
        result_bytes=_size(record.result_bytes),
        result_json_bytes=min(_size(record.result_json_bytes) or 0, _size(record.result_bytes) or 0),
        result_error=_optional(record.result_error),
    )


def _optional(text: str | None) -> str | None:
    return None if text is None else plain(text, _MAX_REASON_CHARACTERS)


def _number(number: _Number | None) -> _Number | None:
    return number if number is not None and math.isfinite(number) and abs(number) < _LARGEST else None


def _size(number: Any) -> int | None:
    return number if number is not None and 0 <= number < _LARGEST else None
