"""What a keeper wrote down of its task: in a folder that the task can write to as well, so that none of it is believed as it stands."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fluster_services.worker.contract.attempt_directory import KEEPER_FILE, ExitRecord, TaskError, read_json_lines
from fluster_services.worker.contract.task_errors import bounded, plain

_MAX_REASON_CHARACTERS = 2_000
_MAX_LINES, _MAX_LINE_CHARACTERS = 20, 4_000
_MAX_PIDS = 100
_LARGEST = 1 << 53  # that JSON carries to every reader
_SHAPE = TypeAdapter(ExitRecord)
_START = {"keeper_pid": int, "task_pid": int, "started_at": float, "started_since_boot_s": float, "boot_id": str | None}

_Number = TypeVar("_Number", int, float)


def start_note(directory: Path) -> dict[str, Any] | None:
    """What the keeper in `directory` wrote when it started its task, each part of its type; None if there is no such note."""
    known = read_json_lines(directory / KEEPER_FILE).get("started")
    if not isinstance(known, dict) or not all(isinstance(known.get(name), kind) for name, kind in _START.items()):
        return None
    return known if min(known["keeper_pid"], known["task_pid"]) > 1 else None


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
