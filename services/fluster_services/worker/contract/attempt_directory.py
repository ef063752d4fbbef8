"""The directory of one attempt: its files, and how they are read and written. It is all that a worker's restart has to go by.

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

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from io import FileIO
from pathlib import Path

from fluster_bus.core.json_types import JsonObject
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
MAX_SPEC_BYTES = 64 << 20  # of a LaunchSpec, as its task may have written over it
_MAX_NOTES_BYTES = 8 << 20

NEW_SUFFIX = ".new"
GONE_SUFFIX = ".gone"


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
