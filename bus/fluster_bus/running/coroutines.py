"""How coroutines run: tried again after pauses, until an event or a time, in the background with their faults logged, and in slices
between which others run.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from fluster_bus.running.backoff import Backoff

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.5


async def retried(attempt: Callable[[float], Awaitable[T]], *, on: tuple[type[Exception], ...], timeout_s: float) -> T:
    """What `attempt(seconds_left)` returns, tried again after each error of `on` until `timeout_s` is over.

    Then that error is raised. Pauses double from at most 10 ms to at most 500 ms, each cut by up to a half at random so
    that many do not come at once; none ends after the deadline.
    """
    deadline = time.monotonic() + timeout_s
    backoff = Backoff(_FIRST_PAUSE_S, _LAST_PAUSE_S)
    while True:
        try:
            return await attempt(max(deadline - time.monotonic(), _FIRST_PAUSE_S))
        except on:
            pause_s = backoff.pause_s * random.uniform(0.5, 1)
            if time.monotonic() + pause_s >= deadline:
                raise
        await asyncio.sleep(pause_s)
        backoff.lengthen()


async def wait_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Return True when `event` is set, or False after `timeout_s` seconds; None: wait until it is set."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


class SpawnedTasks:
    """Background tasks of one connection, whose name stands before what is logged of their faults."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, None, None], name: str) -> None:
        """Run `work` until it ends or `close`; an error in it is logged."""
        running = asyncio.create_task(work, name=name)
        self._tasks.add(running)
        running.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s: %s failed", self._owner, task.get_name(), exc_info=task.exception())

    async def close(self) -> None:
        """Cancel those that run, and return when they have ended."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


SLICE_S = 0.002
_ROUNDS = 8  # of the loop: from its arrival to its answer a heartbeat takes about as many


class TimeSlices:
    """Pauses in work that goes on for long without waiting, so that other tasks of the loop run beside it."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def begin(self) -> None:
        """What follows has waited for something, so a new slice begins."""
        self._began = time.monotonic()

    async def step(self) -> bool:
        """Go on at once, or after whatever else is ready, when this slice has lasted long enough; whether anything else went on."""
        if time.monotonic() - self._began < SLICE_S:
            return False
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
        self._began = time.monotonic()
        return True
