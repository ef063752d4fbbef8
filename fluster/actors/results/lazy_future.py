"""A future that costs little as long as no thread waits for it."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

_OVER = (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED)
# Held where a future without a condition changes its state, and where one gets its condition: so a thread that
# has the condition knows that the state does not change without it.
state_lock = threading.Lock()


class LazyFuture(concurrent.futures.Future[T]):
    """As its base, with a condition made by the first who waits or adds a callback.

    To make a condition takes most of the time that it takes to make a future, and many are answered before a thread waits.
    """

    # Of each, until it is otherwise.
    _made: threading.Condition | None = None
    _state: str = PENDING
    _result: Any = None
    _exception: BaseException | None = None

    def __init__(self) -> None:
        """Instead of the base's, which makes the condition: there is nothing to do, and who derives from it may leave it out."""

    def _make_condition(self) -> threading.Condition:
        if self._made is None:
            with state_lock:
                if self._made is None:
                    self._waiters: list[Any] = []
                    self._done_callbacks: list[Callable[[object], object]] = []
                    self._made = threading.Condition()
        return self._made

    if not TYPE_CHECKING:  # to those who check types it stays the attribute that the base's functions ask for
        _condition = property(_make_condition)

    def done(self) -> bool:
        return self._state in _OVER

    def running(self) -> bool:
        return self._state == RUNNING

    def cancelled(self) -> bool:
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED)

    def result(self, timeout: float | None = None) -> T:
        if self._state != FINISHED:
            return super().result(timeout)
        if self._exception is None:
            value: T = self._result
            return value
        try:
            raise self._exception
        finally:
            self = None  # type: ignore[assignment]  # noqa: PLW0642 - else the traceback would keep the future, and that it

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._exception if self._state == FINISHED else super().exception(timeout)

    def set_running_or_notify_cancel(self) -> bool:
        with state_lock:
            if self._made is None and self._state == PENDING:
                self._state = RUNNING
                return True
        return super().set_running_or_notify_cancel()

    def set_result(self, result: T) -> None:
        if not self._end_unseen(result, None):
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        if not self._end_unseen(None, exception):
            super().set_exception(exception)

    def _end_unseen(self, result: object, exception: BaseException | None) -> bool:
        """End it as long as its condition was not asked for; False when it has one, or is over."""
        with state_lock:
            if self._made is not None or self._state in _OVER:
                return False
            self._result, self._exception = result, exception
            self._state = FINISHED  # last: a thread that sees it takes the others
            return True

    def cancel_at_once(self) -> None:
        """Cancel it, and tell all who wait: nothing else would begin it. Nothing happens the second time."""
        if self.cancel() and self._state == CANCELLED:
            super().set_running_or_notify_cancel()
