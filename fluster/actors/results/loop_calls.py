"""Having something done on the loop of a client's connection, from any thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fluster.actors.results.futures import is_running
from fluster_bus.core.errors import ClosedError

log = logging.getLogger(__name__)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """At once if this is the loop's thread. Raises ClosedError."""
    if is_running(loop):
        callback(*args)
        return
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError as error:
        raise closed() from error


def tell_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Never at once: for what the collector of garbage may bring about, in the middle of anything."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        log.debug("the loop is closed, and all calls with it")


def closed() -> ClosedError:
    return ClosedError("the connection to the cluster was closed")
