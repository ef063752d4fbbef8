"""The template: a single-threaded copy of the worker, made before its event loop, that forks a keeper in a millisecond or three.

    worker ──{"id", "draft", "directory"}──► template ──fork──► keeper ──fork──► task
           ◄──{"id", "pid" | "error"}───────
           ──{"lease": {"state_dir", "ended_by"}}──► watchdog.py

The socketpair between them is also the leash: at its end the template stays only as long as its watchdog has attempts to watch. Keepers live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from fluster.json_lines import JsonLines, checked, encoded
from fluster_bus.running.fence_clock import fence_clock
from fluster_bus.running.linux_calls import set_process_name
from fluster_services.forking import import_own, run_and_exit
from fluster_services.immortal_objects import keep_shared
from fluster_services.worker.contract.faults import NO_ROOM, AlreadyStartedError, LaunchError, WorkerFaultError
from fluster_services.worker.keeper import keeper
from fluster_services.worker.keeper.watchdog import Watchdog
from fluster_services.worker.linux.processes import be_quiet, close_fds_except, handled_signals, reset_signals
from fluster_services.worker.linux.timers import Alarm
from fluster_services.worker.task.task_process import freshen_interpreter
from fluster_services.worker.task.task_start import take_draft

# With more requests out than this, the socket's buffer could fill up and block the worker.
_MAX_REQUESTS_OUT = 64
_MAX_LINE_BYTES = 64 * 1024  # paths, and why a keeper could not be forked


class TemplateDiedError(WorkerFaultError):
    """The template process is gone: only a new worker process can have a new one."""


def start_template(environment: Mapping[str, str] | None = None, *, owner_fd: int | None = None) -> TemplateHandle:
    """Fork the template and return the worker's end of it.

    To be called early in a worker's main, before any thread or event loop is started and before secrets are read: a callable task
    runs in a copy of this process, which has imported what tasks are to have. Tasks have `environment`, by default a few variables of
    this process's own. `owner_fd` is the read end of a pipe whose
    other end belongs to the cluster's owner; at its end of file keepers kill their tasks, delete what they wrote, and go.
    Raises RuntimeError if threads are running.
    """
    if threading.active_count() > 1:
        names = ", ".join(repr(thread.name) for thread in threading.enumerate())
        raise RuntimeError(f"start the template before any thread: a fork copies only one, and these run: {names}")
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):  # or the copy would write out what is buffered a second time
        stream.flush()
    keep_shared()
    pid = os.fork()
    if pid == 0:
        run_and_exit(lambda: _Template(theirs, owner_fd, environment).run())
    theirs.close()
    return TemplateHandle(ours, pid)


class TemplateHandle:
    """The worker's end of the template. Used by one event loop at a time."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._socket = connection
        self._socket.setblocking(False)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ids = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, object]]] = {}  # {request id: reply}
        self._room = asyncio.Semaphore(_MAX_REQUESTS_OUT)
        self._received = JsonLines(_MAX_LINE_BYTES)
        self._is_dead = False
        self._died = asyncio.Event()

    async def fork_keeper(self, draft: Path, directory: Path) -> int:
        """Return the pid of a new keeper for what `draft` holds, which is now called `directory`; its socket accepts connections.

        Raises AlreadyStartedError if `directory` is there, LaunchError if no keeper could be forked. Cancelled, it may have one.
        """
        self._attach()
        async with self._room:
            if self._is_dead:
                raise self._died_error()
            request_id = next(self._ids)
            reply = self._replies[request_id] = asyncio.get_running_loop().create_future()
            request = {"id": request_id, "draft": str(draft), "directory": str(directory)}
            try:
                self._socket.send(encoded(request))
            except BrokenPipeError:
                self._on_dead()
            try:
                answer = await reply
            finally:
                self._replies.pop(request_id, None)
        if "pid" in answer:
            return int(answer["pid"])
        if answer.get("errno") in (errno.ENOTEMPTY, errno.EEXIST):
            raise AlreadyStartedError(
                f"{directory} is there already: that attempt runs, or its end was not yet taken notice of"
            )
        if answer.get("errno") in NO_ROOM:
            raise LaunchError(f"no keeper could be started for {directory}: {answer['error']}")
        raise WorkerFaultError(f"no keeper could be started for {directory}: {answer['error']}")

    def renew(self, state_dir: Path, ended_in_s: float) -> None:
        """Have whatever runs in `state_dir` ended by force after that time, unless this is called again before."""
        lease = {"state_dir": str(state_dir), "ended_by": fence_clock() + ended_in_s}
        with contextlib.suppress(OSError):  # it is dead, or stopped with its buffer full: what it heard last holds
            self._socket.send(encoded({"lease": lease}))

    def close(self) -> None:
        """End the template. Its keepers live on."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
        self._is_dead = True
        self._socket.close()
        try:
            os.waitpid(self.pid, 0)
        except ChildProcessError:  # another thread waits for all children of this process
            return

    def is_alive(self) -> bool:
        """Whether keepers can be forked."""
        if self._is_dead:
            return False
        try:
            return self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False

    async def wait_died(self) -> TemplateDiedError:
        """Return, with what that means, when the template has died."""
        self._attach()
        await self._died.wait()
        return self._died_error()

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._room = asyncio.Semaphore(_MAX_REQUESTS_OUT)
            self._died = asyncio.Event()
            loop.add_reader(self._socket, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._on_dead()
            return
        for message in self._received.feed(data):
            answer = checked(message)
            reply = self._replies.get(answer["id"])
            if reply is not None and not reply.done():
                reply.set_result(answer)

    def _on_dead(self) -> None:
        self._is_dead = True
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
        self._died.set()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(self._died_error())

    def _died_error(self) -> TemplateDiedError:
        return TemplateDiedError(f"the template process {self.pid} died; restart the worker, it adopts its keepers")


def _import_for_tasks() -> None:
    """Have in memory what else each task would import that serves an actor, is a pool's worker or calls one."""
    from fluster_bus.core.lazy_imports import import_now

    import_own("fluster.actors.server.server", "fluster.worker_pool")
    import_now()


