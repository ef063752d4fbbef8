"""What runs in a VM: a worker, and the process that looks after it.

`main` reads a WorkerConfig from one line of its standard input, so that passwords are in no command line, environment or
file. Standard input is the leash: when it ends, so does everything here. A worker that is killed is started again, and adopts
its tasks; one that gives up, or has drained, ends the VM with its exit code.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import pickle
import selectors
import signal
import sys
import time
from contextlib import suppress

from fluster_bus.running.linux_calls import become_subreaper, set_process_name
from fluster_services.forking import run_and_exit
from fluster_services.worker.__main__ import run_worker
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.linux.processes import descendants
from fluster_services.worker.presence.detection import detect_host

_LEASH = 0
_PAUSE_S = 0.5  # before a worker that was killed is started again
_LEAVE_TIMEOUT_S = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def setup_line(config: WorkerConfig) -> bytes:
    """What the machine has to know."""
    return base64.b64encode(pickle.dumps(config)) + b"\n"


def _read_setup() -> WorkerConfig:
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(_LEASH, 65_536)
        if not part:
            sys.exit("what made this VM was gone before it said what to run")
        text += part
    config: WorkerConfig = pickle.loads(base64.b64decode(text))
    return dataclasses.replace(config, advertised_host=detect_host(config.address))


class Caretaker:
    """Looks after the worker of this machine, and what that has started. Single-threaded, since it forks."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._life_end, self._life = os.pipe()  # a holder of the first reads the end of this process
        self._wake_end, self._wake = os.pipe()
        os.set_blocking(self._wake_end, False)
        os.set_blocking(self._wake, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(_LEASH, selectors.EVENT_READ)
        self._selector.register(self._wake_end, selectors.EVENT_READ)
        self._pid: int | None = None  # the worker's
        self._is_released = False  # the leash has ended

    def run(self) -> int:
        """Look after the worker until it gives up or has drained, or the leash ends; the exit code for that."""
        signal.set_wakeup_fd(self._wake)
        for number in (signal.SIGCHLD, *_SIGNALS):
            signal.signal(number, lambda *_: None)  # the wake-up pipe tells
        code = 0
        while not self._is_released:
            was_ready, status = self._serve()
            if status is None:
                break
            code = status if status >= 0 else 128 - status
            if status >= 0 or not was_ready:
                break
            sys.stderr.write(f"the worker was killed by signal {-status}, and is started again\n")
            self._pause(_PAUSE_S)
        self._end()
        return code

    def _serve(self) -> tuple[bool, int | None]:
        """Whether the worker was ever ready, and how it ended; None when the leash ended before."""
        ready_end, ready = os.pipe()
        self._fork(ready, ready_end)
        os.close(ready)
        status = None
        while status is None and not self._is_released:
            self._take_in()
            status = self._reap()
        os.set_blocking(ready_end, False)
        try:
            was_ready = bool(os.read(ready_end, 1))
        except BlockingIOError:
            was_ready = False
        os.close(ready_end)
        return was_ready, status

    def _fork(self, ready: int, ready_end: int) -> None:
        self._pid = os.fork()
        if self._pid == 0:
            run_and_exit(lambda: self._be_worker(ready, ready_end))

    def _be_worker(self, ready: int, ready_end: int) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *_SIGNALS):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for descriptor in (self._life, self._wake, self._wake_end, ready_end):
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, _LEASH)
        os.close(null)
        set_process_name("fluster-worker")
        run_worker(self._config, ready_fd=ready, owner_fd=self._life_end)

    def _take_in(self, timeout_s: float | None = None) -> None:
        """Wait until something happens: pass signals on, and see whether the leash has ended."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd == _LEASH and not os.read(_LEASH, 4096):
                self._is_released = True
                self._selector.unregister(_LEASH)
            elif key.fd == self._wake_end:
                for number in os.read(self._wake_end, 4096):
                    if number in _SIGNALS and self._pid:
                        os.kill(self._pid, signal.SIGTERM)  # it drains

    def _reap(self) -> int | None:
        """Reap the children that have ended; returns how the worker did, if it is among them."""
        ended = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            if pid == self._pid:
                self._pid, ended = None, os.waitstatus_to_exitcode(status)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_released and (left := deadline - time.monotonic()) > 0:
            self._take_in(left)
            self._reap()

    def _end(self) -> None:
        """Have the worker and all keepers, and with them their tasks, leave; by force if need be."""
        os.close(self._life)
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        self._reap()
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            self._take_in(max(0.0, deadline - time.monotonic()))
            self._reap()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    become_subreaper()
    set_process_name("fluster-vm")
    sys.exit(Caretaker(_read_setup()).run())
