"""A thread with an event loop, and methods that block on what runs there."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from typing import ParamSpec, TypeVar

from fluster.errors import ForkedError
from fluster.remote_errors.kindred_errors import shave
from fluster_bus.core.errors import ClosedError
from fluster_bus.core.lazy_imports import import_later
from fluster_bus.running.blocked_waits import wait_for_future
from fluster_bus.running.event_loops import HAS_UVLOOP, loop_factory

# What a loop and its threads bring along.
import_later(*(("uvloop",) if HAS_UVLOOP else ()), "concurrent.futures.thread")

T = TypeVar("T")
P = ParamSpec("P")
AsyncT_contra = TypeVar("AsyncT_contra", contravariant=True)
AsyncT = TypeVar("AsyncT")


class Portal:
    """A background thread with its own event loop (uvloop where there is one)."""

    def __init__(self, name: str = "fluster") -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=_run, args=(started, self._stopping), name=name, daemon=True)
        self._thread.start()
        self.loop: asyncio.AbstractEventLoop = started.result()
        self._closed = False
        self._last_call = threading.RLock()  # what is given to the loop comes before the word that it is to stop
        self._pid = os.getpid()

    def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """What `await function(*args)` gives on the loop. Ctrl-C here cancels it there.

        Raises ClosedError after `close`, and when that comes before there is an answer, ForkedError, and RuntimeError
        on the loop's own thread.
        """
        self.check_process()
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError(
                "a blocking method was called on the thread of its cluster's own event loop, as callbacks of futures "
                "are, and "
                "would wait for itself for ever: await the asynchronous API there (cluster.asynchronous), or call it "
                "in "
                "another thread (loop.run_in_executor)"
            )
        with self._last_call:
            if self._closed:
                raise _closed()
            future = asyncio.run_coroutine_threadsafe(_awaited(function, args), self.loop)
        try:
            wait_for_future(future)
            return future.result()
        except CancelledError as error:
            if not self._closed:
                raise
            raise _closed() from error
        except BaseException as error:
            future.cancel()
            shave(error)
            raise

    @property
    def closed(self) -> bool:
        return self._closed

    def check_process(self) -> None:
        """Raise ForkedError in a child, where the thread is not: waiting for it would never end."""
        if os.getpid() != self._pid:
            raise forked()

    def close(self) -> None:
        """Cancel what runs on the loop, and stop it and the thread when that has ended."""
        with self._last_call:
            if self._closed:
                return
            self._closed = True
            self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()


def forked() -> ForkedError:
    """The error for the use in a child of what was made before the fork."""
    return ForkedError(
        "this cluster's connection belongs to the process that was forked: make one here, with Cluster(address), or "
        "take "
        "current_cluster(); start processes with multiprocessing's 'spawn' to be sure that nothing is taken along"
    )


def _closed() -> ClosedError:
    return ClosedError("this cluster object was closed: make another, with Cluster(address)")


async def _awaited(function: Callable[..., Awaitable[T]], args: tuple[object, ...]) -> T:
    return await function(*args)


def _run(started: Future[asyncio.AbstractEventLoop], stopping: asyncio.Event) -> None:
    async def serve() -> None:
        started.set_result(asyncio.get_running_loop())
        await stopping.wait()

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve())
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)
