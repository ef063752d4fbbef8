"""Threads that are there before they are needed: where a machine can make no more, a worker must be able to see and say that."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

_MOST = 16
_BESIDE_CPUS = 4


def ready_threads() -> ThreadPoolExecutor:
    """An executor all of whose threads run already. Raises RuntimeError where they cannot be had."""
    count = min(_MOST, (os.cpu_count() or 1) + _BESIDE_CPUS)
    executor = ThreadPoolExecutor(count, thread_name_prefix="fluster-worker")
    all_run = threading.Barrier(count + 1)
    try:
        for _ in range(count):  # each holds a thread of its own until all do
            executor.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        raise
    all_run.wait()
    return executor
