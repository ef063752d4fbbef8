"""Whose turn it is to read a connection that several threads share."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

OnTurn = Callable[[], object]


class Turns:
    """One has the turn; others wait for it, and are told in the order of asking by a call, in another thread.

    Each is known by the function that it is told with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.holder: OnTurn | None = None  # for who looks only
        self._waiting: deque[OnTurn] = deque()
        self._left_at = time.monotonic()

    @property
    def wanted(self) -> bool:
        """True when somebody waits for it."""
        return bool(self._waiting)

    def unchanged_s(self) -> float:
        """For how long nobody has given it back: nobody reads, or somebody has been all the time."""
        return time.monotonic() - self._left_at

    def has(self, on_turn: OnTurn) -> bool:
        return self.holder == on_turn

    def take(self, on_turn: OnTurn) -> bool:
        """True when it was free, and is held now."""
        with self._lock:
            if self.holder is None:
                self.holder = on_turn
        return self.holder == on_turn

    def ask(self, on_turn: OnTurn) -> bool:
        """True when it was free, and is held now; else `on_turn` is called when it comes."""
        with self._lock:
            if self.holder is None:
                self.holder = on_turn
            else:
                self._waiting.append(on_turn)
        return self.holder == on_turn

    def leave(self, on_turn: OnTurn) -> None:
        """Have it no more, nor wait for it; who waits longest has it next. It may be said at any time, and twice."""
        next_: OnTurn | None = None
        with self._lock:
            if on_turn in self._waiting:
                self._waiting.remove(on_turn)
            if self.holder == on_turn:
                self._left_at = time.monotonic()
                self.holder = next_ = self._waiting.popleft() if self._waiting else None
        if next_ is not None:
            next_()


class Naps:
    """For how long one who takes turns that others do not want may look away: longer, while they take short ones all the time.

    For one thread, but for `attend`.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self._nap_s = shortest_s
        self._attends = False

    def next_s(self, unchanged_s: float) -> float:
        """How long the next one is, when nobody has given the turn back for so long."""
        others_are_busy = unchanged_s < self._nap_s and not self._attends
        self._attends = False
        self._nap_s = min(self._nap_s * 2, self._longest_s) if others_are_busy else self._shortest_s
        return self._nap_s

    def attend(self) -> bool:
        """Have the next one be the shortest; True when the present one may be longer. From any thread."""
        self._attends = True
        return self._nap_s > self._shortest_s
