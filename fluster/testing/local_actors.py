"""Actors that live in the process of a test, and a clock that stands still until the test moves it."""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self, TypeVar, cast

from fluster.actors.client.caller import Caller
from fluster.actors.definition.definition import check_class, name_of, options_of
from fluster.actors.deploy.deployment import check_replicas
from fluster.actors.pool.blocking_pool import ActorPool
from fluster.actors.protocol.clock import Alarm
from fluster.actors.protocol.frames import Moment
from fluster.actors.server.server import ActorServer
from fluster.cluster import AsyncCluster, Cluster
from fluster.cluster.jobs.job_states import JobStates
from fluster.cluster.jobs.shown_output import ShownOutput
from fluster.errors import ActorNameTakenError
from fluster.testing.memory_bus import MemoryBus, MemoryRegistry
from fluster_bus.connection.bus import Bus
from fluster_bus.core.names import check_name, unique_name
from fluster_bus.messages import EndpointId, JobId, JobRequest, Namespace

T = TypeVar("T")

NAMESPACE = Namespace("test")
_PATIENCE_S = 10.0
_TURNS = 10  # of the loop, until a call that was submitted before has its deadline
_TOLERANCE_S = 1e-9  # sums of floats are not what they look like


class LocalActors:
    """Actors in this process, without a server: the same pools, calls and mailboxes, and a clock that you move.

    Messages travel through memory, pickled as ever. Use it as a context manager, from any thread; `deploy` and
    `register` bring actors, `clock.advance(seconds)` has deadlines and `@every` methods fall due. There are no jobs
    in it: what launches some needs a LocalCluster.
    """

    def __init__(self) -> None:
        self.clock = FakeClock(self._settle)
        self.cluster: Cluster = _MemoryCluster()
        Caller.of(self.cluster.asynchronous, self.cluster.portal.loop, self.clock)
        self._servers: dict[str, ActorServer] = {}  # {name: who serves what was deployed or registered under it}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def deploy(
        self, actor_class: type[T], /, *args: object, name: str | None = None, replicas: int = 1, **kwargs: object
    ) -> ActorPool[T]:
        """A pool of `replicas` actors, each an `actor_class(*args, **kwargs)` with the very arguments given.

        Raises what the constructor raises, and ActorNameTakenError, TypeError and ValueError as `fluster.deploy` does.
        """
        check_class(actor_class)
        check_replicas(actor_class, replicas)
        _check_memory_will_do(actor_class)
        chosen = check_name("actor name", name) if name is not None else name_of(actor_class)
        if self.pool(chosen).members():
            raise ActorNameTakenError(f"{chosen!r} is served already: give name=…, or shut that pool down")
        make = functools.partial(actor_class, *args, **kwargs)
        server = self._servers[chosen] = ActorServer(self.cluster, clock=self.clock)
        for instance in [make() for _ in range(replicas)]:
            server.register(chosen, instance, factory=make)
        server.serve_background()
        job_id = JobId(unique_name(chosen))
        cast("_AsyncMemoryCluster", self.cluster.asynchronous).servers[job_id] = server
        pool = ActorPool(self.cluster, chosen, actor_class=actor_class, job_id=job_id)
        pool.wait_for_size(replicas, _PATIENCE_S)
        return pool

    def register(self, name: str, instance: object, metadata: Mapping[str, str] | None = None) -> EndpointId:
        """Serve `instance` as one more member of the pool `name`, as ActorServer.register does."""
        _check_memory_will_do(type(instance))
        server = self._servers.get(name)
        if server is None:
            server = self._servers[name] = ActorServer(self.cluster, clock=self.clock)
        endpoint_id = server.register(name, instance, metadata)
        server.serve_background()
        return endpoint_id

    def pool(self, name: str) -> ActorPool[Any]:
        """The pool of that name, which may be empty as yet."""
        return ActorPool(self.cluster, name)

    def close(self) -> None:
        """End the actors, once they have done what was asked of them. Nothing happens the second time."""
        if self.cluster.closed:
            return
        for server in self._servers.values():
            server.shutdown(_PATIENCE_S)
        self.cluster.close()

    def _settle(self, wait: bool) -> None:
        self.cluster.portal.run(_take_turns)
        try:
            for server in self._servers.values() if wait else ():
                server.wait_timers(_PATIENCE_S)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: is it held up on purpose? advance(…, wait=False) does not wait") from error


