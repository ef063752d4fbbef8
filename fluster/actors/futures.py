"""The answer of an actor, when it comes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Generator
from typing import Any, TypeVar

from fluster.actors.failures import decode_failure
from fluster.actors.lazy_future import LazyFuture
from fluster.errors import ActorTimeoutError
from fluster_bus import codec

T = TypeVar("T")


class ActorFuture(LazyFuture[T]):
    """The result of a call: wait for it with `result(timeout)`, or await it.

    `cancel()` takes a call back that has not been sent yet, and returns False for one that has. When `result`
    runs into its timeout, the call goes on, and `result` may be asked again.
    """

    def __init__(self, call: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__()
        self._call = call  # calculator.add
        self._loop = loop  # where answers arrive: whoever blocked there would wait for ever
        self._payload: Any = None  # of an answer that nobody has read yet

    def __repr__(self) -> str:
        state = "running" if self.running() else "cancelled" if self.cancelled() else "done" if self.done() else "new"
        return f"<ActorFuture {self._call} {state}>"

    def settle(self, ok: bool, payload: Any) -> None:
        """Take the reply. It is read by whoever asks for it: their classes may be slow to import."""
        self._payload = payload
        if ok:
            self.set_result(_UNREAD)
        else:
            self.set_exception(_Unread())

    def _wait(self, timeout: float | None) -> None:
        if self.done():
            return
        if self._loop is not None and is_running(self._loop):
            raise RuntimeError(f"{self._call} is answered on this very event loop: `await` the future instead")
        try:
            super().exception(timeout)
        except concurrent.futures.CancelledError:
            return  # the caller asks the base class, which raises it again
        except TimeoutError:
            if not self.done():
                raise ActorTimeoutError(
                    f"{self._call} has not answered after {timeout:g} s; it goes on, and result() may be asked again"
                ) from None

    def result(self, timeout: float | None = None) -> T:
        """What the method returned; what it raised is raised.

        Raises ActorTimeoutError (a TimeoutError) after `timeout` seconds, and CancelledError.
        """
        self._wait(timeout)
        if self._payload is not None:
            self._read()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the method raised, None if it returned. Raises as `result` does."""
        self._wait(timeout)
        if self._payload is not None:
            self._read()
        return super().exception(0)

    def _read(self) -> None:
        payload = self._payload
        if payload is None:
            return
        value, failure = None, None
        try:
            if self._exception is None:
                value = self._value_of(payload)
            else:
                failure = self._error_of(payload)
        except Exception as error:
            error.add_note(f"the answer of {self._call} has arrived, but cannot be read in this process")
            failure = error
        with _reading:  # several threads may have read it at the same time: all get what the first of them did
            if self._payload is not None:
                self._result, self._exception = value, failure
                self._payload = None

    def _value_of(self, payload: Any) -> Any:
        return codec.decode(payload)

    def _error_of(self, payload: Any) -> BaseException:
        return decode_failure(payload)

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()


class _Unread(Exception):  # noqa: N818 - stands in for an exception that has not been read yet
    pass


_UNREAD: Any = object()
_reading = threading.Lock()  # held for moments only, never while user code runs


def is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """True in the thread of `loop`, while it runs."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
