"""Pools whose waiting calls are to be looked at again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fluster.actors.routing.desk import Desk

_PAUSE_S = 0.05  # until mailboxes that were full, and members that may be on their way back, are tried again


class WaitingPools:
    """Those of one client. `wake` has the loop come by for what `take` gives."""

    def __init__(self, desk: Desk, loop: asyncio.AbstractEventLoop, wake: Callable[[], object]) -> None:
        self._desk = desk
        self._loop = loop
        self._wake = wake
        self._moving: set[str] = set()
        self._pausing: set[str] = set()
        self._probing: set[str] = set()  # their mailboxes were full; they are looked at again in a moment

    def move(self, name: str) -> None:
        """The calls that wait in a pool may have found room."""
        if self._desk.has_waiting(name):
            self._moving.add(name)
            self._wake()

    def take(self) -> set[str]:
        """The pools whose calls may go."""
        moving, self._moving = self._moving, set()
        return moving

    def on_turned_away(self) -> None:
        """Calls may have found mailboxes full."""
        for name in self._desk.turned_away():
            self.move(name)
            self._probe_later(name)

    def on_paused(self) -> None:
        """Pools may have been paused."""
        for name in self._desk.paused():
            if name not in self._pausing:
                self._pausing.add(name)
                self._loop.call_later(_PAUSE_S, self._resume, name)

    def _probe_later(self, name: str) -> None:
        if name not in self._probing:
            self._probing.add(name)
            self._loop.call_later(_PAUSE_S, self._probe, name)

    def _probe(self, name: str) -> None:
        self._probing.discard(name)
        self._desk.probe(name)
        self.move(name)
        if name in self._desk.turned_away():
            self._probe_later(name)

    def _resume(self, name: str) -> None:
        self._pausing.discard(name)
        self._desk.resume(name)
        self.move(name)
