"""The future of a call: its result once the actor has answered."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, Generic, NoReturn, TypeVar

from fluster.actors.protocol.failures import decode_failure
from fluster.actors.results.lazy_future import LazyFuture, state_lock
from fluster.actors.results.loop_calls import is_running
from fluster.cluster.jobs.arguments import check_patience
from fluster.errors import ActorTimeoutError
from fluster.remote_errors.kindred_errors import shave
from fluster_bus.payloads import payloads
from fluster_bus.running.blocked_waits import wait_for_future

T = TypeVar("T")


class ActorFuture(LazyFuture[T]):
    """The result of a call: wait for it with `result(timeout)`, or await it.

    When `result` runs into its timeout, the call goes on, and `result` may be asked again. A task that is cancelled
    while it awaits the future cancels the call.
    """

    _payload: Any = None  # of an answer that was not read yet
    _sent: object = None  # the Call, while it is out

    def __init__(  # the base's has nothing to do
        self,
        call: str,
        loop: asyncio.AbstractEventLoop | None = None,
        withdraw: Callable[[Any], None] | None = None,
    ) -> None:
        self._call = call  # calculator.add
        self._loop = loop  # where answers arrive: to block there would last forever
        self._withdraw = withdraw  # takes a call back that was sent

    def __repr__(self) -> str:
        state = "running" if self.running() else "cancelled" if self.cancelled() else "done" if self.done() else "new"
        return f"<ActorFuture {self._call} {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} is a future, which means something here only: pass its result()")

    def begin_unseen(self, call: object) -> None:
        """As `begin`, for one that only the caller knows yet."""
        self._sent = call
        self._state = _RUNNING

    def begin(self, call: object) -> bool:
        """The call is about to be sent; False when it was cancelled before."""
        self._sent = call  # first, as it can be cancelled from here on
        return self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Wait for the call no more: True when it had not ended yet.

        Those that wait see CancelledError at once. One that was not sent never will be; one that was is taken out of
        the actor's mailbox, or, where it runs, told: an asynchronous method sees CancelledError, a synchronous one
        `ctx.cancelled`. So it may have run, or still run; its answer is dropped.
        """
        if super().cancel():
            return True
        with self._condition:
            if self._state != _RUNNING or self._withdraw is None:
                return False
            self._state = _CANCELLED
            self._condition.notify_all()
        self.set_running_or_notify_cancel()  # tells those who wait for several
        self._invoke_callbacks()  # type: ignore[attr-defined]  # private to concurrent.futures, as the states are
        sent, self._sent = self._sent, None
        self._withdraw(sent)
        return True

    def settle(self, ok: bool, payload: Any) -> None:
        """Take the reply, unless it is over. It is read by the thread that asks for it: its classes may be slow to import."""
        if ok:
            with state_lock:
                if self._made is None and self._state == _RUNNING:  # as most: no thread waits yet
                    self._payload, self._result, self._sent = payload, _UNREAD, None
                    self._state = _FINISHED
                    return
        if self.done():  # it was taken back, or ran into its timeout
            return
        self._payload = payload
        if ok:
            self.set_result(_UNREAD)
        else:
            self.set_exception(_Unread())

    def set_result(self, result: T) -> None:
        self._sent = None
        try:
            super().set_result(result)
        except concurrent.futures.InvalidStateError:
            if not self.cancelled():  # at this very moment
                raise

    def set_exception(self, exception: BaseException | None) -> None:
        self._sent = None
        try:
            super().set_exception(exception)
        except concurrent.futures.InvalidStateError:
            if not self.cancelled():
                raise

    def _wait(self, timeout: float | None) -> None:
        if self.done():
            return
        if self._loop is not None and is_running(self._loop):
            raise RuntimeError(f"{self._call} is answered on this very event loop: `await` the future instead")
        if not wait_for_future(self, timeout):
            raise ActorTimeoutError(
                f"{self._call} has not answered after {timeout:g} s; it goes on, and result() may be asked again"
            )

    def result(self, timeout: float | None = None) -> T:
        """What the method returned; what it raised is raised.

        Raises ActorTimeoutError (a TimeoutError) after `timeout` seconds, and CancelledError.
        """
        if timeout is not None or self._state != _FINISHED:
            self._wait(check_patience(timeout))
        if self._payload is not None:
            self._read()
        if self._exception is None and self._state == _FINISHED:
            value: T = self._result
            return value
        try:
            return super().result(0)
        except BaseException as error:
            shave(error)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the method raised, None if it returned. Raises as `result` does."""
        self._wait(check_patience(timeout))
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

    _value_of: Callable[[Any], Any] = staticmethod(payloads.decode)

    def _error_of(self, payload: Any) -> BaseException:
        return decode_failure(payload)

    def __await__(self) -> Generator[object, None, T]:
        return asyncio.wrap_future(self).__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        """The items of a call to a generator: `async for item in pool.call().numbers()`."""
        return _FutureItems(self)


def result_of(future: ActorFuture[T]) -> T:
    """The result, for one who alone has the future: interrupted, it is cancelled."""
    try:
        return future.result()
    except BaseException:
        future.cancel()  # one that has ended is left as it is
        raise


class _FutureItems(AsyncIterator[T], Generic[T]):
    """The items of a stream whose call is still out."""

    def __init__(self, future: ActorFuture[Any]) -> None:
        self._future: ActorFuture[Any] | None = future
        self._stream: AsyncIterator[T] | None = None

    async def __anext__(self) -> T:
        if self._stream is None:
            assert self._future is not None  # noqa: S101 - one or the other is there
            stream = await self._future
            if not isinstance(stream, AsyncIterator):
                raise TypeError(f"{self._future!r} is not a stream, as its method is not a generator: `await` it")
            self._stream, self._future = stream, None
        return await anext(self._stream)


class _Unread(Exception):  # noqa: N818 - stands in for an exception that has not been read yet
    pass


_UNREAD: Any = object()
_RUNNING, _CANCELLED, _FINISHED = "RUNNING", "CANCELLED", "FINISHED"  # as concurrent.futures spells them
_reading = threading.Lock()  # held for moments only, never while user code runs
