"""Items of a stream, to be iterated one by one or in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, TypeVar

T = TypeVar("T")


class Batched(AsyncGenerator[T, None]):
    """The items of lists. Who takes the lists themselves, from `batches`, pays for one step a list."""

    def __init__(self, batches: AsyncGenerator[list[T]]) -> None:
        self.batches = batches
        self._ready: deque[T] = deque()

    async def asend(self, _value: None) -> T:
        """The next item."""
        while not self._ready:
            self._ready.extend(await anext(self.batches))
        return self._ready.popleft()

    async def athrow(self, *error: Any) -> T:
        """As with any generator; the items that are left are dropped."""
        self._ready.clear()
        return (await self.batches.athrow(*error))[0]

    async def aclose(self) -> None:
        """End it."""
        self._ready.clear()
        await self.batches.aclose()
