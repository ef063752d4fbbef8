"""The helper process that tells a cluster whether this program lives, kept up for as long as the program owns
anything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

HELPER_MODULE = "fluster.owner_helper"
_RELEASED = b"released\n"
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)  # by it: they are for the program
_RESTARTS_IN_A_ROW = 5
_FIRST_PAUSE_S = 0.2
_WELL_AFTER_S = 60.0  # a helper that ran for so long ends a row


@dataclass
class Restarts:
    """Whether a helper that ended is started again, and when: at once, then after pauses that double, and not for
    ever.
    """

    _in_a_row: int = 0

    def on_end(self, lived_s: float) -> float | None:
        """Seconds until the next one is started; None when there is to be none."""
        if lived_s >= _WELL_AFTER_S:
            self._in_a_row = 0
        self._in_a_row += 1
        if self._in_a_row > _RESTARTS_IN_A_ROW:
            return None
        return 0.0 if self._in_a_row == 1 else float(_FIRST_PAUSE_S * 2 ** (self._in_a_row - 2))


class _Process(subprocess.Popen[bytes]):
    """It outlives the program for a moment, by design."""

    def __del__(self) -> None:
        pass


class HelperProcess:
    """Runs `python -m fluster.owner_helper` with `setup`, and another when that ends, until it is released.

    Raises OSError when the first one cannot be started. Without a pidfd the helper takes the end of its pipe for the
    end of the program, so forked children close it.
    """

    def __init__(self, setup: Mapping[str, object]) -> None:
        self._setup = setup
        self._released = threading.Event()
        self._is_over = False
        with _forking:
            self.process = self._start()
            _helpers.add(self)
        threading.Thread(target=self._attend, name="fluster-owner-helper", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True when it ended too often to be started again."""
        return self._is_over

    def release(self) -> None:
        """The program owns nothing any longer."""
        with _forking:
            self._released.set()
            self._close_pipe(_RELEASED)

    def _attend(self) -> None:
        """Have a helper run until released. In a thread of its own, which mostly waits for the process to end."""
        restarts, started_at = Restarts(), time.monotonic()
        while True:
            status = self.process.wait()
            if self._released.is_set():
                return
            pause_s = restarts.on_end(time.monotonic() - started_at)
            if pause_s is None:
                self._is_over = True
                log.warning(
                    "the helper process that tells the cluster that this program lives ended %d times in a row, with "
                    "status %d: the cluster will end this program's workers and actors when the time of "
                    "FLUSTER_OWNER_LEASE_S (10 min by default) is over; the next deployment starts another helper",
                    _RESTARTS_IN_A_ROW + 1,
                    status,
                )
                return
            log.info("the helper process of this program ended with status %d: another is started", status)
            if self._released.wait(pause_s):
                return
            started_at = time.monotonic()
            with _forking:
                if self._released.is_set():
                    return
                self._close_pipe()
                try:
                    self.process = self._start()
                except OSError as error:
                    log.info("the helper process of this program could not be started: %s", error)

    def _start(self) -> _Process:
        pidfd = _own_pidfd()
        # It inherits them blocked: one that came before it ignores them would end it, perhaps with the program.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            process = _Process(
                [sys.executable, "-m", HELPER_MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # else a reader of the program's output waits for this process too
                stderr=subprocess.DEVNULL,
                pass_fds=() if pidfd is None else (pidfd,),
                start_new_session=True,  # Ctrl-C at the terminal is for the program
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if pidfd is not None:
                os.close(pidfd)
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps({**self._setup, "pidfd": pidfd}).encode() + b"\n")
        return process

    def _close_pipe(self, last_words: bytes = b"") -> None:
        pipe = self.process.stdin
        assert pipe is not None  # noqa: S101 - it is a pipe
        if not pipe.closed:
            with contextlib.suppress(BrokenPipeError), pipe:
                pipe.write(last_words)

    def drop(self) -> None:
        """In a forked child: the helper is its parent's."""
        self._close_pipe()


def _own_pidfd() -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(os.getpid())
    except OSError:  # the kernel is older, or a sandbox refuses it
        return None


_helpers: weakref.WeakSet[HelperProcess] = weakref.WeakSet()
# Held while a helper is started: a child that is forked meanwhile would keep the end of a pipe that it does not know.
_forking = threading.RLock()


def _drop_in_child() -> None:
    for helper in list(_helpers):
        helper.drop()
    _helpers.clear()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_drop_in_child)
