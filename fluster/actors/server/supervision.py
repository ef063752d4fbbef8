"""An actor's instance: its hooks, and its replacement when it fails."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from inspect import iscoroutine

from fluster.actors.definition.context import Cancellation
from fluster.actors.definition.definition import ON_FAILURE, ON_RESTORE, ON_START, ON_STOP, ActorOptions, methods_of
from fluster.actors.definition.timers import PREFIX, timers_of
from fluster.errors import ActorFailedError, ActorGivenUpError, SupersededError
from fluster.remote_errors.kindred_errors import message_of, type_name
from fluster_bus.core import codec

log = logging.getLogger(__name__)

Functions = Mapping[str, Callable[..., object]]  # {method, or key of a timer: bound to an instance}

# For on_stop and on_failure, which others wait for. What makes an actor, its constructor and on_start, may take long.
HOOK_TIMEOUT_S = 30.0


def run_hook(instance: object, name: str, *args: object, loop: Callable[[], asyncio.AbstractEventLoop]) -> object:
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
    instance: object, name: str, *args: object, loop: Callable[[], asyncio.AbstractEventLoop]
) -> Future[tuple[object, BaseException | None]]:
    """Run the hook on a thread of its own: what it returns, and what it raised. It may hang, and is left to itself then."""
    outcome: Future[tuple[object, BaseException | None]] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result((run_hook(instance, name, *args, loop=loop), None))
        except BaseException as error:
            outcome.set_result((None, error))

    threading.Thread(target=run, name=f"{name} of {type(instance).__name__}", daemon=True).start()
    return outcome


async def outcome_of(
    method: Coroutine[object, None, object], cancellation: Cancellation | None = None
) -> tuple[object, BaseException | None]:
    """What a coroutine returns or raises; never an exception, since some of them would end the loop."""
    try:
        if cancellation is not None:
            cancellation.on_cancel(_cancelling(asyncio.current_task()))
        return await method, None
    except BaseException as error:
        return None, error


def _cancelling(task: asyncio.Task[object] | None) -> Callable[[], object]:
    assert task is not None  # noqa: S101 - asked for in a coroutine
    return lambda: task.get_loop().call_soon_threadsafe(task.cancel)


class RestartBudget:
    """Restarts that are allowed: `most` of them in any `window_s` seconds."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._times: list[float] = []

    def spend(self, now: float) -> bool:
        """Whether one more is allowed now; then it counts."""
        self._times = [time_s for time_s in self._times if now - time_s <= self._window_s]
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True


