"""Doing something again that certainly did not happen the first time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.01, 0.5


async def retried(attempt: Callable[[float], Awaitable[T]], *, on: tuple[type[Exception], ...], timeout_s: float) -> T:
    """What `attempt(seconds_left)` returns, tried again after each error of `on` until `timeout_s` is over.

    Then that error is raised. Pauses double from 10 ms to 500 ms, with jitter so that many do not come at once.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await attempt(max(deadline - time.monotonic(), _FIRST_PAUSE_S))
        except on:
            if time.monotonic() + pause_s >= deadline:
                raise
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        pause_s = min(pause_s * 2, _LAST_PAUSE_S)
