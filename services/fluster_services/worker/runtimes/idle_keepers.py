"""Keepers between two attempts."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from fluster.json_lines import JsonLineStream

_MOMENT_S = 0.05  # in which a keeper whose attempt is over is free again
_MAX_IDLE = 32  # keepers that wait for another attempt; each has a few MiB of its own


class IdleKeepers:
    """Keepers whose attempts are over and forgotten, and that may have another one of the same namespace."""

    def __init__(self) -> None:
        self._connections: dict[str, list[JsonLineStream]] = {}
        self._coming: Counter[str] = Counter()  # {namespace: keepers that will be free in a moment}
        self._wanted: dict[str, deque[asyncio.Future[JsonLineStream]]] = {}

    def expect(self, key: str, count: int = 1) -> None:
        """The keeper that has `key` will be free in a moment."""
        self._coming[_namespace(key)] += count

    def add(self, key: str, connection: JsonLineStream) -> None:
        """Keep the connection to a keeper that had `key`, or let it go where there are enough."""
        wanted = self._wanted.get(_namespace(key), deque())
        while wanted:
            taker = wanted.popleft()
            if not taker.done():
                taker.set_result(connection)
                return
        free = self._connections.setdefault(_namespace(key), [])
        free[:] = [each for each in free if each.is_open]
        if sum(map(len, self._connections.values())) < _MAX_IDLE:
            free.append(connection)
        else:
            connection.close()

    async def take(self, key: str) -> JsonLineStream | None:
        """The connection to a keeper that may have `key`: the one that was used last, which is the warmest.

        One that will be free in a moment is waited for that long: it is there sooner than a new one.
        """
        free = self._connections.get(_namespace(key), [])
        while free:
            connection = free.pop()
            if connection.is_open:
                return connection
            connection.close()
        wanted = self._wanted.setdefault(_namespace(key), deque())
        if len(wanted) >= self._coming[_namespace(key)]:
            return None
        taker: asyncio.Future[JsonLineStream] = asyncio.get_running_loop().create_future()
        wanted.append(taker)
        try:
            await asyncio.wait({taker}, timeout=_MOMENT_S)
            return taker.result() if taker.done() else None
        except asyncio.CancelledError:
            if taker.done():
                taker.result().close()  # only this call knows it
            raise
        finally:
            if not taker.done():
                taker.cancel()
            if taker in wanted:
                wanted.remove(taker)

    async def close(self) -> None:
        """Let them go."""
        connections = [each for free in self._connections.values() for each in free]
        self._connections.clear()
        for each in connections:
            each.close()
        await asyncio.gather(*(each.wait_closed() for each in connections), return_exceptions=True)


def _namespace(key: str) -> str:
    return key.partition(".")[0]
