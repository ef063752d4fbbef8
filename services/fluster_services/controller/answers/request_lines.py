"""Whose request is answered next, so that no namespace keeps the others waiting.

Each namespace has a line of its own, bounded in requests and bytes, and the lines take turns. A turn is a few milliseconds of
work: what takes longer asks for another, and what was begun first goes first among those of its namespace.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class LineLimits:
    """What each namespace may have waiting, and in hand."""

    at_once: int = 64  # begun and not answered
    max_bytes_at_once: int = 1 << 20  # of those; one alone may have more. In memory each takes some fifty times as much
    max_waiting: int = 1_000
    max_waiting_bytes: int = 8 << 20
    patience_s: float = 2.0  # after which clients ask again, so that an answer to the first request is of no use


class Turn(NamedTuple, Generic[T]):
    """What may go on now."""

    namespace: str
    number: int  # of the request, in the order in which they were begun; 0 for one that is late
    item: T
    size: int  # of the request, in bytes; 0 when it was begun before
    is_new: bool  # to be begun; else it asked for another turn
    is_late: bool = False  # it has waited for too long, and is not begun


@dataclass
class _Line(Generic[T]):
    fresh: deque[tuple[T, int, float]] = field(default_factory=deque)  # (request, its bytes, since when it waits)
    bytes: int = 0
    begun: list[tuple[int, T]] = field(default_factory=list)  # heap of those that want another turn
    in_hand: int = 0
    bytes_in_hand: int = 0


class RequestLines(Generic[T]):
    """The requests that wait, and how many are in hand. Times are seconds of a monotonic clock."""

    def __init__(self, limits: LineLimits | None = None) -> None:
        self._limits = limits or LineLimits()
        self._lines: dict[str, _Line[T]] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()  # the namespaces that can use a turn, the next one first
        self._number = 0

    def enter(self, namespace: str, item: T, *, size: int, now: float) -> bool:
        """A request has arrived; False when too many of its namespace wait, so that it is to be refused."""
        line = self._lines.get(namespace) or _Line()
        is_full = len(line.fresh) >= self._limits.max_waiting
        if is_full or (line.fresh and line.bytes + size > self._limits.max_waiting_bytes):
            return False
        self._lines[namespace] = line
        line.fresh.append((item, size, now))
        line.bytes += size
        self._look(namespace, line)
        return True

    def again(self, namespace: str, number: int, item: T) -> None:
        """A request that was begun wants another turn."""
        line = self._lines[namespace]
        heapq.heappush(line.begun, (number, item))
        self._look(namespace, line)

    def end(self, namespace: str, size: int) -> None:
        """A request of that size that was begun is answered."""
        line = self._lines[namespace]
        line.in_hand -= 1
        line.bytes_in_hand -= size
        self._look(namespace, line)

    def next(self, *, now: float) -> Turn[T] | None:
        """The next turn; None when no line can use one."""
        if not self._ready:
            return None
        namespace, _ = self._ready.popitem(last=False)
        line = self._lines[namespace]
        turn = self._take(namespace, line, now)
        self._look(namespace, line)
        return turn

    def _take(self, namespace: str, line: _Line[T], now: float) -> Turn[T]:
        if line.begun:
            number, item = heapq.heappop(line.begun)
            return Turn(namespace, number, item, 0, is_new=False)
        item, size, since = line.fresh.popleft()
        line.bytes -= size
        if now - since > self._limits.patience_s:
            return Turn(namespace, 0, item, size, is_new=True, is_late=True)
        line.in_hand += 1
        line.bytes_in_hand += size
        self._number += 1
        return Turn(namespace, self._number, item, size, is_new=True)

    def _may_begin(self, line: _Line[T]) -> bool:
        if not line.fresh or line.in_hand >= self._limits.at_once:
            return False
        return not line.in_hand or line.bytes_in_hand + line.fresh[0][1] <= self._limits.max_bytes_at_once

    def _look(self, namespace: str, line: _Line[T]) -> None:
        if line.begun or self._may_begin(line):
            self._ready.setdefault(namespace)
        elif not line.fresh and not line.in_hand:
            del self._lines[namespace]

    @property
    def is_idle(self) -> bool:
        """True when nothing waits or is in hand, and nothing is remembered of any namespace."""
        return not self._lines

    def __len__(self) -> int:
        """How many wait to be begun."""
        return sum(len(line.fresh) for line in self._lines.values())
