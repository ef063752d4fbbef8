"""Which of a task's pipes can be read, in the order in which they became so: all that two pipes tell of the order of writes to both."""

from __future__ import annotations

import select
import selectors
import sys
from collections.abc import Callable
from typing import Protocol


class ReadablePipes(Protocol):
    """Pipes of which a selector says that some can be read; `take` says which."""

    def add(self, fd: int) -> None:
        """Look at one more."""

    def remove(self, fd: int) -> None:
        """Look at it no more."""

    def take(self) -> list[int]:
        """Those that can be read now. Each is left out from then on until `again`."""

    def again(self, fd: int) -> None:
        """One that was taken has been read."""

    def close(self) -> None:
        """Look at none of them."""


class InOrder:
    """Of the kernel's queue, in which a pipe takes its place when it becomes readable. Linux only.

    Apart from the selector, where what was readable at the last look comes first.
    """

    def __init__(self, selector: selectors.BaseSelector, on_readable: Callable[[], object]) -> None:
        self._selector = selector
        self._once = select.EPOLLIN | select.EPOLLONESHOT
        self._queue = select.epoll()
        selector.register(self._queue, selectors.EVENT_READ, on_readable)

    def add(self, fd: int) -> None:
        self._queue.register(fd, self._once)

    def remove(self, fd: int) -> None:
        self._queue.unregister(fd)

    def take(self) -> list[int]:
        return [fd for fd, _ in self._queue.poll(0)]

    def again(self, fd: int) -> None:
        self._queue.modify(fd, self._once)

    def close(self) -> None:
        self._selector.unregister(self._queue)
        self._queue.close()


class AsFound:
    """Where there is no such queue: those that are readable at one look, as they were added."""

    def __init__(self, selector: selectors.BaseSelector, on_readable: Callable[[], object]) -> None:
        self._selector = selector
        self._on_readable = on_readable
        self._fds: list[int] = []

    def add(self, fd: int) -> None:
        self._fds.append(fd)
        self._selector.register(fd, selectors.EVENT_READ, self._on_readable)

    def remove(self, fd: int) -> None:
        self._fds.remove(fd)
        self._selector.unregister(fd)

    def take(self) -> list[int]:
        readable = set(select.select(self._fds, [], [], 0)[0]) if self._fds else set()
        return [fd for fd in self._fds if fd in readable]

    def again(self, fd: int) -> None:
        """The selector tells each time that there is more."""

    def close(self) -> None:
        for fd in tuple(self._fds):
            self.remove(fd)


def readable_pipes(selector: selectors.BaseSelector, on_readable: Callable[[], object]) -> ReadablePipes:
    """What this system has; `selector` calls `on_readable` when there is something to take."""
    return InOrder(selector, on_readable) if sys.platform.startswith("linux") else AsFound(selector, on_readable)
