"""Whose turn it is to read a connection that several threads share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Turns:
    """One thread has the turn; who waits for it is told by a call when it comes, in the order of asking.

    That call is made in another thread, and from then on the turn is held in the name of who waited.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held = False
        self._waiting: deque[Callable[[], object]] = deque()
        self.left = 0  # times that it was left

    @property
    def held(self) -> bool:
        return self._held

    @property
    def wanted(self) -> bool:
        """True when somebody waits for it."""
        return bool(self._waiting)

    def take(self) -> bool:
        """True when it was free, and is held now."""
        with self._lock:
            if self._held:
                return False
            self._held = True
            return True

    def ask(self, on_turn: Callable[[], object]) -> bool:
        """True when it was free, and is held now; else `on_turn` is called when it comes."""
        with self._lock:
            if self._held:
                self._waiting.append(on_turn)
                return False
            self._held = True
            return True

    def withdraw(self, on_turn: Callable[[], object]) -> bool:
        """Wait no more. True when the turn came before that: it is held, and has to be left."""
        with self._lock:
            if on_turn in self._waiting:
                self._waiting.remove(on_turn)
                return False
            return True

    def leave(self) -> None:
        """Give it to who waits longest."""
        with self._lock:
            self.left += 1
            on_turn = self._waiting.popleft() if self._waiting else None
            self._held = on_turn is not None
        if on_turn is not None:
            on_turn()
