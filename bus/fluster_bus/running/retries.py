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

    Then that error is raised. Pauses double from at most 10 ms to at most 500 ms, each cut by up to a half at random so
    that many do not come at once; none ends after the deadline.
    """
    deadline = time.monotonic() + timeout_s
    longest_s = _FIRST_PAUSE_S
    while True:
        try:
            return await attempt(max(deadline - time.monotonic(), _FIRST_PAUSE_S))
        except on:
            pause_s = longest_s * random.uniform(0.5, 1)
            if time.monotonic() + pause_s >= deadline:
                raise
        await asyncio.sleep(pause_s)
        longest_s = min(longest_s * 2, _LAST_PAUSE_S)
