"""The wish that a worker leaves: it takes nothing new, and what it has may take its time, up to a bound."""

from __future__ import annotations

import asyncio
import time
from typing import Any


class Draining:
    """Whether a worker is to leave, and until when it waits for what it has. Made before there is an event loop."""

    def __init__(self) -> None:
        self.is_asked = False
        self._deadline: float | None = None
        self._changed = asyncio.Event()

    def ask(self, timeout_s: float | None) -> None:
        """Have the worker leave; after `timeout_s` it hands back what still runs. Asked again, the shorter time counts."""
        self.is_asked = True
        if timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self._changed.set()

    async def wait_asked(self) -> None:
        while not self.is_asked:
            await self._changed.wait()

    async def wait_done(self, work: set[asyncio.Task[Any]]) -> bool:
        """True once `work`, which may grow meanwhile, is empty; False when the time is over."""
        while work:
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            left_s = None if self._deadline is None else self._deadline - time.monotonic()
            try:
                if left_s is not None and left_s <= 0:
                    return False
                await asyncio.wait({*work, changed}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
        return True
