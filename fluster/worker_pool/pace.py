"""How long the items of some work take, and how many of them make a good call."""

from __future__ import annotations

import math

CHUNK_S = 0.02  # of work in one call: so long that the call itself does not count, so short that none waits for long
TAIL_S = 0.001  # the same where work runs out and is shared among the workers
MAX_ITEMS = 1_024
# Of single tasks. Long: answers of short ones come many at a time, and the first of them seems to have taken all the time.
TASK_MEMORY = 0.98


class Pace:
    """The average duration of an item, of which the newest count most. Unknown at first: then calls carry one item."""

    def __init__(self, memory: float) -> None:
        self._memory = memory  # what is left of an observation's weight at the next one
        self._items = 0.0
        self._seconds = 0.0
        self._largest = 0  # call so far

    def observe(self, items: int, seconds: float) -> None:
        """A call with that many items took that long."""
        self._items = self._items * self._memory + items
        self._seconds = self._seconds * self._memory + max(seconds, 0.0)
        self._largest = max(self._largest, items)

    def expected_s(self, items: int) -> float:
        """How long that many items will take: infinity when that is not known yet."""
        return items * self._seconds / self._items if self._items else math.inf

    def is_new(self, items: int) -> bool:
        """True when no call with that many items has been answered yet."""
        return items > self._largest

    def chunk(self, seconds: float = CHUNK_S) -> int:
        """How many items the next call should have, to take so long: at most double what is known to go well."""
        if not self._items:
            return 1
        wanted = seconds / max(self._seconds / self._items, 1e-9)
        return max(1, int(min(wanted, 2 * self._largest, MAX_ITEMS)))
