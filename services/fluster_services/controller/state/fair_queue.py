"""A queue in which no namespace keeps the others waiting."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Each namespace has a line of its own, and the lines take turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Item]] = OrderedDict()  # those that have something, the next one first
        self._has_some = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        return not self._lines

    def put(self, namespace: str, item: Item) -> None:
        """Add an item to the end of the namespace's line."""
        self._lines.setdefault(namespace, deque()).append(item)
        self._has_some.set()

    async def get(self) -> Item:
        """The first item of the line whose turn it is, once there is one."""
        while not self._lines:
            self._has_some.clear()
            await self._has_some.wait()
        namespace, line = self._lines.popitem(last=False)
        item = line.popleft()
        if line:
            self._lines[namespace] = line
        return item
