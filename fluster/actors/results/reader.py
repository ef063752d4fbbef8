"""The caller's end of a stream: takes items as they come, and tells the actor how far they are read."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, NoReturn, Self, TypeVar

from fluster.actors.protocol.failures import decode_failure
from fluster.actors.protocol.flow_control import Read, Window
from fluster.actors.results.loop_calls import closed, is_running, setter
from fluster.errors import ActorTimeoutError, ConnectionLostError
from fluster_bus.payloads import payloads
from fluster_bus.running.blocked_waits import wait_for_future, wait_seeing_signals
from fluster_bus.running.coroutines import wait_set

T = TypeVar("T")


class _EndOfStream(Exception):  # noqa: N818 - no error; a StopIteration cannot pass through a coroutine
    pass


class ItemsTicket(ABC):
    """What takes the items of a call that is a stream."""

    progress: Read  # which is reported to the actor

    @abstractmethod
    def take(self, first: int, items: list[bytes]) -> bool:
        """Items have arrived, of which the first has that number; False when they are of no use, and the call is withdrawn."""


class StreamReader(ItemsTicket):
    """What has arrived of a stream; stands in the place of its call's future from the moment it is opened.

    `on_read` and `withdraw` tell the actor, by way of the client's connection, and may be called by any thread.
    """

    def __init__(
        self,
        call: str,
        window: Window,
        *,
        timeout_s: float | None,
        loop: asyncio.AbstractEventLoop,
        on_read: Callable[[], None],
        withdraw: Callable[[], None],
        fetch: Callable[[bytes], concurrent.futures.Future[bytes]],
    ) -> None:
        self.fetch = fetch  # an item that was stored
        self.call = call
        self.timeout_s = timeout_s
        self.loop = loop  # where items arrive
        self.progress = Read(window)
        self.on_read = on_read
        self._withdraw = withdraw
        self._lock = threading.RLock()  # the collector of garbage may close it in the middle of anything
        self._arrived: deque[list[bytes]] = deque()
        self._count = 0  # items that have arrived
        self._ended = False
        self._outcome: bytes | BaseException | None = None  # a failure at the actor, or one that was found out here
        self._wake: Callable[[], object] | None = None

    # ---- on the loop of the connection ------------------------------------------------------------------

    def take(self, first: int, items: list[bytes]) -> bool:
        """Items have arrived; False when some before them have not, which ends the stream."""
        if first != self._count:
            self._end(ConnectionLostError(f"{self.call}: items {self._count} to {first - 1} were lost on their way"))
            return False
        self._count += len(items)
        with self._lock:
            if not self._ended:
                self._arrived.append(items)
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()
        return True

    def begin(self, _call: object) -> bool:
        return True

    def done(self) -> bool:
        return self._ended

    def cancelled(self) -> bool:
        return self._ended

    def cancel(self) -> bool:
        was_open = not self._ended
        self.close()
        return was_open

    def settle(self, ok: bool, payload: bytes) -> None:
        self._end(None if ok else payload)

    def set_exception(self, exception: BaseException) -> None:
        self._end(exception)

    def _end(self, outcome: bytes | BaseException | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._outcome = outcome
            self.on_read = self._withdraw = _nothing  # they hold on to the call, and it to this
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    # ---- by the reader ----------------------------------------------------------------------------------

    def next_items(self, wake: Callable[[], object] | None) -> list[bytes] | None:
        """What has arrived; None when nothing has yet, and then `wake` runs as soon as it may be different.

        Raises _EndOfStream at the end, or what ended the stream.
        """
        with self._lock:
            if self._arrived:
                return self._arrived.popleft()
            if not self._ended:
                self._wake = wake
                return None
            outcome, self._outcome = self._outcome, None
        if outcome is None:
            raise _EndOfStream
        raise outcome if isinstance(outcome, BaseException) else decode_failure(outcome)

    def check_loop(self) -> None:
        """Raise RuntimeError where waiting would hold up what is waited for."""
        if is_running(self.loop):
            raise RuntimeError(f"the items of {self.call} arrive on this very event loop: read it with `async for`")

    def close(self) -> None:
        """Want no more. What has arrived is dropped, and the actor's generator closed. By any thread, at any moment."""
        with self._lock:
            self._arrived.clear()
            self._outcome = None
            withdraw = self._withdraw
            self._end(None)
        withdraw()

    def late(self) -> ActorTimeoutError:
        self.close()
        return ActorTimeoutError(f"{self.call}: no further item within {self.timeout_s:g} s; the stream was closed")


