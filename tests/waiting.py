"""Waiting for what announces itself by no event: polled, and reported in full when it does not come."""

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

import anyio

T = TypeVar("T")

_SHORTEST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05


class _Patience:
    """How long to pause before the next look, until the time is over; then an AssertionError that tells the state."""

    def __init__(
        self, condition: Callable[[], object], timeout_s: float, describe: Callable[[], object] | None
    ) -> None:
        self._condition = condition
        self._timeout_s = timeout_s
        self._describe = describe
        self._deadline = time.monotonic() + timeout_s
        self._pause_s = _SHORTEST_PAUSE_S

    def next_pause_s(self, value: object) -> float:
        if time.monotonic() >= self._deadline:
            name = getattr(self._condition, "__qualname__", repr(self._condition))
            state = f"it last was {value!r}" if self._describe is None else f"state: {self._describe()}"
            raise AssertionError(f"{name} did not come true in {self._timeout_s} s; {state}")
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s


def wait_until(condition: Callable[[], T], timeout_s: float = 60, describe: Callable[[], object] | None = None) -> T:
    """The first true value of `condition`.

    When none comes in time: an AssertionError with what `describe()` says, or else the last value.
    """
    patience = _Patience(condition, timeout_s, describe)
    while not (value := condition()):
        time.sleep(patience.next_pause_s(value))
    return value


@overload
async def wait_until_async(
    condition: Callable[[], Awaitable[T]], timeout_s: float = 60, describe: Callable[[], object] | None = None
) -> T: ...


@overload
async def wait_until_async(
    condition: Callable[[], T], timeout_s: float = 60, describe: Callable[[], object] | None = None
) -> T: ...


async def wait_until_async(
    condition: Callable[[], T | Awaitable[T]], timeout_s: float = 60, describe: Callable[[], object] | None = None
) -> T:
    """As `wait_until`, without holding up the event loop; `condition` may be a coroutine function."""
    patience = _Patience(condition, timeout_s, describe)
    while not (value := await _outcome(condition())):  # noqa: ASYNC110 - for what announces itself by no event
        await anyio.sleep(patience.next_pause_s(value))
    return value


async def _outcome(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value
