"""The directory of one attempt: what is to run, and how it ended. It is all that a worker's restart has to go by.

<state>/<name>.<random>.new   being prepared; found after a crash it may be deleted: nothing was started
<state>/<name>/               a keeper was started for it
    spec.json                 the LaunchSpec
    payload.pickle            the pickled (function, args, kwargs), unless it is a command
    s                         the keeper's socket
    keeper.jsonl              what its keeper has to say of it: {"started": who runs there}, and {"exited": ExitRecord} once all is over
    log                       the output (spool.py)
    keeper.log                complaints of the keeper itself
    error.json                the exception that ended a callable
    result.pickle             what a callable returned, if that was not None, or it has to return
    result.json               why it could not be kept, or how much of it is JSON
    progress, progress.pipe   how far the task is by its own word (fluster/progress_file.py)
    work/                     the working directory, unless the spec names another
    disk.img                  the file system that is mounted at work/, or at task/, of a task that asked for disk (scratch.py)
    task/                     with a container, its view of this: payload, error, result, progress and work are in here
    container.json            with a container, how it ended
<state>/<name>.gone           being deleted
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Literal, TypeVar

from fluster_bus.core.json_types import JsonObject
from fluster_services.worker.contract.container import Container
from fluster_services.worker.linux.limits import Limits
from fluster_services.worker.linux.scratch import unmount

SPEC_FILE = "spec.json"
PAYLOAD_FILE = "payload.pickle"
SOCKET_FILE = "s"
KEEPER_FILE = "keeper.jsonl"
LOG_FILE = "log"
KEEPER_LOG_FILE = "keeper.log"
ERROR_FILE = "error.json"
RESULT_FILE = "result.pickle"
RESULT_WORD_FILE = "result.json"
WORK_FOLDER = "work"
TASK_FOLDER = "task"
CONTAINER_FILE = "container.json"

_MAX_TASK_JSON_BYTES = 4 << 20
_MAX_NOTES_BYTES = 8 << 20

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

NEW_SUFFIX = ".new"
GONE_SUFFIX = ".gone"

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
    payload_file: str | None = (
        None  # pickled (function, args, kwargs); relative to the attempt's directory, or absolute
    )
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


def write_json(path: str | Path, data: Mapping[str, object]) -> None:
    """Write `data` so that a reader sees all of it or nothing. Raises OSError."""
    draft = Path(f"{path}.draft")
    fd = open_task_fd(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "wb") as file:  # buffered: it writes all, or raises
        file.write(json.dumps(data).encode())
    draft.replace(path)


def read_json(path: str | Path, max_bytes: int = -1) -> JsonObject | None:
    """Return what `write_json` wrote there; None if there is nothing, or anything but a JSON object, as a power cut may leave it.

    No more than `max_bytes` are read, unless that is -1.
    """
    try:
        with open_task_file(path) as file:
            data = json.loads(file.read(max_bytes))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def read_task_json(path: Path) -> dict[str, object] | None:
    """Return what a task has written there with `write_json`; it could also have put anything else there."""
    return read_json(path, _MAX_TASK_JSON_BYTES)


def open_task_file(path: str | Path) -> FileIO:
    """Open for reading, unbuffered, as `open_task_fd` does."""
    return FileIO(open_task_fd(path, os.O_RDONLY), "rb")


def open_task_fd(path: str | Path, flags: int) -> int:
    """Open what lies where a task can write. Raises OSError, also for what is not a regular file.

    No link is followed, which might lead to what the task must not reach, and no pipe is waited for, which might never end.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd


def append_json(path: str | Path, data: Mapping[str, object]) -> None:
    """Add a line to a file of lines, all of it or nothing. Raises OSError."""
    line = json.dumps(data).encode() + b"\n"
    fd = open_task_fd(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        try:
            if os.write(fd, line) == len(line):
                return
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def read_json_lines(path: str | Path) -> JsonObject:
    """Return what `append_json` added there, as one dictionary; nothing of a line that a power cut left torn."""
    try:
        with open_task_file(path) as file:
            lines = file.read(_MAX_NOTES_BYTES).splitlines(keepends=True)
    except OSError:
        return {}
    found: JsonObject = {}
    for line in lines:
        try:
            data = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            data = None
        found.update(data if isinstance(data, dict) else {})
    return found


def folder_in_workspace(spec: LaunchSpec) -> str:
    """The path in the copy of its workspace where the task begins; empty for the copy itself."""
    folder = spec.working_dir or ""
    return folder if spec.workspace is not None and not folder.startswith("/") else ""


def task_folder(spec: LaunchSpec, directory: Path) -> Path:
    """Return where the task itself reads and writes, of what is in the attempt's directory."""
    return directory if spec.container is None else directory / TASK_FOLDER


def directory_name(key: str) -> str:
    """Return the name of the directory of `key`: short, since a socket's path may have 107 bytes only."""
    return hashlib.blake2s(key.encode(), digest_size=8).hexdigest()


def discard(directory: Path) -> bool:
    """Delete an attempt's directory; whether it was there. Cut short, it leaves something that is recognised as rubbish."""
    gone = directory.with_name(directory.name + GONE_SUFFIX)
    try:
        directory.rename(gone)
    except FileNotFoundError:
        return False
    try:
        with os.scandir(gone) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    Path(entry).rmdir()
                else:
                    Path(entry).unlink()
        gone.rmdir()
    except OSError:  # the task has left more than usual
        delete_gone(gone)
    return True


def delete_gone(gone: Path) -> None:
    """Delete what `discard` has begun with."""
    unmount((gone / WORK_FOLDER, gone / TASK_FOLDER))
    delete_tree(gone)


def delete_tree(path: Path) -> None:
    """Delete as much of `path` as the task left deletable; the next start of a worker tries the rest again."""
    shutil.rmtree(path, ignore_errors=True)
