"""Mailboxes, bounded in number and in bytes, and the threads of concurrency groups, which take calls from them.

Messages of several subscriptions are put back into the order in which each of their senders sent them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from fluster_bus.core.delivery import Delivery

T = TypeVar("T")


class TokenQueue(Protocol):
    """Where takers wait for a token."""

    def put(self, item: bool, /) -> None: ...
    def get(self) -> bool: ...
    def get_nowait(self) -> bool: ...


class Mailbox(Generic[T]):
    """Filled by one thread, emptied by one or several. An item counts until `done` is called for it."""

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._waiting: OrderedDict[Hashable, T] = OrderedDict()
        self._tokens: TokenQueue = SimpleQueue[bool]()  # True for each that waits, False for each taker that is to end
        self._lock = threading.Lock()
        self._items = 0
        self._bytes = 0
        self._on_idle: Callable[[], object] | None = None

    def wait_in(self, queue: TokenQueue) -> None:
        """Have takers wait there, from before there are any."""
        self._tokens = queue

    def put(self, item: T, size: int, key: Hashable = None) -> bool:
        """Add an item; False when there is no room. One that is larger than all room is taken when it is alone.

        It can be removed by its `key`, unless another one waits under it.
        """
        # `with` takes twice as long. That it heeds a Ctrl-C in this moment matters in a main thread only, which is never here.
        self._lock.acquire()
        try:
            if self._items and (self._items >= self._max_items or self._bytes + size > self._max_bytes):
                return False
            self._items += 1
            self._bytes += size
            self._waiting[object() if key is None or key in self._waiting else key] = item
        finally:
            self._lock.release()
        self._tokens.put(True)
        return True

    def put_back(self, item: T) -> None:
        """Add an item that was taken and is not done: it counts already, and waits behind the others."""
        self._waiting[object()] = item
        self._tokens.put(True)

    def take(self) -> T | None:
        """The next item, waited for; None when the mailbox was closed."""
        while self._tokens.get():
            try:
                return self._waiting.popitem(last=False)[1]
            except KeyError:  # it was removed after its token was taken
                continue
        return None

    def remove(self, key: Hashable) -> T | None:
        """Take an item that waits, wherever it stands; None when none waits under that key."""
        item = self._waiting.pop(key, None)
        if item is not None:
            with contextlib.suppress(Empty):  # then a taker has it, and finds that there is nothing
                self._tokens.get_nowait()
        return item

    def done(self, size: int) -> None:
        """An item of that size was dealt with: there is room for others."""
        self._lock.acquire()
        self._items -= 1
        self._bytes -= size
        idle = self._items == 0
        self._lock.release()
        if idle and self._on_idle is not None:
            self._on_idle()

    def when_idle(self, callback: Callable[[], object]) -> None:
        """Have `callback` run, in whichever thread, once nothing waits and nothing is being done."""
        self._on_idle = callback
        with self._lock:
            idle = self._items == 0
        if idle:
            callback()

    def close(self, takers: int) -> list[T]:
        """Wake all who take with None; return what was still waiting."""
        left: list[T] = []
        while self._waiting:
            with contextlib.suppress(KeyError):
                left.append(self._waiting.popitem(last=False)[1])
        for _ in range(takers):
            self._tokens.put(False)
        return left

    def __len__(self) -> int:
        return self._items


class ConcurrencyGroup(Generic[T]):
    """A mailbox and the threads that empty it, `at_once` items at a time; one alone takes them in order.

    `run(item, group)` is called on one of the threads, and `done` once the item is dealt with, from any thread.
    `begin` is called on each of them first.
    A synchronous call keeps a thread, an asynchronous one only a slot.
    """

    def __init__(
        self,
        name: str,
        mailbox: Mailbox[T],
        run: Callable[[T, ConcurrencyGroup[T]], None],
        *,
        at_once: int,
        has_sync: bool,
        has_async: bool,
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        self.mailbox = mailbox
        self._run = run
        self._begin = begin
        # With asynchronous calls, threads alone do not bound how many there are at the same time.
        self._slots = threading.Semaphore(at_once) if has_async and at_once > 1 else None
        # To be called with the size of an item that was dealt with.
        self.done: Callable[[int], None] = mailbox.done if self._slots is None else self._done_in_slot
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True)
            for number in range(at_once if has_sync else 1)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def has_one_thread(self) -> bool:
        """True when one thread alone takes items, and deals with one before it takes the next."""
        return len(self._threads) == 1 and self._slots is None

    @property
    def frees_its_thread(self) -> bool:
        """True when an asynchronous call is not waited for on its thread."""
        return self._slots is not None

    def _serve(self) -> None:
        self._begin()
        while True:
            if self._slots is not None:
                self._slots.acquire()
            item = self.mailbox.take()
            if item is None:
                return
            self._run(item, self)
            del item  # it may hold the last reference to an object whose release is waited for

    def _done_in_slot(self, size: int) -> None:
        """An item of that size was dealt with."""
        self.mailbox.done(size)
        if self._slots is not None:
            self._slots.release()

    def stand_aside(self) -> None:
        """An item was put back, to be run again later; others may run meanwhile."""
        if self._slots is not None:
            self._slots.release()

    async def wait_idle(self) -> None:
        """Return once nothing waits and nothing runs."""
        loop = asyncio.get_running_loop()
        idle = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # what ran outlived the loop, and with it those that waited
                loop.call_soon_threadsafe(idle.set)

        self.mailbox.when_idle(tell)
        await idle.wait()

    def close(self) -> list[T]:
        """End the threads as they get free; give back what was still waiting."""
        return self.mailbox.close(len(self._threads))


class DeliveryOrder:
    """Hands messages on, those that arrived together in the order of their numbers.

    Calls to one member and broadcasts arrive on different subscriptions, whose callbacks do not run in the order in
    which the messages came. The client numbers its messages in their reply subjects. All that was read from the
    socket before a message has reached its callback by the time that what this one scheduled is run (ready callbacks
    are run first in, first out), so sorting what came together is enough.
    """

    def __init__(self, accept: Callable[[Delivery], None], loop: asyncio.AbstractEventLoop) -> None:
        self._accept = accept
        self._loop = loop
        self._arrived: list[Delivery] = []
        self._mixed = False

    def on_call(self, delivery: Delivery) -> None:
        self._arrived.append(delivery)
        if len(self._arrived) == 1:
            self._loop.call_soon(self._hand_on)

    def on_broadcast(self, delivery: Delivery) -> None:
        self._mixed = True
        self.on_call(delivery)

    def _hand_on(self) -> None:
        arrived, self._arrived = self._arrived, []
        if self._mixed:
            self._mixed = False
            arrived.sort(key=_position)
        for delivery in arrived:
            self._accept(delivery)


def _position(delivery: Delivery) -> tuple[str, int]:
    inbox, _, number = delivery.reply.rpartition(".")
    return (inbox, int(number)) if number.isascii() and number.isdigit() else (delivery.reply, 0)
