"""The methods of an actor that Fluster itself calls: when it starts, fails and ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from inspect import iscoroutine
from typing import Any

from fluster.actors.protocol.cancellation import Cancellation

# For on_stop and on_failure, which others wait for. What makes an actor, its constructor and on_start, may take long.
HOOK_TIMEOUT_S = 30.0


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


def start_hook(
    instance: object, name: str, *args: Any, loop: Callable[[], asyncio.AbstractEventLoop]
) -> Future[tuple[Any, BaseException | None]]:
    """Run the hook on a thread of its own: what it returns, and what it raised. It may hang, and is left to itself then."""
    outcome: Future[tuple[Any, BaseException | None]] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result((run_hook(instance, name, *args, loop=loop), None))
        except BaseException as error:
            outcome.set_result((None, error))

    threading.Thread(target=run, name=f"{name} of {type(instance).__name__}", daemon=True).start()
    return outcome


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
