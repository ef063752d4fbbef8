"""How a keeper begins an attempt: takes its directory, starts the task's process, and hears from it what the worker's machine lacks.

Until none of the task's own code can have run, the new process holds the writing end of a pipe. What is written there is a
fault of the worker's, on whose word the attempt costs nothing: so no task may ever hold that end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fluster_bus.running.fence_clock import boot_id
from fluster_services.worker.contract.attempt_directory import KEEPER_FILE, SOCKET_FILE, SPEC_FILE, append_json
from fluster_services.worker.contract.attempt_records import LaunchSpec, from_json
from fluster_services.worker.task.container_task import run_container
from fluster_services.worker.task.task_process import run_task, spawn_task

_MAX_WORDS_BYTES = 4096


def take_draft(draft: Path, directory: Path) -> tuple[LaunchSpec, socket.socket]:
    """Make `draft` the directory of an attempt, which is the working directory then; returns what to run and its listener.

    Raises OSError; then nothing was taken. From the one rename on a worker's restart takes it for started; before, for never started.
    """
    spec = from_json(LaunchSpec, json.loads((draft / SPEC_FILE).read_bytes()))
    os.chdir(draft)  # a relative name, since a socket's path may have 107 bytes only
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(SOCKET_FILE)
        listener.listen(8)
        draft.rename(directory)
    except BaseException:
        listener.close()
        os.chdir("/")
        raise
    return spec, listener


class TaskStart:
    """A task's process that was started."""

    def __init__(self, pid: int, faults_fd: int | None = None) -> None:
        self.pid = pid
        self._faults_fd = faults_fd

    def fault(self) -> str | None:
        """What the machine lacked to start the task; None when it lacked nothing. To be asked once, when all is over."""
        if self._faults_fd is None:
            return None
        fd, self._faults_fd = self._faults_fd, None
        with os.fdopen(fd, "rb", buffering=0) as faults:
            words = None
            with suppress(BlockingIOError):  # a process that survives SIGKILL may still hold the other end
                words = faults.read(_MAX_WORDS_BYTES)
        return words.decode(errors="replace") if words else None


def start_task(
    spec: LaunchSpec,
    directory: Path,
    *,
    stdout_fd: int,
    stderr_fd: int,
    umask: int,
    is_too_late: bool,
    kept_fds: Sequence[int] = (),
) -> TaskStart:
    """Start the task of the attempt in `directory`, which inherits `kept_fds`; one that `is_too_late` ends at once. Raises OSError."""
    own_pid, in_container = os.getpid(), spec.container is not None
    how = {"stdout_fd": stdout_fd, "stderr_fd": stderr_fd, "umask": umask}
    pid = None if is_too_late or in_container or kept_fds else spawn_task(spec, directory, **how)
    if pid is not None:
        return TaskStart(pid)
    faults_fd, tell_fd = os.pipe()
    os.set_blocking(faults_fd, False)
    # Blocked, so that a SIGTERM to the young task waits until it no longer has this process's handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            if is_too_late:
                os._exit(1)
            run = run_container if in_container else run_task
            run(spec, directory, keeper_pid=own_pid, faults_fd=tell_fd, kept_fds=kept_fds, **how)
    except OSError:
        os.close(faults_fd)
        raise
    finally:
        os.close(tell_fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return TaskStart(pid, faults_fd)


def note_beginning() -> None:
    """Write into the working directory that a task is about to run: from then on it may be the task that ends this process.

    Raises OSError.
    """
    append_json(KEEPER_FILE, {"begun": True})


def note_start(task_pid: int, started_at: float, started_since_boot_s: float) -> None:
    """Write into the working directory who runs there. Raises OSError."""
    known = {
        "keeper_pid": os.getpid(),
        "task_pid": task_pid,
        "started_at": started_at,
        "started_since_boot_s": started_since_boot_s,
        "boot_id": boot_id(),
    }
    append_json(KEEPER_FILE, {"started": known})