class _Template:
    def __init__(
        self, connection: socket.socket, owner_fd: int | None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._socket = connection
        self._environment = environment
        self._owner_fd = owner_fd
        self._received = JsonLines(_MAX_LINE_BYTES)
        self._has_worker = True

    def run(self) -> None:
        set_process_name("fluster-templ")
        reset_signals(handled_signals())
        freshen_interpreter(self._environment)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # The leash decides. A drained worker gets these too, and its last tasks are still to start.
            signal.signal(number, signal.SIG_IGN)
        close_fds_except({0, 1, 2, self._socket.fileno(), *(() if self._owner_fd is None else (self._owner_fd,))})
        umask = os.umask(0o077)
        os.chdir("/")
        gc.disable()
        _import_for_tasks()
        gc.collect()
        keep_shared()
        self._umask = umask
        wake_read, wake_write = os.pipe()
        for fd in (wake_read, wake_write):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        self._selector = selector
        self._watchdog = Watchdog(selector)
        alarm = Alarm(selector)
        selector.register(self._socket, selectors.EVENT_READ, self._on_request)
        selector.register(wake_read, selectors.EVENT_READ, lambda: self._reap(wake_read))
        if self._owner_fd is not None:
            selector.register(self._owner_fd, selectors.EVENT_READ, self._on_owner_gone)
        while self._has_worker or self._watchdog.is_needed:
            for key, _ in selector.select(alarm.timeout(self._watchdog.next_at, None)):
                if key.fd in selector.get_map():
                    key.data()
            self._watchdog.fire()

    def _on_owner_gone(self) -> None:
        self._leave_worker()
        if self._owner_fd is not None:
            self._selector.unregister(self._owner_fd)
        self._watchdog.on_owner_gone()

    def _on_worker_gone(self) -> None:
        self._leave_worker()
        self._watchdog.on_worker_gone()

    def _leave_worker(self) -> None:
        """Take no more requests, and hold nothing open that others might wait to see closed."""
        if self._has_worker:
            self._has_worker = False
            self._selector.unregister(self._socket)
            self._socket.close()
            set_process_name("fluster-watch")
            be_quiet()

    def _reap(self, wake_fd: int) -> None:
        os.read(wake_fd, 4096)
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return

    def _on_request(self) -> None:
        data = self._socket.recv(65536)
        if not data:
            self._on_worker_gone()
            return
        for message in self._received.feed(data):
            request = checked(message)
            if "lease" in request:
                self._watchdog.renew(Path(request["lease"]["state_dir"]), request["lease"]["ended_by"])
                continue
            try:
                answer: dict[str, object] = {
                    "pid": self._fork_keeper(Path(request["draft"]), Path(request["directory"]))
                }
            except OSError as error:
                answer = {"error": str(error), "errno": error.errno}
            try:
                self._socket.sendall(encoded({"id": request["id"], **answer}))
            except (BrokenPipeError, ConnectionResetError):  # the worker died; its successor finds the directory
                self._on_worker_gone()
                return

    def _fork_keeper(self, draft: Path, directory: Path) -> int:
        # Done here, not by the keeper: what this process does often costs the copy nothing.
        spec, listener = take_draft(draft, directory)
        try:
            with listener:
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                try:
                    pid = os.fork()
                    if pid == 0:
                        run_and_exit(
                            lambda: keeper.run_keeper(
                                spec, listener, directory, owner_fd=self._owner_fd, umask=self._umask
                            )
                        )
                except OSError:
                    directory.rename(draft)
                    raise
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, ())
                self._watchdog.on_start(directory, spec)
                return pid
        finally:
            os.chdir("/")
