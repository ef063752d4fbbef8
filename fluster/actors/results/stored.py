"""What no message can carry: to the object store and from there, for other threads than that of the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future

from fluster.actors.results.loop_calls import closed
from fluster_bus.payloads import payloads
from fluster_bus.storage.objects import ObjectStore


class StoredPayloads:
    """Those of one client. The futures are cancelled when its connection is closed. Raises ClosedError after that."""

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