class Supervisor:
    """Holds the instance whose methods are called, and makes another by `factory` when it has failed.

    Meanwhile calls wait. When there is no factory, or it has failed too often, it is given up: `on_given_up` is called
    with the reason, once, on a thread of the supervisor's; `on_change` whenever its state is another.
    """

    def __init__(
        self,
        instance: object,
        name: str,
        options: ActorOptions,
        *,
        factory: Callable[[], object] | None,
        actor_loop: Callable[[], asyncio.AbstractEventLoop],
    ) -> None:
        self._instance = instance
        self._name = name
        self._options = options
        self._factory = factory
        self._actor_loop = actor_loop
        self._budget = RestartBudget(options.max_restarts, options.restart_window)
        self._fatal: tuple[type[Exception], ...] = (ActorFailedError, *options.fatal_exceptions)
        self._lock = threading.Lock()
        self.on_change: Callable[[], object] = lambda: None
        self.on_given_up: Callable[[ActorGivenUpError | SupersededError], object] = lambda _reason: None
        self.saved: Callable[[], bytes | None] = lambda: None  # what an instance is to be restored from
        self.functions = _functions_of(instance)
        self.replacing: threading.Event | None = None  # set once the failed instance is replaced, or the actor given up
        self.given_up: ActorGivenUpError | SupersededError | None = None
        self.restarts = 0
        self.last_error = ""

    def start(self) -> None:
        """Run `on_restore`, if something was saved, and `on_start`. Raises what they raise."""
        saved = self.saved()
        if saved is not None:
            if not hasattr(self._instance, ON_RESTORE):
                raise TypeError(f"{self._name} has saved its state, but its class has no on_restore(state) to take it")
            run_hook(self._instance, ON_RESTORE, codec.decode(saved), loop=self._actor_loop)
        run_hook(self._instance, ON_START, loop=self._actor_loop)

    async def stop(self, timeout_s: float) -> None:
        """Run `on_stop` on a thread of its own; return when it has, or after `timeout_s`. One that failed has none."""
        if self.given_up is not None or self.replacing is not None or not hasattr(self._instance, ON_STOP):
            return
        stopped = asyncio.wrap_future(start_hook(self._instance, ON_STOP, loop=self._actor_loop))
        await asyncio.wait([stopped], timeout=timeout_s)
        if not stopped.done():
            log.warning("on_stop of %s was still busy after %g s", self._name, timeout_s)
            return
        _value, error = stopped.result()
        if error is not None:
            log.error("on_stop of %s failed", self._name, exc_info=error)

    def on_error(self, functions: Functions, error: BaseException) -> Callable[[], None] | None:
        """A call that ran on the instance of these functions has raised `error`.

        If it is fatal, calls wait from now on, and what is returned replaces the instance: it is to be called once the
        caller has its answer, which would be lost when the actor is given up.
        """
        if not isinstance(error, self._fatal):
            return None
        with self._lock:
            if functions is not self.functions or self.replacing is not None or self.given_up is not None:
                return None  # that instance is gone already
            replacing = self.replacing = threading.Event()
        # Not here: this may be the loop of asynchronous methods, which hooks need.
        thread = threading.Thread(
            target=self._replace, args=(error, replacing), name=f"restart of {self._name}", daemon=True
        )
        return thread.start

    def _replace(self, error: BaseException, replacing: threading.Event) -> None:
        try:
            self.last_error = _text_of(error)
            self.on_change()
            if not self._is_repaired(error):
                self._restart(error)
        except BaseException as worse:
            self.last_error = _text_of(worse)
            self._give_up(f"could not be made anew: {self.last_error}", worse)
        finally:
            self.replacing = None
            replacing.set()
        if self.given_up is None:
            self.on_change()
        else:
            self.on_given_up(self.given_up)

    def _is_repaired(self, error: BaseException) -> bool:
        """Whether the instance itself says, by what `on_failure` returns in time, that it can go on."""
        try:
            repaired, worse = start_hook(self._instance, ON_FAILURE, error, loop=self._actor_loop).result(
                HOOK_TIMEOUT_S
            )
        except TimeoutError:
            log.warning("on_failure of %s was still busy after %g s, and is not waited for", self._name, HOOK_TIMEOUT_S)
            return False
        if worse is not None:
            log.error("on_failure of %s failed", self._name, exc_info=worse)
            return False
        return bool(repaired)

    def _restart(self, error: BaseException) -> None:
        options = self._options
        if options.max_restarts == 0:
            self._give_up(f"failed, and its max_restarts is 0: {self.last_error}", error)
        elif self._factory is None:
            self._give_up(f"failed, and register() was given no factory to make it anew: {self.last_error}", error)
        elif not self._budget.spend(time.monotonic()):
            times = f"{options.max_restarts} restart{'' if options.max_restarts == 1 else 's'}"
            self._give_up(f"failed after {times} within {options.restart_window:g} s: {self.last_error}", error)
        else:
            log.warning("%s failed and is made anew: %s", self._name, self.last_error)
            self._instance = self._factory()
            self.start()
            self.functions = _functions_of(self._instance)
            self.restarts += 1

    def end(self, reason: ActorGivenUpError | SupersededError) -> None:
        """Give the actor up, for a reason that does not lie in its instance."""
        with self._lock:
            if self.given_up is not None:
                return
            self.given_up = reason
        threading.Thread(target=self.on_given_up, args=(reason,), name=f"end of {self._name}", daemon=True).start()

    def _give_up(self, why: str, error: BaseException) -> None:
        log.error("%s %s", self._name, why)
        self.given_up = ActorGivenUpError(f"{self._name} was given up: it {why}")
        self.given_up.__cause__ = error


def _functions_of(instance: object) -> Functions:
    cls = type(instance)
    methods = {name: getattr(instance, name) for name in methods_of(cls)}
    return methods | {PREFIX + name: getattr(instance, name) for name in timers_of(cls)}


def _text_of(error: BaseException) -> str:
    return f"{type_name(error)}: {message_of(error)}"[:500]
