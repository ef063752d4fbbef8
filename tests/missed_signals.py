"""Signals that do not wake who sleeps, as those that come just before the sleep begins."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.waiting import wait_until

PATIENCE_S = 60.0


@contextmanager
def missed_signal(number: signal.Signals, ready: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Send it once `ready` has returned and the main thread, which is in the block, sleeps there; another thread takes the signal."""
    task = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
    begins = threading.Event()

    def send() -> None:
        begins.wait()
        ready()
        wait_until(lambda: task.read_text(encoding="ascii").rpartition(")")[2].split()[0] == "S", PATIENCE_S)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()  # before the mask is set, which it would inherit
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        begins.set()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        thread.join()


def missed_ctrl_c() -> AbstractContextManager[None]:
    return missed_signal(signal.SIGINT)
