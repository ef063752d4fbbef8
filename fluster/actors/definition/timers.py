"""Methods that an actor runs by itself, again and again."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from fluster.actors.definition.definition import MethodInfo, is_context, method_of
from fluster.actors.protocol.clock import Alarm, Clock
from fluster_bus.connection.services_api import EndpointCounts

F = TypeVar("F", bound=Callable[..., object])

PREFIX = "every-"  # of what stands for a timer where others stand for methods; no method's name has a hyphen
_MARK = "__fluster_every__"


@dataclass(frozen=True)
class Every:
    """What `@every(…)` takes."""

    seconds: float
    jitter: float = 0.0  # seconds by which a run may be later, at random

    def __post_init__(self) -> None:
        if not _is_number(self.seconds) or not 0 < self.seconds < math.inf:
            raise ValueError(f"@every({self.seconds!r}): give a number of seconds above 0")
        if not _is_number(self.jitter) or not 0 <= self.jitter < self.seconds:
            raise ValueError(f"@every(jitter={self.jitter!r}): give seconds from 0 to less than the {self.seconds:g}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def every(seconds: float, *, jitter: float = 0.0) -> Callable[[F], F]:
    """Have an actor run the method below by itself, each `seconds`: the first time one interval after it started.

    A run takes its turn among the calls. When the run before it has not ended, it is skipped; what it raises is
    logged. `jitter` is the number of seconds by which a run may come later, at random. Raises ValueError for other
    numbers, and TypeError above a generator and what cannot be called without arguments.
    """
    chosen = Every(seconds, jitter)

    def mark(marked: F) -> F:
        if not inspect.isroutine(cast("object", marked)):  # F stays what is returned
            raise TypeError(f"@every stands above a method of a class, not above {marked!r}")
        function = getattr(marked, "__func__", marked)
        wanted = [each.name for each in list(inspect.signature(function).parameters.values())[1:] if _is_needed(each)]
        if wanted:
            raise TypeError(
                f"@every above {function.__name__!r}: a timer calls it without {', '.join(wanted)}: give these defaults"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"@every above {function.__name__!r}: it is a generator, and a timer reads none")
        setattr(function, _MARK, chosen)
        return marked

    return mark


def _is_needed(parameter: inspect.Parameter) -> bool:
    return (
        parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and not is_context(parameter)
    )


def timers_of(cls: type) -> dict[str, Every]:
    """The timers of a class by their methods' names, which may have a leading underscore."""
    found: dict[str, Every] = {}
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name)
        chosen = getattr(getattr(attribute, "__func__", attribute), _MARK, None)
        if isinstance(chosen, Every):
            found[name] = chosen
    return found


class Schedule:
    """When a timer's beats are, and how many of them brought no run. Knows no clock."""

    def __init__(self, seconds: float, started_at: float) -> None:
        self._seconds = seconds
        self._started_at = started_at
        self._beat = 1  # the next one

    def delay(self, now: float) -> float:
        """How long until the next beat."""
        return max(self._started_at + self._beat * self._seconds - now, 0.0)

    def on_beat(self, now: float, *, busy: bool) -> int:
        """How many beats are skipped: this one when its method is still at the one before, and those slept through."""
        reached = max(int((now - self._started_at) // self._seconds), self._beat)
        missed, self._beat = reached - self._beat, reached + 1
        return missed + busy


class Timer:
    """Has one method of an actor run at each beat, by `put` into its mailbox. Beats on the loop on which it was started."""

    def __init__(self, cls: type, name: str, *, put: Callable[[Timer], bool], clock: Clock) -> None:
        self.key = PREFIX + name
        self.info: MethodInfo = method_of(cls, name)
        self.every = timers_of(cls)[name]
        self.counts = EndpointCounts(data={"skipped": 0})
        self._put = put
        self._clock = clock
        self._alarm: Alarm | None = None
        self.idle = threading.Event()  # no run waits or is under way
        self.idle.set()

    def start(self) -> None:
        """Beat on the running loop."""
        self._wait(asyncio.get_running_loop(), Schedule(self.every.seconds, self._clock.now().monotonic))

    def _wait(self, loop: asyncio.AbstractEventLoop, schedule: Schedule) -> None:
        delay_s = schedule.delay(self._clock.now().monotonic) + random.uniform(0, self.every.jitter)
        self._alarm = self._clock.call_later(loop, delay_s, self._on_beat, loop, schedule)

    def _on_beat(self, loop: asyncio.AbstractEventLoop, schedule: Schedule) -> None:
        busy = not self.idle.is_set()
        if not busy:
            self.idle.clear()
            busy = not self._put(self)
            if busy:
                self.idle.set()
        self.counts.data["skipped"] += schedule.on_beat(self._clock.now().monotonic, busy=busy)
        self._wait(loop, schedule)

    def on_done(self) -> None:
        """A run has ended. Called from any thread."""
        self.idle.set()

    def stop(self) -> None:
        """No more runs. Called on the loop."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
