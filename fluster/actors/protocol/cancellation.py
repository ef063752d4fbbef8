"""That nobody waits for a call any more, as the actor is told of it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancellation:
    """Told once by the connection's thread, looked at and waited for by those that run the method."""

    __slots__ = ("_callbacks", "_event", "_lock", "cancelled")

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._event: threading.Event | None = None

    def cancel(self) -> None:
        with self._lock:
            if self.cancelled:
                return
            self.cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Have `callback` run once, in whichever thread: at once when it is cancelled already."""
        with self._lock:
            if not self.cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float | None) -> bool:
        """True as soon as it is cancelled, False after `timeout_s`."""
        if self._event is None:
            self._event = threading.Event()  # only the thread that runs the method waits
            self.on_cancel(self._event.set)
        return self._event.wait(timeout_s)
