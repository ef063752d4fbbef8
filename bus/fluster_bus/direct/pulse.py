"""Whether a connection is alive that says nothing: pings go out, and what is silent in spite of them is dead.

A broken cable or a machine without power closes no connection: the system goes on sending for a quarter of an hour.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

INTERVAL_VARIABLE = "FLUSTER_PING_INTERVAL_S"
UNANSWERED_VARIABLE = "FLUSTER_PINGS_UNANSWERED"

# A server's own pings, which go to clients that are silent. A client may be stopped, or held up by code that keeps its
# interpreter's lock, while its connection is well: it has half a minute. A client that was cut off is back long before.
SERVER_PINGS = 'ping_interval: "10s"\nping_max: 3\n'


@dataclass(frozen=True)
class PingTiming:
    """A connection sends a ping each `interval_s` seconds, and is dead after `unanswered` of them in silence."""

    interval_s: float = 5.0
    unanswered: int = 2

    def __post_init__(self) -> None:
        if not 0.01 <= self.interval_s <= 3600:
            raise ValueError(f"a ping interval of {self.interval_s:g} s: give seconds from 0.01 to 3600")
        if not 1 <= self.unanswered <= 1000:
            raise ValueError(f"{self.unanswered} unanswered pings: give a number from 1 to 1000")

    @classmethod
    def of_this_process(cls) -> Self:
        """FLUSTER_PING_INTERVAL_S and FLUSTER_PINGS_UNANSWERED. Raises ValueError."""
        interval, unanswered = os.environ.get(INTERVAL_VARIABLE), os.environ.get(UNANSWERED_VARIABLE)
        try:
            return cls(float(interval or cls.interval_s), int(unanswered or cls.unanswered))
        except ValueError as error:
            raise ValueError(
                f"{INTERVAL_VARIABLE}={interval!r}, {UNANSWERED_VARIABLE}={unanswered!r} cannot be used ({error}): "
                f"give seconds and a whole number, such as {cls.interval_s:g} and {cls.unanswered}"
            ) from error


class Pulse:
    """What is known of one connection. Times are seconds of the observer's monotonic clock."""

    def __init__(self, timing: PingTiming, now: float) -> None:
        self.timing = timing
        self._unanswered = 0
        self.due = now + timing.interval_s  # when to look next

    @property
    def silent_s(self) -> float:
        """For how long nothing was heard, at least."""
        return self._unanswered * self.timing.interval_s

    def is_dead(self, now: float, *, heard: bool) -> bool:
        """To be asked when a look is due; a ping is to follow if not. `heard`: anything came since the last look.

        A loop that looks so late that it missed a whole interval was itself held up, and has not read what may have come.
        """
        was_held_up = now - self.due > self.timing.interval_s
        if heard:
            self._unanswered = 0
        elif not was_held_up:
            self._unanswered += 1
        self.due = now + self.timing.interval_s
        return self._unanswered >= self.timing.unanswered
