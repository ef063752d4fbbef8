"""Keepers between two attempts."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TypeAlias

_MOMENT_S = 0.05  # in which a keeper whose attempt is over is free again
_MAX_IDLE = 32  # keepers that wait for another attempt; each has a few MiB of its own

Connection: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class IdleKeepers:
    """Keepers whose attempts are over and forgotten, and that may have another one of the same namespace."""

    def __init__(self) -> None:
        self._connections: dict[str, list[Connection]] = {}
        self._coming: Counter[str] = Counter()  # {namespace: keepers that will be free in a moment}
        self._wanted: dict[str, deque[asyncio.Future[Connection]]] = {}

    def expect(self, key: str, count: int = 1) -> None:
        """The keeper that has `key` will be free in a moment."""
        self._coming[_namespace(key)] += count

    def add(self, key: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep the connection to a keeper that had `key`, or let it go where there are enough."""
        wanted = self._wanted.get(_namespace(key), deque())
        while wanted:
            taker = wanted.popleft()
            if not taker.done():
                taker.set_result((reader, writer))
                return
        free = self._connections.setdefault(_namespace(key), [])
        free[:] = [each for each in free if not each[0].at_eof()]
        if sum(map(len, self._connections.values())) < _MAX_IDLE:
            free.append((reader, writer))
        else:
            writer.close()

    async def take(self, key: str) -> Connection | None:
        """The connection to a keeper that may have `key`: the one that was used last, which is the warmest.

        One that will be free in a moment is waited for that long: it is there sooner than a new one.
        """
        free = self._connections.get(_namespace(key), [])
        while free:
            reader, writer = free.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        wanted = self._wanted.setdefault(_namespace(key), deque())
        if len(wanted) >= self._coming[_namespace(key)]:
            return None
        taker: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        wanted.append(taker)
        try:
            await asyncio.wait({taker}, timeout=_MOMENT_S)
            return taker.result() if taker.done() else None
        except asyncio.CancelledError:
            if taker.done():
                taker.result()[1].close()  # only this call knows it
            raise
        finally:
            if not taker.done():
                taker.cancel()
            if taker in wanted:
                wanted.remove(taker)

    async def close(self) -> None:
        """Let them go."""
        writers = [writer for free in self._connections.values() for _, writer in free]
        self._connections.clear()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


def _namespace(key: str) -> str:
    return key.partition(".")[0]
