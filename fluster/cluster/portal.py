"""A thread with an event loop, and methods that block on what runs there."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

T = TypeVar("T")
P = ParamSpec("P")
AsyncT_contra = TypeVar("AsyncT_contra", contravariant=True)
AsyncT = TypeVar("AsyncT")


class Portal:
    """A background thread with its own event loop (uvloop where there is one)."""

    def __init__(self, name: str = "fluster") -> None:
        options = {"use_uvloop": sys.platform != "win32"}
        self._manager: AbstractContextManager[BlockingPortal] = start_blocking_portal(
            "asyncio", backend_options=options, name=name
        )
        self._portal = self._manager.__enter__()
        self.loop: asyncio.AbstractEventLoop = self._portal.call(asyncio.get_running_loop)
        self._closed = False

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """What `await function(*args)` gives on the loop. Ctrl-C here cancels it there."""
        future = self._portal.start_task_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop, once what runs on it has ended, and the thread."""
        if not self._closed:
            self._closed = True
            self._manager.__exit__(None, None, None)


class OnPortal(Protocol[AsyncT]):  # type: ignore[misc]  # invariant on purpose: the attribute can be read only
    """An object whose asynchronous twin lives on a portal's loop."""

    @property
    def portal(self) -> Portal: ...

    @property
    def asynchronous(self) -> AsyncT: ...


def blocking(method: Callable[Concatenate[AsyncT, P], Awaitable[T]]) -> Callable[Concatenate[OnPortal[AsyncT], P], T]:
    """The blocking form of an asynchronous twin's method, with its signature and docstring."""

    def call(self: OnPortal[AsyncT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.portal.run(functools.partial(method, self.asynchronous, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


_END = object()


def blocking_iterator(
    method: Callable[Concatenate[AsyncT, P], AsyncIterator[T]],
) -> Callable[Concatenate[OnPortal[AsyncT], P], Iterator[T]]:
    """The blocking form of a method that is an asynchronous generator."""

    def call(self: OnPortal[AsyncT], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items: Any = method(self.asynchronous, *args, **kwargs)
        try:
            while (item := self.portal.run(anext, items, _END)) is not _END:
                yield item
        finally:
            self.portal.run(items.aclose)

    functools.update_wrapper(call, method)
    return call
