"""The threads that run an actor's calls: as many at once as the calls' concurrency group allows."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from fluster.actors.server.mailbox import Mailbox

T = TypeVar("T")


class Lanes(Generic[T]):
    """A mailbox and the threads that empty it, `at_once` items at a time; one alone takes them in order.

    `run(item, lanes)` is called on one of the threads, and `done` once the item is dealt with, from any thread.
    `begin` is called on each of them first.
    A synchronous call keeps a thread, an asynchronous one only a slot.
    """

    def __init__(
        self,
        name: str,
        mailbox: Mailbox[T],
        run: Callable[[T, Lanes[T]], None],
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
            del item  # it may hold what somebody waits to be let go

    def _done_in_slot(self, size: int) -> None:
        """An item of that size was dealt with."""
        self.mailbox.done(size)
        if self._slots is not None:
            self._slots.release()

    def stand_aside(self) -> None:
        """An item was put back and takes another turn later; others may run meanwhile."""
        if self._slots is not None:
            self._slots.release()

    async def wait_idle(self) -> None:
        """Return once nothing waits and nothing runs."""
        loop = asyncio.get_running_loop()
        idle = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # what ran outlived the loop, and with it whoever waited
                loop.call_soon_threadsafe(idle.set)

        self.mailbox.when_idle(tell)
        await idle.wait()

    def close(self) -> list[T]:
        """End the threads as they get free; give back what was still waiting."""
        return self.mailbox.close(len(self._threads))