class ActorStream(Generic[T]):
    """What a generator method of an actor yields: read it with `for`, or `async for`, one reader at a time.

    Its generator is at most a window ahead. It is closed at the actor when this is closed, left as a `with` block, or
    no longer referred to. Beside what the generator raises, reading raises ActorDiedError and ConnectionLostError
    as soon as it is known that nothing more will come, and ActorTimeoutError when an item does not come within the
    call's timeout, which closes the stream.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._items: deque[bytes] = deque()  # that arrived together

    def __repr__(self) -> str:
        return f"<ActorStream {self._reader.call} {'ended' if self._reader.done() else 'open'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} is a stream, which has one reader only: pass what is read of it, or a handle of its actor"
        )

    # ---- blocking ---------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if not self._items:
            try:
                self._items = deque(self._next_items())
            except _EndOfStream:
                raise StopIteration from None
        if payloads.is_stored(self._items[0]):
            self._items[0] = self._fetched(self._items[0])
        return self._read()

    def _next_items(self) -> list[bytes]:
        reader = self._reader
        items = reader.next_items(None)
        if items is not None:
            return items
        reader.check_loop()
        arrived = threading.Event()
        items = reader.next_items(arrived.set)
        if items is None:
            if not wait_seeing_signals(arrived.wait, reader.timeout_s):
                raise reader.late()
            items = reader.next_items(None)
            assert items is not None  # noqa: S101 - it is woken when something has arrived, or by the end
        return items

    def _fetched(self, data: bytes) -> bytes:
        reader = self._reader
        reader.check_loop()
        fetched = reader.fetch(data)
        wait_for_future(fetched, reader.timeout_s)
        return self._outcome_of(fetched)

    def close(self) -> None:
        """Read no more: the generator at the actor is closed. Nothing happens the second time, or after the end."""
        self._items.clear()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._reader.close()

    # ---- awaited ----------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if not self._items:
            try:
                self._items = deque(await self._await_items())
            except _EndOfStream:
                raise StopAsyncIteration from None
        if payloads.is_stored(self._items[0]):
            self._items[0] = await self._await_fetched(self._items[0])
        return self._read()

    async def _await_items(self) -> list[bytes]:
        reader = self._reader
        arrived = asyncio.Event()
        items = reader.next_items(setter(arrived))
        if items is None:
            try:
                async with asyncio.timeout(reader.timeout_s):
                    await arrived.wait()
            except TimeoutError as error:
                raise reader.late() from error
            items = reader.next_items(None)
            assert items is not None  # noqa: S101 - it is woken when something has arrived, or by the end
        return items

    async def _await_fetched(self, data: bytes) -> bytes:
        fetched, arrived = self._reader.fetch(data), asyncio.Event()
        wake = setter(arrived)
        fetched.add_done_callback(lambda _done: wake())
        await wait_set(arrived, self._reader.timeout_s)
        return self._outcome_of(fetched)

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    # ---- either -----------------------------------------------------------------------------------------

    def _outcome_of(self, fetched: concurrent.futures.Future[bytes]) -> bytes:
        """The item. When it cannot be had, its size is not known, by which the actor learns how far it is read: it ends."""
        if not fetched.done():
            fetched.cancel()
            raise self._reader.late()
        if fetched.cancelled():
            raise closed()
        try:
            return fetched.result()
        except Exception:
            self.close()
            raise

    def _read(self) -> T:
        data = self._items.popleft()
        if self._reader.progress.read(payloads.size_of(data)):
            self._reader.on_read()
        item: T = payloads.decode(data)
        return item


def _nothing() -> None:
    pass
