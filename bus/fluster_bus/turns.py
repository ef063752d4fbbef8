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
        self._holder: OnTurn | None = None
        self._waiting: deque[OnTurn] = deque()
        self.left = 0  # times that it was left

    @property
    def held(self) -> bool:
        return self._holder is not None

    @property
    def wanted(self) -> bool:
        """True when somebody waits for it."""
        return bool(self._waiting)

    def has(self, on_turn: OnTurn) -> bool:
        return self._holder == on_turn

    def take(self, on_turn: OnTurn) -> bool:
        """True when it was free, and is held now."""
        with self._lock:
            if self._holder is None:
                self._holder = on_turn
        return self._holder == on_turn

    def ask(self, on_turn: OnTurn) -> bool:
        """True when it was free, and is held now; else `on_turn` is called when it comes."""
        with self._lock:
            if self._holder is None:
                self._holder = on_turn
            else:
                self._waiting.append(on_turn)
        return self._holder == on_turn

    def leave(self, on_turn: OnTurn) -> None:
        """Have it no more, nor wait for it; who waits longest has it next. It may be said at any time, and twice."""
        next_: OnTurn | None = None
        with self._lock:
            if on_turn in self._waiting:
                self._waiting.remove(on_turn)
            if self._holder == on_turn:
                self.left += 1
                self._holder = next_ = self._waiting.popleft() if self._waiting else None
        if next_ is not None:
            next_()


class Idleness:
    """For how long nobody has given the turn back: nobody reads, or somebody has been all the time. For one thread."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._seen = turns.left
        self._since = time.monotonic()

    def for_s(self) -> float:
        now = time.monotonic()
        if self._turns.left != self._seen:
            self._seen, self._since = self._turns.left, now
        return now - self._since
