"""What a keeper has to do later."""

from __future__ import annotations

from collections.abc import Callable

_LONGEST_S = 86_400.0  # a selector takes no more than some weeks, and users give what they like


class Timers:
    """Named moments, each at most once, on whatever clock the caller reads."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}

    def set(self, name: str, at: float, action: Callable[[], None]) -> None:
        self._due[name] = (at, action)

    def at(self, name: str) -> float | None:
        return self._due[name][0] if name in self._due else None

    def cancel(self, *names: str) -> None:
        for name in names:
            self._due.pop(name, None)

    def first_at(self) -> float | None:
        return min((at for at, _ in self._due.values()), default=None)

    def timeout(self, now: float) -> float | None:
        """For how long to wait until it is to be looked again whether something is due; None: nothing ever is."""
        at = self.first_at()
        return min(max(0.0, at - now), _LONGEST_S) if at is not None else None

    def fire(self, now: float) -> None:
        for name, (at, action) in list(self._due.items()):
            if at <= now and self._due.get(name) == (at, action):
                del self._due[name]
                action()
