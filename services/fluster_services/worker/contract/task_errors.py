"""What ended a task, on its way to the attempt's record: as text, and as the exception itself where that can be.

Read again, it is of the task's own making: its texts are cut and made such that they can be stored.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import traceback
from pathlib import Path

from fluster_bus.core.codec import dumps_by_value
from fluster_bus.core.json_types import JsonObject
from fluster_services.worker.contract.attempt_directory import ERROR_FILE, TaskError, from_json, read_task_json

MAX_MESSAGE_CHARACTERS = 16 * 1024
_MAX_TYPE_CHARACTERS = 500
_MAX_PICKLED_ERROR_BYTES = 256 * 1024
_MAX_TRACEBACK_CHARACTERS = 64 * 1024


def describe_error(error: BaseException) -> TaskError:
    """The error as the attempt's record has it."""
    from fluster.remote_errors.kindred_errors import message_of, pickled_or_kindred, type_name  # few need it

    name, message = type_name(error, bare=("builtins", "__main__")), message_of(error)
    text = "".join(traceback.format_exception(error))
    text = text[-_MAX_TRACEBACK_CHARACTERS:]  # the end says what happened
    data = pickled_or_kindred(
        error, text=(name, message, text), dump=dumps_by_value, most_bytes=_MAX_PICKLED_ERROR_BYTES
    )
    return TaskError(
        type=name,
        message=message[:MAX_MESSAGE_CHARACTERS],
        traceback=text,
        pickled=base64.b64encode(data).decode() if data is not None else None,
        is_final=getattr(type(error), "is_final_failure", False) is True,
    )


def read_task_error(directory: Path) -> TaskError | None:
    """Return what ended the task that has `directory`, if it has left that there."""
    return task_error(read_task_json(directory / ERROR_FILE))


def task_error(data: JsonObject | None) -> TaskError | None:
    """Return the error that `data` describes, which a task may have made up; None for anything else."""
    try:
        error = None if data is None else from_json(TaskError, data)
    except TypeError:  # something is missing
        return None
    return bounded(error) if error is not None and _is_sound(error) else None


def _is_sound(error: TaskError) -> bool:
    texts = (error.type, error.message, error.traceback, error.pickled or "")
    marks = (error.is_final, error.is_unstarted)
    return all(isinstance(text, str) for text in texts) and all(isinstance(mark, bool) for mark in marks)


def bounded(error: TaskError) -> TaskError:
    """The error with texts that can be stored and shown."""
    return dataclasses.replace(
        error,
        type=plain(error.type, _MAX_TYPE_CHARACTERS),
        message=plain(error.message, MAX_MESSAGE_CHARACTERS),
        traceback=plain(error.traceback[-_MAX_TRACEBACK_CHARACTERS:], _MAX_TRACEBACK_CHARACTERS),
        pickled=error.pickled if _is_pickled(error.pickled) else None,
    )


def plain(text: str, characters: int) -> str:
    """`text`, cut; what UTF-8 has no form for, as in names of files that are not text, is written as Python does."""
    return text[:characters].encode("utf-8", "backslashreplace").decode("utf-8")


def _is_pickled(text: str | None) -> bool:
    """Whether it is base64 of no more bytes than are kept."""
    if text is None or len(text) > 2 * _MAX_PICKLED_ERROR_BYTES:
        return False
    try:
        return len(base64.b64decode(text, validate=True)) <= _MAX_PICKLED_ERROR_BYTES
    except (binascii.Error, ValueError):
        return False
