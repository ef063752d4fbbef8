"""Calls that are kept while there is no connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from fluster.actors.client.arrivals import MAX_QUEUED
from fluster.actors.protocol.calls import Broadcast, Call, Done
from fluster.errors import ConnectionLostError, MailboxFullError

_HELD_FOR_S = 30.0  # those without a deadline


class HeldCalls:
    """In the order in which they came; `finish` is told of those that end here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, finish: Callable[[list[Done]], object]) -> None:
        self._loop = loop
        self._finish = finish
        self._held: deque[tuple[float, Call | Broadcast]] = deque()  # (since when, item)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, items: Iterable[Call | Broadcast]) -> None:
        """Keep calls until there is a connection again, those without a deadline for a while only."""
        now = self._loop.time()
        for item in items:
            if len(self._held) >= MAX_QUEUED:
                text = f"{item}: there is no connection, and {MAX_QUEUED:,} calls wait for it already"
                self._finish([Done(item, ok=False, error=MailboxFullError(text))])
                continue
            if not self._held:
                self._loop.call_later(_HELD_FOR_S, self._drop)
            self._held.append((now, item))

    def take(self) -> list[Call | Broadcast]:
        """All of them, which are held no more."""
        held = [item for _since, item in self._held]
        self._held.clear()
        return held

    def _drop(self) -> None:
        latest = self._loop.time() - _HELD_FOR_S
        too_old = [item for since, item in self._held if since <= latest and item.deadline is None]
        self._held = deque(held for held in self._held if held[0] > latest or held[1].deadline is not None)
        lost = f"no connection to the bus for {_HELD_FOR_S:g} s; it was not sent"
        self._finish([Done(item, ok=False, error=ConnectionLostError(f"{item}: {lost}")) for item in too_old])
        if self._held:
            self._loop.call_later(max(self._held[0][0] - latest, 1.0), self._drop)
