"""The connection of an actor whose calls run on one thread: that thread reads it, runs what has come, and answers.

    its thread: read ──► accept ──► mailbox ──► run ──► answers ──► flush ──► read …

Nothing is handed from thread to thread while methods are short. While one takes long, the lane's keeper reads: it fills
the mailbox, sends the answers that are ready, and gives the reading back when the actor's thread has nothing to do.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from fluster.actors.protocol import frames
from fluster.actors.server.outbox import Outbox, Reply, joined
from fluster.actors.server.producer import Producer
from fluster_bus.access.address import BusAddress
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BusError, ClosedError, DisconnectedError
from fluster_bus.direct.lane import Lane
from fluster_bus.direct.waiting import Waker

T = TypeVar("T")

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_JOIN_FOR_S = 0.0005  # replies of methods that follow each other as fast as that travel together


class LaneQueue(Generic[T]):
    """A queue whose one taker reads the lane while there is nothing to take."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.before_waiting: Callable[[], object] = lambda: None
        self._items: SimpleQueue[T] = SimpleQueue()
        self.empty: Callable[[], bool] = self._items.empty
        self._waker = Waker()
        self.wake: Callable[[], None] = self._waker.wake  # has the taker look again
        self.taker: int | None = None  # the thread that takes

    def put(self, item: T) -> None:
        self._items.put(item)
        if threading.get_ident() != self.taker:
            self._waker.wake()

    def get_nowait(self) -> T:
        return self._items.get_nowait()

    def get(self) -> T:
        lane, items, wake = self._lane, self._items, self.wake
        while True:
            try:
                if not items.empty():
                    return items.get_nowait()
            except Empty:  # another thread took it away
                continue
            if lane.closed:
                return items.get()
            self.taker = threading.get_ident()
            self.before_waiting()
            if not lane.connected:
                self._waker.wait()
                continue
            try:  # to read, until there may be something to take
                has_turn = lane.turns.ask(wake)
                if not has_turn:
                    lane.wake()  # the keeper has it
                    if items.empty():
                        self._waker.wait()
                    has_turn = lane.turns.has(wake)
                if has_turn and items.empty():
                    lane.receive(beside=self._waker)
            finally:
                lane.leave(wake)


class LaneOutbox:
    """Takes replies from any thread. Those of the actor's own thread wait for each other for a moment."""

    def __init__(self, lane: Lane, otherwise: Outbox, queue: LaneQueue[bool]) -> None:
        self._lane = lane
        self._otherwise = otherwise  # for while the lane has no connection
        self._queue = queue  # whose taker is the actor's own thread
        self._sending = threading.Lock()  # what streams have ready must not overtake what they had before
        self._ready: deque[Reply | Producer] = deque()
        self._since = 0.0  # when the first of them was ready

    def add(self, reply: Reply | Producer) -> None:
        """Send a reply, or what a stream has ready when it is sent."""
        otherwise = self._otherwise
        if type(reply) is Reply and len(reply.payload) > otherwise.max_payload and otherwise.must_be_stored(reply):
            otherwise.add(reply)
            return
        ready, now = self._ready, time.monotonic()
        if not ready:
            self._since = now
        ready.append(reply)
        count = len(ready)  # 0 when it has been sent meanwhile
        if count >= frames.MAX_CALLS or now - self._since > _JOIN_FOR_S or threading.get_ident() != self._queue.taker:
            self.flush()
        elif count == 1 and self._lane.turns.holder is not None:
            self._lane.wake()  # the keeper sends it: the actor's thread may be at its next call for long
        elif count == 1 and not self._queue.empty():
            self._lane.attend()  # so that it takes the turn soon

    def flush(self) -> None:
        """Send what is ready."""
        if not self._ready:
            return
        with self._sending:
            for subject, data, headers in joined([self._ready.popleft() for _ in range(len(self._ready))]):
                try:
                    self._lane.publish(subject, data, headers=headers, flush=False)
                except (DisconnectedError, ClosedError):
                    self._otherwise.add(Reply(subject, "", 0, ok=True, payload=data, headers=headers))  # as it stands
                except BusError as error:
                    log.warning("a reply to %s was lost: %s", subject, error)
        self._lane.flush()


class ActorLane:
    """A lane for one actor. `on_lost` and `on_back` are called on the loop."""

    def __init__(
        self,
        address: BusAddress,
        name: str,
        otherwise: Outbox,
        *,
        on_lost: Callable[[], object],
        on_back: Callable[[], object],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost, self._on_back = on_lost, on_back
        self._lane = Lane(
            address, name, on_connect=self._on_connect, on_disconnect=self._on_disconnect, on_wake=self._flush
        )
        self.queue: LaneQueue[bool] = LaneQueue(self._lane)
        self.outbox = LaneOutbox(self._lane, otherwise, self.queue)
        self.queue.before_waiting = self.outbox.flush
        self._subscriptions: list[int] = []
        self._opened = False

    @property
    def connected(self) -> bool:
        return self._lane.connected

    async def open(self) -> None:
        """Connect. Raises BusError."""
        self._lane.start()
        try:
            await asyncio.to_thread(self._lane.wait_connected, _CONNECT_TIMEOUT_S)
        except BaseException:
            await self.close()
            raise
        self._opened = True

    async def subscribe(self, callback: Callable[[Delivery], object], *subjects: tuple[str, str]) -> None:
        """Have `callback` take what comes on these (subject, queue); they stand with the server on return."""
        self._subscriptions += [self._lane.subscribe(subject, callback, queue=queue) for subject, queue in subjects]
        await self.seen()

    async def drain(self) -> None:
        """Leave all subjects; what is on its way here has been taken on return."""
        await self._until(lambda then: self._lane.unsubscribe(self._subscriptions, then))

    async def wait_sent(self) -> None:
        """Return when all replies so far are with the server."""
        self.outbox.flush()
        await self.seen()

    async def close(self) -> None:
        self.outbox.flush()
        await asyncio.to_thread(self._lane.close)
        self.queue.wake()

    async def seen(self) -> None:
        """Return when the server has dealt with all that was sent, or the connection is lost."""
        await self._until(self._lane.when_seen)

    async def _until(self, begin: Callable[[Callable[[], object]], object]) -> None:
        done = asyncio.Event()
        begin(lambda: self._loop.call_soon_threadsafe(done.set))
        await done.wait()

    # ---- in any thread ----------------------------------------------------------------------------------

    def _flush(self) -> None:
        self.outbox.flush()

    def _on_connect(self) -> None:
        self.queue.wake()
        if self._opened:
            self._tell(self._on_back)

    def _on_disconnect(self) -> None:
        self._tell(self._on_lost)

    def _tell(self, callback: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.debug("the loop is closed, and the actor with it")
