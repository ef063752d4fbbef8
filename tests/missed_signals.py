"""A Ctrl-C that does not wake who sleeps, as one that comes just before the sleep begins."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_until

PATIENCE_S = 30.0


@contextmanager
def missed_ctrl_c() -> Iterator[None]:
    """Press it once the main thread, which is in the block, sleeps there; another thread takes the signal."""
    task = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
    begins = threading.Event()

    def press() -> None:
        begins.wait()
        wait_until(lambda: task.read_text(encoding="ascii").rpartition(")")[2].split()[0] == "S", PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()  # before the mask is set, which it would inherit
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        begins.set()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        thread.join()
