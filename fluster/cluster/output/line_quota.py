"""How many lines of one writer are shown, when it writes more than a user can read."""

from __future__ import annotations

import math

LINES_A_SECOND = 100


class LineQuota:
    """The first lines of each second are shown, and then how many were not. Decides by the times that it is given."""

    def __init__(self, lines_a_second: int = LINES_A_SECOND) -> None:
        self._most = lines_a_second
        self._ends_at = -math.inf  # the second that began with a line
        self._shown = 0
        self._left_out = 0

    @property
    def owes(self) -> bool:
        """Whether lines were left out without a line that says so."""
        return self._left_out > 0

    def admit(self, now: float) -> bool:
        """Whether a line that comes at `now` is shown; after a second is over, `settle` is to be asked first."""
        if now >= self._ends_at:
            self._ends_at, self._shown = now + 1.0, 0
        if self._shown < self._most:
            self._shown += 1
            return True
        self._left_out += 1
        return False

    def settle(self, now: float) -> int:
        """How many lines were left out in a second that is over by `now`, told once."""
        if now < self._ends_at:
            return 0
        left_out, self._left_out = self._left_out, 0
        return left_out
