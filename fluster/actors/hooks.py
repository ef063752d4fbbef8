"""The methods of an actor that Fluster itself calls: when it starts, fails and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from inspect import iscoroutine
from typing import Any

from fluster.actors.cancellation import Cancellation

ON_START, ON_STOP, ON_FAILURE, ON_RESTORE = "on_start", "on_stop", "on_failure", "on_restore"
HOOKS = frozenset({ON_START, ON_STOP, ON_FAILURE, ON_RESTORE})


def run_hook(instance: object, name: str, *args: Any, loop: Callable[[], asyncio.AbstractEventLoop]) -> Any:
    """What the hook returns, None where the class has none. An asynchronous one is waited for, so not on `loop`."""
    hook = getattr(instance, name, None)
    result = hook(*args) if hook is not None else None
    if not iscoroutine(result):
        return result
    value, error = asyncio.run_coroutine_threadsafe(outcome_of(result), loop()).result()
    if error is not None:
        raise error
    return value


async def outcome_of(
    method: Coroutine[Any, Any, Any], cancellation: Cancellation | None = None
) -> tuple[Any, BaseException | None]:
    """What a coroutine returns or raises; never an exception, since some of them would end the loop."""
    try:
        if cancellation is not None:
            cancellation.on_cancel(_cancelling(asyncio.current_task()))
        return await method, None
    except BaseException as error:
        return None, error


def _cancelling(task: asyncio.Task[Any] | None) -> Callable[[], object]:
    assert task is not None  # noqa: S101 - asked for in a coroutine
    return lambda: task.get_loop().call_soon_threadsafe(task.cancel)
