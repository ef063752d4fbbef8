"""The keeper: the small process that one attempt runs under. It outlives the worker.

It spools the output, records the end, keeps the fence, and sees to it that nothing of the task is left. What it and the worker say to
each other is in worker_link.py.

When its attempt is over and forgotten, the connected worker may give it the next one of the same namespace: most of what a keeper
costs is to become one, since a forked copy pays for each page that it touches first.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluster_bus.core.json_types import JsonObject
from fluster_bus.running.fence_clock import fence_clock
from fluster_bus.running.linux_calls import become_subreaper, set_process_name
from fluster_services.worker.contract.attempt_directory import (
    CONTAINER_FILE,
    ERROR_FILE,
    KEEPER_FILE,
    RESULT_WORD_FILE,
    append_json,
    discard,
    read_json,
)
from fluster_services.worker.contract.attempt_records import (
    ExitReason,
    ExitRecord,
    LaunchSpec,
    read_task_error,
    task_error,
    task_folder,
    to_json,
)
from fluster_services.worker.gpus.locks import GpuTakenError
from fluster_services.worker.keeper.bounds import DiskWatch, Fence, HeldGpus, MemoryBound
from fluster_services.worker.keeper.leftovers import Complaints
from fluster_services.worker.keeper.worker_link import AttemptSnapshot, WorkerLink, finite
from fluster_services.worker.linux import cgroups
from fluster_services.worker.linux.killing import Killing, kill_descendants
from fluster_services.worker.linux.processes import (
    KEEPER_SIGNALS,
    be_quiet,
    close_fds_except,
    descendants,
    reset_signals,
    signal_pipe,
)
from fluster_services.worker.linux.timers import Timers
from fluster_services.worker.task.progress_pipe import ProgressWatch
from fluster_services.worker.task.task_output import TaskOutput
from fluster_services.worker.task.task_result import FoundResult, find_result
from fluster_services.worker.task.task_start import note_beginning, note_start, start_task, take_draft

_RECORD_RETRY_S = 5.0
_LEASE_OVER = "the lease was not renewed in time"
_IDLE_S = 30.0  # without a next attempt
_MAX_ATTEMPTS = 200  # then it goes, with whatever has piled up in it


def run_keeper(spec: LaunchSpec, listener: socket.socket, directory: Path, *, owner_fd: int | None, umask: int) -> None:
    """Be the keeper of the attempt in `directory`, which is the working directory, until it is not needed any longer.

    To be called in a freshly forked process with all signals blocked.
    """
    os.setsid()
    set_process_name("fluster-keeper")
    be_quiet()  # a file for complaints is made when there is one
    close_fds_except({0, 1, 2, listener.fileno(), *(() if owner_fd is None else (owner_fd,))})
    keeper = _Keeper(umask)
    try:
        keeper.run(spec, listener, directory, owner_fd)
    except BaseException:
        keeper.complaints.open()
        kill_descendants()
        raise


class _Keeper:
    def __init__(self, umask: int) -> None:
        self._umask = umask
        self._selector = selectors.DefaultSelector()
        self._timers = Timers()  # by the monotonic clock
        self._fence = Fence(self._selector, self._on_fence, self._on_grace_over)
        self._is_over = False
        self._is_idle = False  # its attempt is forgotten
        self._attempts = 0
        self.complaints = Complaints()
        self._gpus = HeldGpus()
        self._link = WorkerLink(self._selector, self._timers, self._obey)

    def _begin(self, spec: LaunchSpec, listener: socket.socket, directory: Path) -> None:
        """Run an attempt whose directory is the working directory."""
        self._is_idle = False
        self._attempts += 1
        self._spec = spec
        self._directory = directory
        self._task_pid = 0
        self._started_at = 0.0
        self._flushed = 0
        self._status: int | None = None  # of the main process, once it ended
        self._has_children = True
        self._memory = MemoryBound(spec)

        self._reason: ExitReason = "exited"
        self._kill_reason: str | None = None
        self._is_abandoned = False
        self._record: ExitRecord | None = None

        self._task_folder = task_folder(spec, Path())
        if spec.container is not None:
            self._task_folder.mkdir(mode=0o700, exist_ok=spec.scratch is not None)
        self._output = TaskOutput(
            self._selector, self._timers, max_line_bytes=spec.max_line_bytes, max_log_bytes=spec.max_log_bytes
        )
        self._progress = self._watch_progress()
        self._disk = DiskWatch(
            self._timers, directory, spec, lambda told: self._kill(spec.kill_grace_s, "over_disk", told)
        )
        try:
            self._gpus.take(spec, directory, since_boot_s=fence_clock())
        except (GpuTakenError, OSError) as error:
            self._fail(str(error), "gpu_taken")
        else:
            try:
                self._start_task()
            except OSError as error:
                self._fail(f"no process could be made for it: {error.strerror or error}")
        self._link.listen(listener)

    def run(self, spec: LaunchSpec, listener: socket.socket, directory: Path, owner_fd: int | None) -> None:
        become_subreaper()
        self._watch_signals()
        if owner_fd is not None:
            self._watch(owner_fd, lambda: self._on_owner(owner_fd))
        self._begin(spec, listener, directory)
        while not self._is_over:
            timeout_s = self._fence.timeout(self._timers.timeout(time.monotonic()))
            for key, _ in self._selector.select(timeout_s):
                if key.fd in self._selector.get_map():  # an earlier one of this round may have closed it
                    key.data()
            self._timers.fire(time.monotonic())
            self._fence.fire()
            if self._is_idle:
                self._is_over = self._is_over or not self._link.is_connected
                continue
            if (
                self._record is None
                and self._status is not None
                and (not self._has_children or self._killing.has_given_up)
            ):
                self._finish(self._status)
            self._link.tell(self._snapshot())

    def _snapshot(self) -> AttemptSnapshot:
        progress = self._progress.newest if self._progress is not None else None
        return AttemptSnapshot(
            self._task_pid, self._started_at, self._output.spool.end, self._record, progress, self._flushed
        )

    def _watch(self, fd: int, action: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, action)

    # The task

    def _start_task(self) -> None:
        stdout_fd, stderr_fd = self._output.open("stdout"), self._output.open("stderr")
        now = fence_clock()
        fences_at = [] if self._spec.fence_after_s is None else [now + self._spec.fence_after_s]
        if self._spec.fence_at is not None:
            fences_at.append(self._spec.fence_at)
        if fences_at:
            self._fence.set(min(fences_at), grace_s=self._spec.kill_grace_s)
        is_too_late = (
            bool(fences_at) and min(fences_at) <= now
        )  # the process that started it was stopped on the way here
        if is_too_late:
            self._reason, self._kill_reason = "fenced", "the lease was over before it began"
        if self._spec.timeout_s is not None:
            self._timers.set("timeout", time.monotonic() + self._spec.timeout_s, self._on_timeout)
        self._started_at = time.time()
        started_since_boot_s = fence_clock()
        with suppress(OSError):  # a full disk is reported below
            note_beginning()
        try:
            self._start = start_task(
                self._spec,
                self._directory,
                stdout_fd=stdout_fd,
                stderr_fd=stderr_fd,
                umask=self._umask,
                is_too_late=is_too_late,
                kept_fds=self._gpus.fds,
            )
        finally:
            for fd in (stdout_fd, stderr_fd):
                os.close(fd)
        self._task_pid = self._start.pid
        self._gpus.on_begun(self._task_pid)
        self._killing = Killing(
            self._timers, self._task_pid, self._on_give_up, in_container=self._spec.container is not None
        )
        try:
            note_start(self._task_pid, self._started_at, started_since_boot_s)
        except OSError as error:  # only missed if this process is killed
            self.complaints.add(self._spec.key, f"{KEEPER_FILE} cannot be written: {error}")
        self._memory.on_begun()

    def _watch_progress(self) -> ProgressWatch | None:
        try:
            return ProgressWatch(self._selector, self._timers, self._task_folder)
        except OSError as error:  # a full disk, or one without pipes: the task runs all the same
            self.complaints.add(self._spec.key, f"no progress can be reported: {error}")
            return None

    # Signals and deaths

    def _watch_signals(self) -> None:
        reset_signals(KEEPER_SIGNALS)
        fd = signal_pipe(signal.SIGCHLD, signal.SIGTERM, ignored=(signal.SIGINT, signal.SIGHUP))
        self._watch(fd, lambda: self._on_signal(fd))

    def _on_signal(self, fd: int) -> None:
        if signal.SIGTERM in os.read(fd, 4096):
            if self._is_idle:
                self._is_over = True
            self._kill(self._spec.kill_grace_s, "killed", "its keeper was asked to stop (SIGTERM)")
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._has_children = False
                break
            if pid == 0:
                break
            if pid == self._task_pid:
                self._on_main_over(status)
        if self._status is not None and self._has_children and not self._killing.is_in_grace:
            self._killing.sweep()

    def _on_main_over(self, status: int) -> None:
        if self._fence.is_overdue and self._reason == "exited" and self._was_killed(status):
            # This process was stopped when it was due, so that the template's watchdog has ended the task.
            self._reason, self._kill_reason = "fenced", _LEASE_OVER
        self._status = status
        self._killing.is_main_over = True

    def _was_killed(self, status: int) -> bool:
        if self._spec.container is None:
            return os.WIFSIGNALED(status)
        return int((read_json(CONTAINER_FILE) or {}).get("code", -1)) < 0

    def _kill(self, grace_s: float, reason: ExitReason, why: str | None) -> None:
        if self._record is not None or (self._status is not None and self._reason == "exited"):
            return  # it ended by itself first
        if self._reason == "exited":
            self._reason, self._kill_reason = reason, why
        self._killing.stop(grace_s)

    def _on_give_up(self) -> None:
        if self._status is None:
            self._on_main_over(signal.SIGKILL)

    def _on_timeout(self) -> None:
        self._kill(self._spec.kill_grace_s, "timed_out", f"it ran for {self._spec.timeout_s:g} s, its timeout")

    def _on_fence(self) -> None:
        self._kill(self._spec.kill_grace_s, "fenced", _LEASE_OVER)

    def _on_grace_over(self) -> None:
        if self._record is None:
            self._killing.stop(0)

    def _on_owner(self, fd: int) -> None:
        if not os.read(fd, 4096):
            self._selector.unregister(fd)
            self._abandon()

    def _abandon(self) -> None:
        if self._is_idle:
            self._is_over = True
            return
        self._is_abandoned = True
        if self._record is not None:
            self._leave_no_trace()
        else:
            self._kill(0, "owner_gone", "the cluster's owner is gone")

    # The end

    def _finish(self, status: int) -> None:
        self._killing.end()
        survivors = descendants(os.getpid()) if self._has_children else []
        self._let_go()
        fault = self._start.fault()
        if fault is not None and self._reason == "exited":
            self._reason, self._kill_reason = "worker_fault", fault
        container: JsonObject = {}
        if self._spec.container is not None:
            container = read_json(CONTAINER_FILE) or self._told(CONTAINER_FILE) or {}
        code = container.get("code", os.waitstatus_to_exitcode(status))
        number = -code if code < 0 else None
        if not self._has_children and (self._spec.container is None or "code" in container):
            self._gpus.release()  # before the worker hears of the end, and gives them to the next
        else:
            self._gpus.leave()
        error = read_task_error(Path()) or read_task_error(self._task_folder) or task_error(self._told(ERROR_FILE))
        has_returned = code == 0 and self._reason == "exited" and self._spec.command is None
        result = find_result(self._task_folder, self._told(RESULT_WORD_FILE)) if has_returned else FoundResult()
        self._end(
            exit_code=code if code >= 0 else None,
            signal=number,
            error=error,
            oom=self._reason == "exited" and self._memory.was_machine_short(number),
            memory_limit=self._spec.limits.memory if container.get("oom") else self._memory.exceeded_limit(),
            disk_limit=self._disk.full_limit() if code else None,
            surviving_pids=survivors,
            result_bytes=result.size,
            result_json_bytes=result.json_size,
            result_error=result.problem,
            left_early=self._spec.must_return and has_returned and result.size is None and result.problem is None,
        )

    def _fail(self, what: str, reason: ExitReason = "worker_fault") -> None:
        """The task could not be started, by no fault of its own."""
        self._has_children = False
        self._reason, self._kill_reason = reason, what
        self._let_go()
        self._gpus.release()
        self._end(exit_code=None, signal=None)

    def _let_go(self) -> None:
        """Take what is left in the task's pipes, and wait for nothing of it."""
        self._timers.cancel("timeout")
        self._fence.cancel()
        if self._progress is not None:
            self._progress.close()
        self._disk.close()
        self._output.close()

    def _end(self, **how: Any) -> None:
        self._record = ExitRecord(
            reason=self._reason,
            kill_reason=self._kill_reason,
            log_tail=self._output.tail(),
            started_at=self._started_at or None,
            finished_at=time.time(),
            log_end=self._output.spool.end,
            dropped_bytes=self._output.spool.dropped_bytes,
            **how,
        )
        self._remove_groups()
        self._timers.set("keep", time.monotonic() + self._spec.keep_s, self._leave)
        self._write_record(self._record)
        if self._is_abandoned:
            self._link.tell(self._snapshot())
            self._leave_no_trace()

    def _told(self, name: str) -> dict[str, object] | None:
        """What the task said through its pipe since the disk had no room for that file."""
        return self._progress.words.get(name) if self._progress is not None else None

    def _remove_groups(self) -> None:
        if not cgroups.remove(self._spec.groups):  # the kernel may take a moment to see that all have left
            self._timers.set("groups", time.monotonic() + _RECORD_RETRY_S, self._remove_groups)

    def _write_record(self, record: ExitRecord) -> None:
        try:
            append_json(KEEPER_FILE, {"exited": to_json(record)})
        except OSError as error:  # a full disk: the connected worker hears of it anyhow
            self.complaints.add(self._spec.key, f"the record of its end cannot be written: {error}")
            self._timers.set("record", time.monotonic() + _RECORD_RETRY_S, lambda: self._write_record(record))

    def _leave(self) -> None:
        self._is_over = True

    def _leave_no_trace(self) -> None:
        cgroups.remove(self._spec.groups)
        discard(self._directory)
        self._is_over = True

    # The next attempt

    def _forget(self) -> None:
        self._leave_no_trace()
        if self._has_children or self._attempts >= _MAX_ATTEMPTS:
            return  # what could not be killed must not be taken for the next one's
        self._is_over, self._is_idle = False, True
        self._timers.cancel("keep", "record", "groups")
        self._timers.set("idle", time.monotonic() + _IDLE_S, self._leave)
        self._link.go_idle()

    def _assign(self, draft: Path, directory: Path) -> None:
        try:
            spec, listener = take_draft(draft, directory)
        except (OSError, ValueError, TypeError) as error:
            self._link.refuse(error)
            return
        self._timers.cancel("idle")
        self.complaints.close()
        self._begin(spec, listener, directory)

    # The worker

    def _obey(self, message: JsonObject) -> None:
        if self._is_idle:
            if "assign" in message:
                self._assign(Path(message["assign"]["draft"]), Path(message["assign"]["directory"]))
            return
        if "kill" in message:
            how: ExitReason = "preempted" if message.get("preempted") else "killed"
            why = message.get("reason")
            self._kill(finite(message["kill"]), how, None if why is None else str(why))
        if "renew" in message and self._status is None and self._reason == "exited":
            if message["renew"] is None:
                self._fence.cancel()
            else:
                # Counted from the sending: a renewal that lay about while this process was stopped renews nothing.
                now = fence_clock()
                sent_at = min(finite(message.get("sent_since_boot_s", now)), now)
                self._fence.set(sent_at + finite(message["renew"]), grace_s=self._spec.kill_grace_s)
        if "flush" in message:
            self._output.drain()
            self._flushed = int(message["flush"])
        if "forget" in message and self._record is not None:
            self._forget()
