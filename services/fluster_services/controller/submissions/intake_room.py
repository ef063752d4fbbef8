"""How many submissions are looked at at once, and how large they may be together."""

from __future__ import annotations

import asyncio


class IntakeRoom:
    """Room for so many submissions, and so many bytes of them; one alone always has room. For one who asks at a time."""

    def __init__(self, at_once: int, most_bytes: int) -> None:
        self._at_once = at_once
        self._most_bytes = most_bytes
        self._count = self._bytes = 0
        self._changed = asyncio.Event()

    async def enter(self, size: int) -> None:
        """Return when there is room, which is taken."""
        while self._count >= self._at_once or (self._bytes and self._bytes + size > self._most_bytes):
            self._changed.clear()
            await self._changed.wait()
        self._count += 1
        self._bytes += size

    def leave(self, size: int) -> None:
        """Give back the room that one had; `size` is what it has not given back yet."""
        self._count -= 1
        self.leave_bytes(size)

    def leave_bytes(self, size: int) -> None:
        """Go on with less: what was read is stored."""
        self._bytes -= size
        self._changed.set()
