"""Replies on their way from an actor: those that are ready at the same time travel together."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard

from fluster.actors.protocol import frames
from fluster.actors.protocol.failures import encode_failure
from fluster.actors.protocol.frames import WireReply
from fluster.actors.results.loop_calls import LoopWake
from fluster.actors.server.producer import Producer
from fluster_bus.connection.carrier import Carrier
from fluster_bus.core.errors import BusError, ClosedError, DisconnectedError
from fluster_bus.payloads import payloads
from fluster_bus.storage.objects import ObjectStore

log = logging.getLogger(__name__)

_PAUSE_S = 0.001
_FRAME_OVERHEAD = 4096  # of a reply around its payload, amply


@dataclass(slots=True)
class Reply:
    """One reply of the actor at `endpoint_id`; one without is JSON, and is sent as it stands."""

    subject: str
    endpoint_id: str
    index: int  # of the call in its message
    ok: int  # True, False, or what else frames.py lists
    payload: Any
    headers: dict[str, str] | None = None


Message = tuple[str, bytes, dict[str, str] | None]  # subject, data, headers


class ReplySink(Protocol):
    """Where an actor puts its replies."""

    def add(self, reply: Reply | Producer) -> None: ...


class Outbox:
    """Takes replies from any thread and publishes them. While the connection is lost it keeps them."""

    def __init__(self, bus: Carrier, loop: asyncio.AbstractEventLoop, store: ObjectStore) -> None:
        self._bus = bus
        self._store = store
        self._storing: set[asyncio.Task[None]] = set()
        self.max_payload = bus.max_payload - _FRAME_OVERHEAD
        self._ready: deque[Reply | Producer] = deque()
        self._loop = loop
        self._wake = LoopWake(loop)
        self._empty = asyncio.Event()
        self._empty.set()
        self._lock = threading.Lock()

    def add(self, reply: Reply | Producer) -> None:
        """Send a reply, or what a stream has ready when it is sent."""
        self._ready.append(reply)
        if not self._wake.is_coming:
            self._wake.wake_soon()
            if self._loop.is_closed():
                log.info("the connection was closed before %s was answered", reply.subject)

    async def run(self) -> None:
        """Publish what is ready, until cancelled or until the connection is closed."""
        try:
            while True:
                self._empty.set()
                await self._wake.wait()
                self._empty.clear()
                await self._publish_ready()
        except ClosedError:
            log.info("the connection was closed before all was answered")
        finally:
            self._ready.clear()  # they are no longer taken
            self._empty.set()

    async def wait_empty(self) -> None:
        """Return when all replies so far are with the server."""
        if self._ready:  # the loop is woken for them, but may not have come to it
            self._empty.clear()
            self._wake.set()
        await self._empty.wait()
        if self._storing:
            await asyncio.wait(self._storing)
        await self._bus.flush()

    async def _publish_ready(self) -> None:
        while self._ready:
            ready, self._ready = self._ready, deque()
            for reply in ready:
                if self.must_be_stored(reply):
                    storing = asyncio.create_task(self._publish_stored(reply), name=f"result for {reply.subject}")
                    self._storing.add(storing)
                    storing.add_done_callback(self._storing.discard)
            for subject, data, headers in joined([each for each in ready if not self.must_be_stored(each)]):
                await self._publish(subject, data, headers)

    def must_be_stored(self, reply: Reply | Producer) -> TypeGuard[Reply]:
        """True for a result that no message can carry."""
        return isinstance(reply, Reply) and bool(reply.endpoint_id) and len(reply.payload) > self.max_payload

    async def _publish_stored(self, reply: Reply) -> None:
        """A result that no message can carry goes to the object store first; others do not wait for it."""
        try:
            reply = replace(reply, payload=await payloads.stored(reply.payload, self._store))
        except Exception as error:
            error.add_note(f"the result has {len(reply.payload):,} bytes: return less, or the path of a file")
            reply = replace(reply, ok=False, payload=encode_failure(error))
        wire = (reply.index, reply.ok, reply.payload)
        await self._publish(reply.subject, frames.encode_replies(reply.endpoint_id, [wire]))

    async def _publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        while True:
            try:
                await self._bus.publish(subject, data, headers=headers)
                return
            except DisconnectedError:
                # The loss is found here a moment before the bus notices it; without a pause it never would be.
                await asyncio.sleep(_PAUSE_S)
                await self._bus.wait_connected()
            except ClosedError:
                raise
            except BusError as error:
                log.warning("a reply to %s was lost: %s", subject, error)
                return


def joined(ready: Sequence[Reply | Producer]) -> Iterable[Message]:
    """Messages, each with its subject and headers, that carry these replies."""
    if len(ready) == 1 and isinstance(ready[0], Reply):
        reply = ready[0]
        if not reply.endpoint_id:
            return ((reply.subject, reply.payload, reply.headers),)
        together = [(reply.index, reply.ok, reply.payload)]
        return ((reply.subject, frames.encode_replies(reply.endpoint_id, together), None),)
    return _joined(ready)


def _joined(ready: Sequence[Reply | Producer]) -> Iterator[Message]:
    together: dict[tuple[str, str], list[WireReply]] = {}  # {(subject, endpoint id): replies}
    sizes: dict[tuple[str, str], list[int]] = {}
    for reply in ready:
        if isinstance(reply, Reply) and not reply.endpoint_id:
            yield reply.subject, reply.payload, reply.headers
            continue
        key = reply.subject, reply.endpoint_id
        if key not in together:
            together[key], sizes[key] = [], []
        if isinstance(reply, Producer):
            for size, items in reply.take():
                together[key].append((reply.index, reply.ok, items))
                sizes[key].append(size)
        else:
            together[key].append((reply.index, reply.ok, reply.payload))
            sizes[key].append(len(reply.payload))
    for key, replies in together.items():
        for batch in frames.batches(replies, sizes[key]):
            yield key[0], frames.encode_replies(key[1], batch), None
