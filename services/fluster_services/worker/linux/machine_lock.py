"""What only one process of a machine does at a time. Whoever does it may be killed: then the next one goes on at once."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress

_BACKLOG = 64
_CROWDED_S = 0.2  # before another look at a holder for whom too many wait already


@asynccontextmanager
async def alone(name: str, on_wait: Callable[[], None]) -> AsyncIterator[None]:
    """Hold `name` on this machine for the length of the block; `on_wait` is called if somebody else holds it.

    Only on Linux: a socket's abstract address belongs to one process at most, and goes with it. Elsewhere nobody waits.
    """
    if sys.platform != "linux":
        yield
        return
    address = f"\0{name}"
    has_waited = False
    while True:
        with closing(socket.socket(socket.AF_UNIX)) as place:
            try:
                place.bind(address)
                place.listen(_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                yield
                return
        if not has_waited:
            on_wait()
            has_waited = True
        await _wait_gone(address)


async def _wait_gone(address: str) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as waiting:
        waiting.setblocking(False)
        try:
            waiting.connect(address)
        except BlockingIOError:
            await asyncio.sleep(_CROWDED_S)
        except OSError:  # it is gone already
            return
        else:
            with suppress(OSError):  # reset: nobody took the call
                await asyncio.get_running_loop().sock_recv(waiting, 1)
