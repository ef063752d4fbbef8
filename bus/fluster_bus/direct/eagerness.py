"""Looking for an answer again and again for a moment before one sleeps.

Who sleeps is woken late, by a core that has gone to sleep as well, and finds cold caches: a third of a short call's time
and more. It is worth it as long as answers come within that moment, and nobody else wants the core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "FLUSTER_EAGER_US"  # microseconds for which a thread looks before it sleeps; 0: it sleeps at once
_EAGER_US = 300.0
# Between two looks, some 2 µs apart: another ran here meanwhile, for longer than a server or an actor takes for a small
# call, so the machine is busy.
_DISTURBED_S = 200e-6
_MOST_FAILURES = 6  # that count: after so many, one wait in 64 is tried


class Eagerness:
    """How long it pays to look. For one thread at a time."""

    def __init__(self, for_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.for_s = for_s
        self._clock = clock
        self._failures = 0  # one after the other
        self._rests = 0  # waits that sleep at once

    @classmethod
    def of_this_process(cls) -> Eagerness:
        """As its environment wishes; none where all others would have to wait for the one core. Raises ValueError."""
        text = os.environ.get(VARIABLE) or str(_EAGER_US)
        try:
            eager_us = float(text)
        except ValueError:
            eager_us = -1.0
        if not 0 <= eager_us <= 1e6:
            raise ValueError(f"{VARIABLE}={text!r}: give microseconds from 0 to 1000000, such as {_EAGER_US:g}")
        return cls(eager_us / 1e6 if _cores() > 1 else 0.0)

    def look(self, found: Callable[[], list[T]]) -> list[T]:
        """What `found()` gives as soon as that is something; nothing when it is time to sleep."""
        if self._rests or not self.for_s:
            self._rests = max(self._rests - 1, 0)
            return []
        clock, yield_ = self._clock, os.sched_yield  # so that others who want this core have it
        now = begun = clock()
        while True:
            if something := found():
                self._failures = 0
                return something
            yield_()
            before, now = now, clock()
            if now - before > _DISTURBED_S or now - begun > self.for_s:
                break
        self._failures = min(self._failures + 1, _MOST_FAILURES)
        self._rests = (1 << self._failures) - 1
        return []


def _cores() -> int:
    if not hasattr(os, "sched_yield"):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
