"""How a pool chooses the member for a call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from fluster.actors import frames
from fluster.actors.frames import Moment
from fluster.actors.members import Member


class Policy(Protocol):
    """Chooses among members, and learns from what becomes of the calls."""

    waits_for_members: bool  # while there are none, rather than refuse a call

    def choose(self, members: Sequence[Member], out: Mapping[str, int], now: Moment) -> Member | None:
        """One of `members`, or None while none has room. `out` counts the calls that each endpoint has."""

    def on_done(self, endpoint_id: str, now: Moment) -> None:
        """A member has answered a call."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self.waits_for_members = False
        self._turn = 0

    def choose(self, members: Sequence[Member], out: Mapping[str, int], now: Moment) -> Member:  # noqa: ARG002
        self._turn += 1
        return members[(self._turn - 1) % len(members)]

    def on_done(self, endpoint_id: str, now: Moment) -> None:
        pass


class LeastOutstanding:
    """The member with the fewest calls, and to each no more than keep it busy for `ahead_s`.

    A long call is given to whoever is idle, and none is stuck behind another while somebody else has nothing to
    do; of short ones enough are on their way that no member waits for the next.
    """

    _MOST = 1_024
    _NEWEST_WEIGHT = 0.2  # of the newest duration in the average

    def __init__(self, ahead_s: float = 0.02) -> None:
        self.waits_for_members = True
        self._ahead_s = ahead_s
        self._duration_s = math.inf  # of one call, on average; unknown at first, so each gets one
        self._busy_since: dict[str, Moment] = {}  # {endpoint id: when it got or finished its newest call}

    def choose(self, members: Sequence[Member], out: Mapping[str, int], now: Moment) -> Member | None:
        member = min(members, key=lambda each: out.get(each.endpoint_id, 0))
        count = out.get(member.endpoint_id, 0)
        if count >= self._room():
            return None
        if count == 0:
            self._busy_since[member.endpoint_id] = now
        return member

    def _room(self) -> int:
        return min(1 + int(self._ahead_s / max(self._duration_s, 1e-6)), self._MOST)

    def on_done(self, endpoint_id: str, now: Moment) -> None:
        duration_s = frames.seconds_between(self._busy_since.get(endpoint_id, now), now)
        self._busy_since[endpoint_id] = now
        known = math.isfinite(self._duration_s)
        self._duration_s = (
            self._duration_s + self._NEWEST_WEIGHT * (duration_s - self._duration_s) if known else duration_s
        )
