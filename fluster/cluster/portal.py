"""A thread with an event loop, and methods that block on what runs there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from fluster.errors import ForkedError
from fluster_bus.errors import ClosedError

_WITH_UVLOOP = sys.platform != "win32"
# What a loop, its threads and the name of the first server bring along.
_BACKEND = (
    *(("uvloop",) if _WITH_UVLOOP else ()),
    *("anyio._backends._asyncio", "concurrent.futures.thread", "encodings.idna"),
)

T = TypeVar("T")
P = ParamSpec("P")
AsyncT_contra = TypeVar("AsyncT_contra", contravariant=True)
AsyncT = TypeVar("AsyncT")


def import_backend() -> None:
    """Have in memory what the first portal would else import: for whoever has to wait anyway, or is about to be copied."""
    for name in _BACKEND:
        importlib.import_module(name)


class Portal:
    """A background thread with its own event loop (uvloop where there is one)."""

    def __init__(self, name: str = "fluster") -> None:
        # Not anyio's start_blocking_portal: in a forked child its context manager would be closed at the end of the
        # interpreter, and wait for a thread that stayed behind.
        started: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop]] = Future()
        self._thread = threading.Thread(target=_run, args=(started,), name=name, daemon=True)
        self._thread.start()
        self._portal, self.loop = started.result()
        self._closed = False
        self._pid = os.getpid()

    def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """What `await function(*args)` gives on the loop. Ctrl-C here cancels it there.

        Raises ClosedError after `close`, and when that comes before there is an answer, and ForkedError.
        """
        self.check_process()
        try:
            future = self._portal.start_task_soon(function, *args)
        except RuntimeError as error:  # anyio's word for it
            if not self._closed:
                raise
            raise _closed() from error
        try:
            return future.result()
        except CancelledError as error:
            if not self._closed:
                raise
            raise _closed() from error
        except BaseException:
            future.cancel()
            raise

    def check_process(self) -> None:
        """Raise ForkedError in a child, where the thread is not: waiting for it would never end."""
        if os.getpid() != self._pid:
            raise forked()

    def close(self) -> None:
        """Stop the loop, once what runs on it has ended, and the thread."""
        if not self._closed:
            self._closed = True
            # Ctrl-C at the wrong moment leaves something behind that nobody waits for, and that may never end.
            self._portal.start_task_soon(self._portal.stop, True)
            self._thread.join()


def forked() -> ForkedError:
    """What somebody is told who uses in a child what was made before the fork."""
    return ForkedError(
        "this cluster's connection belongs to the process that was forked: make one here, with Cluster(address), or take "
        "current_cluster(); start processes with multiprocessing's 'spawn' to be sure that nothing is taken along"
    )


def _closed() -> ClosedError:
    return ClosedError("this cluster object was closed: make another, with Cluster(address)")


def _run(started: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop]]) -> None:
    async def serve() -> None:
        async with BlockingPortal() as portal:
            started.set_result((portal, asyncio.get_running_loop()))
            await portal.sleep_until_stopped()

    try:
        anyio.run(serve, backend_options={"use_uvloop": _WITH_UVLOOP})
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


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


_END: Any = object()


class _Steps(Generic[T]):
    """An asynchronous generator, one step after the other. Lives on the portal's loop."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items: Any = items
        self._step: asyncio.Task[Any] | None = None

    async def next(self) -> T:
        self._step = asyncio.current_task()
        try:
            item: T = await anext(self._items, _END)
            return item
        finally:
            self._step = None

    async def close(self) -> None:
        """End the generator, also when Ctrl-C left a step without anybody who waits for it."""
        if self._step is not None:
            self._step.cancel()
            await asyncio.wait([self._step])
        await self._items.aclose()


def blocking_iterator(
    method: Callable[Concatenate[AsyncT, P], AsyncIterator[T]],
) -> Callable[Concatenate[OnPortal[AsyncT], P], Iterator[T]]:
    """The blocking form of a method that is an asynchronous generator."""

    def call(self: OnPortal[AsyncT], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        steps = _Steps(method(self.asynchronous, *args, **kwargs))
        try:
            while (item := self.portal.run(steps.next)) is not _END:
                yield item
        finally:
            with contextlib.suppress(ClosedError):  # what ran on its loop has ended with it
                self.portal.run(steps.close)

    functools.update_wrapper(call, method)
    return call
