"""What a callable returned, on its way from the task to the store: written by the task, found by its keeper.

It is a pickle and, where it has such a form, the same as JSON behind it, for readers who run no code of others.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import stat
import sys
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from types import AsyncGeneratorType, GeneratorType
from typing import Any, NamedTuple

from fluster_bus.core.codec import dump_by_value, mentions_own_modules
from fluster_bus.core.stream_bounds import PAYLOADS
from fluster_bus.storage.objects import MAX_OBJECT_BYTES
from fluster_services.worker.contract.attempt_directory import RESULT_FILE, RESULT_WORD_FILE, read_task_json
from fluster_services.worker.task.progress_pipe import leave_word

MAX_RESULT_BYTES = 64 << 20  # beyond, it goes where payloads are, for less long
MAX_LARGE_RESULT_BYTES = MAX_OBJECT_BYTES
MAX_JSON_BYTES = 1 << 20
_MAX_REASON_CHARACTERS = 1_000


def keep_result(value: object, directory: Path) -> None:
    """Write `value` down, or why that cannot be done: the work is done, so the task has not failed."""
    draft = directory / f"{RESULT_FILE}.draft"
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            pickled = pickled_value(value)
            file.write(pickled)
            text = _as_json(value) if pickled.nbytes <= MAX_JSON_BYTES else b""
            file.write(text)
        if text:
            leave_word(directory / RESULT_WORD_FILE, {"json_bytes": len(text)})
        draft.replace(directory / RESULT_FILE)
        if pickled.nbytes > MAX_RESULT_BYTES:
            sys.stderr.write(
                f"fluster: what it returned has {pickled.nbytes:,} bytes when pickled, above {MAX_RESULT_BYTES:,}: it is kept for "
                f"{PAYLOADS.shown_time} only; write it to a file or a store to keep it\n"
            )
    except _TooLargeError:
        reason = (
            f"what it returned is larger than {MAX_LARGE_RESULT_BYTES:,} bytes when pickled: write it to a file or a store, "
            "and return its name"
        )
    except OSError as error:
        reason = f"what it returned could not be written down: {error}"
    except Exception as error:
        reason = (
            f"what it returned, a {type(value).__name__}, cannot be pickled: {type(error).__name__}: {error}; "
            "return plain data"
        )
    else:
        return
    reason = reason[:_MAX_REASON_CHARACTERS]
    sys.stderr.write(f"fluster: {reason}\n")
    with suppress(OSError):
        draft.unlink(missing_ok=True)  # what it has of a full disk is enough for the reason
    leave_word(directory / RESULT_WORD_FILE, {"reason": reason})


class FoundResult(NamedTuple):
    """What a task has left of what it returned."""

    size: int | None = None  # bytes, of the pickle and its JSON; None when there is nothing
    json_size: int = 0  # of the JSON at the end
    problem: str | None = None  # why it was not kept


def find_result(directory: Path = Path(), told: Mapping[str, object] | None = None) -> FoundResult:
    """What the task that has `directory` returned; `told` is what the disk had no room for. Both may be of the task's own making."""
    word: Mapping[str, object] = told or {}
    if not word and os.path.lexists(directory / RESULT_WORD_FILE):
        word = read_task_json(directory / RESULT_WORD_FILE) or {"reason": None}
    if "reason" in word:
        return FoundResult(problem=str(word["reason"])[:_MAX_REASON_CHARACTERS])
    try:
        found = os.lstat(directory / RESULT_FILE)
    except FileNotFoundError:
        return FoundResult()
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_LARGE_RESULT_BYTES:
        return FoundResult(problem=f"{RESULT_FILE} is not what Fluster wrote there")
    told_size = word.get("json_bytes")
    json_size = told_size if type(told_size) is int else 0
    return FoundResult(found.st_size, json_size if 0 < json_size <= min(found.st_size, MAX_JSON_BYTES) else 0)


def _as_json(value: object) -> bytes:
    """The value as JSON, tuples as lists; empty where it has no such form, or a long one."""
    try:
        text = json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        return b""
    return text if len(text) <= MAX_JSON_BYTES else b""


class _TooLargeError(Exception):
    """There is more than may be kept."""


class _Bounded(io.BytesIO):
    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_LARGE_RESULT_BYTES:
            raise _TooLargeError
        return super().write(data)


def pickled_value(value: object) -> memoryview:
    """As `codec.encode` does it, but no further than what may be kept."""
    file = _Bounded()
    try:
        pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
        if not mentions_own_modules(file.getvalue()):
            return file.getbuffer()
    except _TooLargeError:
        raise
    except Exception:  # noqa: S110 - any failure means the same: cloudpickle is asked, and raises if it can't
        pass
    file = _Bounded()
    dump_by_value(value, file)
    return file.getbuffer()


def finished(returned: Any) -> Any:
    """What a task's callable gave: what the coroutine of an `async def` returns, once it has run on a loop of its own.

    Raises TypeError for a generator, which nothing would run.
    """
    if isinstance(returned, GeneratorType | AsyncGeneratorType):
        raise TypeError(
            f"the job's callable gave the generator {returned!r}, whose code has not run: let it return a list, "
            "or yield nothing"
        )
    if not isinstance(returned, Coroutine):
        return returned
    import asyncio

    return asyncio.run(returned)
