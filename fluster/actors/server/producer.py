"""The actor's end of a stream: runs a generator in bursts, as far as its reader has room, and keeps what is ready.

A burst ends when the generator does, or when its reader is a window behind. Then the actor is free for other calls,
and the stream is put back into the mailbox when the reader has caught up, or wants no more.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any, Protocol

from fluster.actors.definition.context import Cancellation
from fluster.actors.protocol import frames
from fluster.actors.protocol.flow_control import Produced, Window
from fluster_bus.payloads import payloads

log = logging.getLogger(__name__)

_BREATH = 64  # items of an asynchronous generator between which others may run on its loop

Items = Generator[object, None, object] | AsyncGenerator[object, None]


class StreamCall(Protocol):
    """The call that a stream answers."""

    @property
    def reply(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def method(self) -> str: ...
    @property
    def cancellation(self) -> Cancellation | None: ...


class Producer:
    """One stream. `encode` makes bytes of an item, and `store` what goes instead of them where no message can carry them.
    `announce` has the outbox come for them, and `resume` asks for another burst.
    """

    ok = frames.ITEMS  # as a reply it is one with items

    def __init__(
        self,
        items: Items,
        window: Window,
        *,
        call: StreamCall,
        endpoint_id: str,
        encode: Callable[[Any], bytes],
        store: Callable[[bytes], concurrent.futures.Future[bytes] | None],
        announce: Callable[[Producer], None],
        resume: Callable[[Producer], None],
        on_end: Callable[[Producer], None],
    ) -> None:
        self.endpoint_id = endpoint_id
        self.subject: str = call.reply
        self.index: int = call.index
        self.method: str = call.method
        self.error: BaseException | None = None  # with which it ended
        self._heard_of = True  # its reader, since this was last asked
        self._items = items
        self._produced = Produced(window)
        self.on_end = on_end
        self.processing_ns = 0
        self._cancellation = call.cancellation or Cancellation()
        self._encode, self._store = encode, store
        self._announce = announce
        self._resume = resume
        self._ready: deque[bytes] = deque()
        self._taken = 0
        self._announced = False
        self._lock = threading.Lock()
        self._parked = False
        self._async = _AsyncBursts(self) if isinstance(items, AsyncGenerator) else None
        self._cancellation.on_cancel(self._on_cancel)

    # ---- on the connection's loop -----------------------------------------------------------------------

    def take(self) -> Iterator[tuple[int, tuple[int, list[bytes]]]]:
        """What is ready, as (size, (number of the first, items)), in portions that one message may carry."""
        self._announced = False  # before looking: what gets ready from here on is announced again
        ready = [self._ready.popleft() for _ in range(len(self._ready))]
        for portion in frames.batches(ready, list(map(len, ready)), most=frames.MAX_ITEMS):
            yield sum(map(len, portion)), (self._taken, list(portion))
            self._taken += len(portion)

    def on_read(self, items: int, size: int) -> None:
        """The reader has read so much."""
        self._heard_of = True
        with self._lock:
            self._produced.on_read(items, size)
            resumes = self._parked and self._produced.has_room
            self._parked = self._parked and not resumes
        if resumes:
            self._resume(self)

    def was_heard_of(self) -> bool:
        """True when its reader told something since this was last asked."""
        heard_of, self._heard_of = self._heard_of, False
        return heard_of

    def _on_cancel(self) -> None:
        with self._lock:
            resumes, self._parked = self._parked, False
        if resumes:
            self._resume(self)
        elif self._async is not None:
            self._async.interrupt()

    def cancel(self) -> None:
        """The reader is gone."""
        self._cancellation.cancel()

    # ---- in a burst -------------------------------------------------------------------------------------

    @property
    def is_cancelled(self) -> bool:
        return self._cancellation.cancelled

    def run(self) -> bool:
        """A burst of a synchronous generator; True when it has ended."""
        generator = self._items
        assert isinstance(generator, Generator)  # noqa: S101 - others are run on a loop
        try:
            if not self.is_cancelled:
                for item in generator:
                    if not self._put(*self._carried(item)) and self._park():
                        return False  # and nothing else: the next burst may have begun
                    if self._cancellation.cancelled:
                        break
                else:
                    return True
            generator.close()
        except BaseException as error:
            self.error = error
            _close_after_error(generator)
        return True

    def run_on(self, loop: asyncio.AbstractEventLoop) -> concurrent.futures.Future[bool]:
        """A burst of an asynchronous generator; True when it has ended."""
        assert self._async is not None  # noqa: S101 - others are run by a thread
        return self._async.burst(loop)

    @property
    def is_async(self) -> bool:
        return self._async is not None

    def _carried(self, item: object) -> tuple[bytes, int]:
        """An item as it travels, and its size."""
        data = self._encode(item)
        stored = self._store(data)
        return (data if stored is None else stored.result()), payloads.size_of(data)

    async def _carried_later(self, item: object) -> tuple[bytes, int]:
        """As `_carried`, while others go on."""
        data = self._encode(item)
        stored = self._store(data)
        return (data if stored is None else await asyncio.wrap_future(stored)), payloads.size_of(data)

    def _put(self, data: bytes, size: int) -> bool:
        """Make an item ready; False when there is no room for the next."""
        self._ready.append(data)
        room = self._produced.send(size)
        if not self._announced:
            self._announced = True
            self._announce(self)
        return room

    def _park(self) -> bool:
        """True when the burst is over: `resume` will be called."""
        with self._lock:
            self._parked = not self._produced.has_room and not self.is_cancelled
            return self._parked


class _AsyncBursts:
    """One task runs the generator for all of its life, as what it awaits may hold on to its task."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._burst: concurrent.futures.Future[bool] = concurrent.futures.Future()
        self._begins = asyncio.Event()
        self._inside = False  # the generator's code

    def burst(self, loop: asyncio.AbstractEventLoop) -> concurrent.futures.Future[bool]:
        burst = self._burst = concurrent.futures.Future()
        self._loop = loop
        loop.call_soon_threadsafe(self._begin)
        return burst

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._produce())
        else:
            self._begins.set()

    def interrupt(self) -> None:
        loop = self._loop
        if loop is not None:  # else it has not begun, and looks before it does
            loop.call_soon_threadsafe(self._cancel_inside)

    def _cancel_inside(self) -> None:
        if self._inside and self._task is not None:
            self._task.cancel()

    async def _produce(self) -> None:
        producer = self._producer
        generator = producer._items  # noqa: SLF001 - a part of it
        assert isinstance(generator, AsyncGenerator)  # noqa: S101
        try:
            await self._read(generator)
        except BaseException as error:
            frame = error.__traceback__  # of this function; the sender of the error leaves out one frame of ours only
            producer.error = error.with_traceback(frame.tb_next if frame is not None else None)
            await _aclose_after_error(generator)
        finally:
            if not self._burst.done():  # else its loop is being closed
                self._burst.set_result(True)

    async def _read(self, generator: AsyncGenerator[Any, Any]) -> None:
        producer = self._producer
        count = 0
        self._inside = not producer.is_cancelled
        while self._inside:
            try:
                item = await anext(generator)
            except StopAsyncIteration:
                return
            finally:
                self._inside = False
            burst = self._burst  # of the time before the next one may begin
            if not producer._put(*await producer._carried_later(item)) and producer._park():  # noqa: SLF001
                burst.set_result(False)
                await self._begins.wait()
                self._begins.clear()
            count += 1
            if count % _BREATH == 0:
                await asyncio.sleep(0)
            self._inside = not producer.is_cancelled
        await generator.aclose()


def _close_after_error(generator: Generator[object, None, object]) -> None:
    """Where it was not the generator that failed, it has its `finally` to run."""
    try:
        generator.close()
    except BaseException as error:
        log.warning("a generator failed while it was closed", exc_info=error)


async def _aclose_after_error(generator: AsyncGenerator[object, None]) -> None:
    try:
        await generator.aclose()
    except BaseException as error:
        log.warning("a generator failed while it was closed", exc_info=error)
