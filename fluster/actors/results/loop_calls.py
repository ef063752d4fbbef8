"""Work for the loop of a client's connection, handed over from any thread: callbacks, and payloads to store or to fetch."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future

from fluster_bus.core.errors import ClosedError
from fluster_bus.payloads import payloads
from fluster_bus.storage.objects import ObjectStore

log = logging.getLogger(__name__)


def is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """True in the thread of `loop`, while it runs."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def is_any_running() -> bool:
    """True in a thread that runs an event loop, which must not be held up."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


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


class LoopWake:
    """Has a task of `loop` look, from any thread: one wake-up for all that comes until it does."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self.is_coming = False  # the task has been woken, and has not looked since

    def wake(self) -> None:
        """Have it look, at once if this is the loop's thread. Raises ClosedError."""
        self._wake(tell)

    def wake_soon(self) -> None:
        """Have it look, also from within the collector of garbage; of no effect once the loop is closed."""
        self._wake(tell_soon)

    def _wake(self, by: Callable[[asyncio.AbstractEventLoop, Callable[[], object]], None]) -> None:
        if self.is_coming:
            return
        try:
            self.is_coming = True
            by(self._loop, self._event.set)
        except BaseException:  # Ctrl-C: else nothing would wake the loop again
            self.is_coming = False
            raise

    def set(self) -> None:
        """Have it look, on the loop."""
        self._event.set()

    async def wait(self) -> None:
        """Return when there is something to look at. Those who come from here on wake it again."""
        await self._event.wait()
        self._event.clear()
        self.is_coming = False


def setter(event: asyncio.Event) -> Callable[[], None]:
    """Return what sets `event`, which belongs to the loop that runs here, from any thread. It has no effect once that loop is closed."""
    return functools.partial(tell_soon, asyncio.get_running_loop(), event.set)


def closed() -> ClosedError:
    return ClosedError("the connection to the cluster was closed")


class StoredPayloads:
    """Moves payloads that no message can carry to the object store and back, for threads other than the connection's.

    The futures are cancelled when its connection is closed. Raises ClosedError after that.
    """

    def __init__(self, store: ObjectStore, loop: asyncio.AbstractEventLoop) -> None:
        self.objects = store
        self._loop = loop

    def store(self, payload: bytes) -> Future[bytes]:
        """What to send instead of a payload. Raises as `payloads.stored` does."""
        return self._begin(payloads.stored(payload, self.objects))

    def fetch(self, payload: bytes) -> Future[bytes]:
        """A payload that was stored. Raises as `payloads.fetched` does."""
        return self._begin(payloads.fetched(payload, self.objects))

    def _begin(self, work: Coroutine[None, None, bytes]) -> Future[bytes]:
        if self._loop.is_closed():
            work.close()
            raise closed()
        return asyncio.run_coroutine_threadsafe(work, self._loop)
