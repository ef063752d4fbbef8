"""Time that passes only when something happens."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """What is to happen, in order; seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Have `action` called then; what is due at the same time happens in the order asked for."""
        heapq.heappush(self._due, (max(time, self.now), next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let happen what is due, until `is_over` or nothing is left."""
        while self._due and not is_over():
            self.now, _, action = heapq.heappop(self._due)
            action()
