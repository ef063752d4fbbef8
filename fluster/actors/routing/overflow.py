"""Calls that found mailboxes full, and wait for room."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fluster.actors.protocol.calls import Call


class Overflow:
    """They wait in the order in which they were issued, and go out again as the actors answer.

    Nobody tells when a mailbox has room. But each answer has made some: two calls may follow it, so their number
    doubles until one is turned away again. Where no answers come, since other clients take the room, one call is sent
    now and then to see.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, Call]] = []  # a heap of (order, call)
        self._room = 0  # how many may be sent
        self.bytes = 0  # of their payloads

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return (call for _order, call in sorted(self._calls))

    def has_room(self) -> bool:
        return bool(self._calls) and self._room > 0

    def add(self, call: Call) -> None:
        heapq.heappush(self._calls, (call.order, call))
        self.bytes += len(call.payload)

    def turn_away(self, call: Call, *, everywhere: bool) -> None:
        """A mailbox was full; unless all were `everywhere`, the call may go to another at once."""
        self._room = 0 if everywhere else self._room + 1
        self.add(call)

    def on_answer(self) -> None:
        """A mailbox has one call less."""
        self._room += 2

    def probe(self) -> None:
        """Let one call go, to see whether there is room."""
        self._room = max(self._room, 1)

    def take(self) -> Call | None:
        """The next call that may be sent; those that are over are passed over."""
        while self._calls and self._room > 0:
            _order, call = heapq.heappop(self._calls)
            self.bytes -= len(call.payload)
            if not call.over:
                self._room -= 1
                return call
        return None

    def clear(self) -> list[Call]:
        """Give all back that are not over."""
        calls = [call for call in self if not call.over]
        self._calls.clear()
        self.bytes = 0
        return calls
