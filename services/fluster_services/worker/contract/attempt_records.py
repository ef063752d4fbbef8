"""What is kept of an attempt in its directory: what is to run, how it ended, and the error that ended it.

The error goes as text, and as the exception itself where that can be. Read again, it is of the task's own making: its texts
are cut and made such that they can be stored.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from fluster_bus.core.codec import dumps_by_value
from fluster_bus.core.json_types import JsonObject
from fluster_services.worker.contract.attempt_directory import ERROR_FILE, TASK_FOLDER, read_task_json
from fluster_services.worker.contract.container import Container
from fluster_services.worker.linux.limits import Limits

MAX_MESSAGE_CHARACTERS = 16 * 1024
_MAX_TYPE_CHARACTERS = 500
_MAX_PICKLED_ERROR_BYTES = 256 * 1024
_MAX_TRACEBACK_CHARACTERS = 64 * 1024

# All that a task gets of the worker's own environment, which may hold the cluster's credentials.
INHERITED_VARIABLES = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TMPDIR",
        "VIRTUAL_ENV",
        "LD_LIBRARY_PATH",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "CUDA_HOME",
        "NVIDIA_VISIBLE_DEVICES",
    ]
)

ExitReason = Literal[
    "exited",
    "killed",
    "preempted",
    "timed_out",
    "fenced",
    "owner_gone",
    "keeper_died",
    "worker_fault",
    "over_disk",
    "gpu_taken",
]


@dataclass(frozen=True)
class LaunchSpec:
    """What a runtime needs to know to run one attempt: a command, or the file of a pickled callable."""

    key: str  # <ns>.<job>.<task>.<attempt>
    command: list[str] | None = None
    # Of the pickled (function, args, kwargs); relative to the attempt's directory, or absolute.
    payload_file: str | None = None
    env: dict[str, str] = field(default_factory=dict)  # on top of the few variables that the worker's own gives
    unset: list[str] = field(default_factory=list)  # those of the few that it does not get
    notice: str = ""  # what the task's stderr begins with
    working_dir: str | None = None  # a whole path, or with a workspace one in its copy
    workspace: str | None = None  # a folder: the task runs in a copy of it, which goes before a whole path
    python: str | None = None  # of the attempt's own environment: runs a callable; a command finds it on its PATH
    # Of an interpreter that is used as it is: how the job names it, and where it imports what it does not have itself.
    python_given: str | None = None
    python_behind: list[str] = field(default_factory=list)
    python_path: list[str] = field(default_factory=list)
    kill_grace_s: float = 10.0  # between SIGTERM and SIGKILL when the keeper itself has to stop the task
    must_return: bool = False  # exit code 0 is a failure unless the callable has returned
    timeout_s: float | None = None  # the task is stopped when it has run for so long
    fence_after_s: float | None = None  # the task is stopped when this passes without a renewal
    # By the fence clock: the first such moment, if it is before that. From then on the task is not even started.
    fence_at: float | None = None
    max_log_bytes: int = 64 * 1024 * 1024  # per stream, as stored
    max_line_bytes: int = 64 * 1024
    devices: list[str] = field(default_factory=list)  # ids of those that are its own
    # {lock file of a GPU (locks.py): the note in it of a holder that is proved to be gone}
    gpu_locks: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)  # those asked for
    disk: int | None = None  # bytes that its own folder may take, to which it is held (keeper/bounds.py)
    scratch: str | None = None  # the folder in its directory that has a file system of that size (scratch.py)
    groups: dict[str, dict[str, str]] = field(default_factory=dict)  # those enforced, as in limits.py
    image: str | None = None  # that it is to run in
    used_image: dict[str, str | None] | None = None  # what that is, or what it was built upon: a UsedImage
    mounts: dict[str, str] = field(default_factory=dict)  # {path in its container: path here} of those asked for
    container: Container | None = None  # that it runs in
    array_id: int | None = None  # of a task of an array
    keep_s: float = 3600.0  # how long the keeper waits for a worker to ask how it ended

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("a LaunchSpec needs a key: <namespace>.<job>.<task>.<attempt>")
        if self.command is not None and (not self.command or self.payload_file is not None):
            raise ValueError(
                f"{self.key}: give a non-empty command or a payload_file, got {self.command!r} and {self.payload_file!r}"
            )
        if self.max_line_bytes < 16 or self.max_log_bytes < 0:
            raise ValueError(
                f"{self.key}: max_line_bytes={self.max_line_bytes} must be >= 16, max_log_bytes={self.max_log_bytes} >= 0"
            )


@dataclass(frozen=True)
class TaskError:
    """The exception that ended a callable, or why a command could not be started."""

    type: str
    message: str
    traceback: str = ""
    pickled: str | None = None  # base64; None if it cannot be pickled, or is too large
    is_final: bool = False  # trying again would not help
    is_unstarted: bool = False  # the task's own code was not reached


@dataclass(frozen=True)
class ExitRecord:
    """How an attempt ended."""

    exit_code: int | None  # None if a signal ended it, or if it is not known
    signal: int | None
    reason: ExitReason
    kill_reason: str | None = None
    error: TaskError | None = None
    log_tail: list[str] = field(default_factory=list)  # the last lines of both streams, also beyond the log's cap
    started_at: float | None = None  # wall clock
    finished_at: float | None = None
    oom: bool | None = None  # True: killed while the machine was out of memory; None: not known
    log_end: int = 0  # the offset behind the last record of the log
    memory_limit: int | None = None  # bytes; set when processes were killed for going over it
    disk_limit: int | None = None  # bytes; set when it failed and its own file system was full
    dropped_bytes: int = 0  # output that did not fit into the log's cap
    surviving_pids: list[int] = field(default_factory=list)  # could not be killed
    # The size of what the callable returned, pickled, with its JSON; None if that was None.
    result_bytes: int | None = None
    result_json_bytes: int = 0  # of the JSON at the end
    result_error: str | None = None  # why that could not be kept
    left_early: bool = False  # its callable was to return, and had not when the process left with exit code 0


_Data = TypeVar("_Data", LaunchSpec, TaskError, ExitRecord)


def from_json(kind: type[_Data], data: JsonObject) -> _Data:
    """Return the dataclass that `data` describes; fields that this version does not know are passed over."""
    known = {each.name for each in dataclasses.fields(kind)}
    values = {name: value for name, value in data.items() if name in known}
    if kind is ExitRecord and values.get("error") is not None:
        values["error"] = from_json(TaskError, values["error"])
    if kind is LaunchSpec and "limits" in values:
        values["limits"] = Limits(**values["limits"])
    if kind is LaunchSpec and values.get("container") is not None:
        values["container"] = Container(**values["container"])
    return kind(**values)


def to_json(data: LaunchSpec | TaskError | ExitRecord) -> dict[str, object]:
    """Return `data` as what json.dumps takes."""
    return dataclasses.asdict(data)


def folder_in_workspace(spec: LaunchSpec) -> str:
    """The path in the copy of its workspace where the task begins; empty for the copy itself."""
    folder = spec.working_dir or ""
    return folder if spec.workspace is not None and not folder.startswith("/") else ""


def task_folder(spec: LaunchSpec, directory: Path) -> Path:
    """Return where the task itself reads and writes, of what is in the attempt's directory."""
    return directory if spec.container is None else directory / TASK_FOLDER


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