def _check_memory_will_do(actor_class: type) -> None:
    if options_of(actor_class).durable:
        raise TypeError(
            f"{actor_class.__name__} is durable: its calls and its state are kept by a server, and LocalActors has "
            "none. "
            "Test it on a LocalCluster"
        )


async def _take_turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


class _AsyncMemoryCluster(AsyncCluster):
    def __init__(self, namespace: Namespace) -> None:
        self.bus = cast("Bus", MemoryBus())
        self.namespace = namespace
        self.registry = MemoryRegistry(namespace)
        self.servers: dict[JobId, ActorServer] = {}
        self._identity = None
        self._states = JobStates(self.bus, namespace)
        self.shown = ShownOutput(
            self.bus, namespace, self._states
        )  # shows nothing: what the actors print is on the screen

    @property
    def server(self) -> str:
        return "memory"

    async def terminate(self, job_id: JobId, *, reason: str = "") -> None:  # noqa: ARG002
        server = self.servers.pop(job_id, None)
        if server is not None:
            await asyncio.to_thread(server.shutdown)

    async def wait(self, *_args: Any, **_options: Any) -> Any:
        """`terminate` has waited already."""

    async def launch_many(self, requests: Sequence[JobRequest]) -> NoReturn:
        raise NotImplementedError("LocalActors has no workers that could run a job: use a LocalCluster")


class _MemoryCluster(Cluster):
    def __init__(self) -> None:
        self._connect(_connected)

    def _repr_html_(self) -> str:
        return self.asynchronous._repr_html_()


async def _connected() -> AsyncCluster:
    return _AsyncMemoryCluster(NAMESPACE)


class FakeClock:
    """Deadlines of calls and the beats of `@every` go by this clock, once it was handed to who keeps them.

    `settle(wait)` is called before and after each alarm: it returns when the loops have done what there was for them,
    and with `wait` when also the runs of timers have ended.
    """

    def __init__(self, settle: Callable[[bool], None]) -> None:
        self._settle = settle
        self._began_at = time.time()
        self._elapsed_s = 0.0
        self._numbers = itertools.count()
        self._alarms: list[tuple[float, int, _Alarm]] = []  # a heap of (when, number, alarm)
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        """By how many seconds it was moved so far."""
        return self._elapsed_s

    def now(self) -> Moment:
        elapsed_s = self._elapsed_s
        return Moment("fake", elapsed_s, self._began_at + elapsed_s)

    def call_later(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, callback: Callable[..., object], *args: object
    ) -> Alarm:
        if delay_s <= 0:
            return loop.call_soon(callback, *args)
        alarm = _Alarm(loop, callback, args)
        with self._lock:
            heapq.heappush(self._alarms, (self._elapsed_s + delay_s, next(self._numbers), alarm))
        return alarm

    def advance(self, seconds: float, *, wait: bool = True) -> None:
        """Let that much time pass: what falls due meanwhile happens, each at its time, before this returns.

        Runs of `@every` methods are waited for, so that the next beat finds their actor idle. With `wait=False` they
        are not: for an actor that the test holds up. Raises ValueError for a negative number, and TimeoutError when a
        run does not end.
        """
        if seconds < 0:
            raise ValueError(f"advance({seconds!r}): time does not go backwards")
        until = self._elapsed_s + seconds
        self._settle(wait)
        while (alarm := self._next(until)) is not None:
            alarm.ring()
            self._settle(wait)
        self._elapsed_s = max(until, self._elapsed_s)
        self._settle(wait)

    def _next(self, until: float) -> _Alarm | None:
        with self._lock:
            while self._alarms and self._alarms[0][0] <= until + _TOLERANCE_S:
                due, _number, alarm = heapq.heappop(self._alarms)
                if not alarm.cancelled:
                    self._elapsed_s = max(due, self._elapsed_s)
                    return alarm
        return None


class _Alarm:
    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[..., object], args: tuple[object, ...]
    ) -> None:
        self._loop = loop
        self._callback = callback
        self._args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def ring(self) -> None:
        """Return when the callback has run on its loop."""
        asyncio.run_coroutine_threadsafe(self._run(), self._loop).result()

    async def _run(self) -> None:
        if not self.cancelled:
            self._callback(*self._args)
