"""Serving actors of this process to the cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue

from fluster.actors.definition.context import ActorContext
from fluster.actors.definition.definition import methods_of, options_of
from fluster.actors.protocol.clock import SYSTEM_CLOCK, Clock
from fluster.actors.protocol.members import OWN_METADATA
from fluster.actors.server.host import LAST_CALLS_S, Host, Served
from fluster.actors.server.hosted import HostedActor
from fluster.cluster import Cluster
from fluster.cluster.portal import Portal
from fluster.cluster.task.task_context import KILL_GRACE
from fluster.errors import ActorGivenUpError, SupersededError
from fluster_bus.core.errors import ClosedError
from fluster_bus.core.names import check_name
from fluster_bus.messages import EndpointId
from fluster_bus.running.blocked_waits import wait_for_item
from fluster_bus.storage.registry import new_endpoint_id

SHUTDOWN_TIMEOUT_S = 30.0
_CALLS_SHARE_OF_GRACE = 0.7


class ActorServer:
    """Serves actors: `register` them, then `serve()` until told to end, or `serve_background()` and go on.

    In a job's process the actors belong to the job, and end with it. Elsewhere they are known as long as this
    process lives, and for some seconds more when it dies without a `shutdown`. When the cluster is closed before a
    `shutdown`, they are given one second for the calls that they have.
    """

    def __init__(self, cluster: Cluster, *, clock: Clock = SYSTEM_CLOCK) -> None:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"ActorServer takes a Cluster, not {cluster!r}")
        self._cluster = cluster
        self._clock = clock
        self._host: Host = cluster.portal.run(_host_of, cluster)
        self._actors: list[Served] = []
        self._serving = False
        self._closed = False
        self._lock = threading.RLock()  # over all that changes who is served
        self._ends: SimpleQueue[ActorGivenUpError | SupersededError | None] = (
            SimpleQueue()
        )  # a signal's handler may put into it at any moment
        self._portal_of_actors: Portal | None = None
        self._portal_lock = threading.Lock()
        cluster.end_before_close(self, lambda: self.shutdown(LAST_CALLS_S))

    def register(
        self,
        name: str,
        instance: object,
        metadata: Mapping[str, str] | None = None,
        *,
        factory: Callable[[], object] | None = None,
        initializer: Callable[[], object] | None = None,
    ) -> EndpointId:
        """Serve `instance` under `name`, as one more member of that pool; the id of its endpoint.

        It takes calls from `serve` on, at once when this server serves already. `metadata` is shown to those who
        looks at the pool's members. `factory` makes another instance when this one fails, as often as the class's
        max_restarts allows; without it a failed actor is given up. `initializer` is called first on each thread that runs its
        methods, before arguments are unpickled there.

        One of a class that is a singleton, or durable, is the only one of its name: from when it serves. Who serves, or
        registers with a server that does, then waits as long as the one before may live, and gets ActorNameTakenError
        when that one does live.
        """
        check_name("actor name", name)
        _check_instance(name, instance)
        options = options_of(type(instance))
        for key in metadata or {}:
            if key.startswith(OWN_METADATA):
                raise ValueError(f"metadata {key!r} begins with {OWN_METADATA!r}, which is kept for Fluster's own")
        endpoint_id = new_endpoint_id()
        context = dataclasses.replace(
            ActorContext.from_environment(),
            namespace=self._cluster.namespace,
            actor_name=name,
            endpoint_id=endpoint_id,
            _cluster=self._cluster,
        )
        durable = self._host.durable(name, endpoint_id, instance) if options.durable else None
        if durable is not None:
            context = dataclasses.replace(context, _durable=durable)
        actor = HostedActor(
            instance,
            context,
            outbox=self._host.outbox if durable is None else durable,
            max_reply=self._cluster.asynchronous.bus.max_payload,
            stored=self._host.stored,
            actor_loop=self._loop_of_actors,
            factory=factory,
            initializer=initializer,
            clock=self._clock,
            seat=self._host.seat(context, is_durable=options.durable) if options.has_seat else None,
            durable=durable,
        )
        with self._lock:
            if self._closed:
                raise RuntimeError("this ActorServer was shut down: make another")
            served = Served(actor, self._host.endpoint(name, endpoint_id, actor, metadata or {}))
            if self._serving:
                self._open(served)
            self._actors.append(served)
        return endpoint_id

    def serve_background(self) -> None:
        """Begin to serve and return; calls are handled on threads of their own.

        Raises what `on_restore` and `on_start` raise, and ActorNameTakenError for a singleton that lives elsewhere.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("this ActorServer was shut down: make another")
            if not self._serving:
                self._serving = True
                for served in self._actors:
                    self._open(served)

    def _open(self, served: Served) -> None:
        supervisor = served.actor.supervisor
        supervisor.on_change = lambda: self._host.tell(served)
        supervisor.on_given_up = lambda reason: self._give_up(served, reason)
        try:
            self._cluster.portal.run(self._host.acquire_seat, served)
            supervisor.start()
            self._cluster.portal.run(self._host.open, served)
        except BaseException:
            self._cluster.portal.run(self._host.release_seat, served)
            raise

    def _give_up(self, served: Served, reason: ActorGivenUpError | SupersededError) -> None:
        if not self._cluster.portal.loop.is_closed():
            with suppress(ClosedError):  # the cluster object is closed meanwhile, and takes all of its actors with it
                self._cluster.portal.run(self._host.withdraw, served)
        self._ends.put(reason)

    def serve(self) -> None:
        """Serve until `shutdown`, SIGTERM or Ctrl-C; then finish what has arrived.

        Raises ActorGivenUpError once one of its actors has failed more often than it may, SupersededError when another
        has taken the place of one, and as `serve_background` does. Signals are heard in the main thread only.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        # Before others can know of the actors, and tell them to end.
        previous = (
            signal.signal(signal.SIGTERM, lambda _number, _frame: self._ends.put(None)) if in_main_thread else None
        )
        serving = False
        try:
            self.serve_background()
            serving = True
            reason = wait_for_item(self._ends)
            self._ends.put(reason)  # for others who serve
        finally:
            if in_main_thread:
                signal.signal(signal.SIGTERM, previous)
            if serving:
                self.shutdown(_time_for_calls())
        if reason is not None:
            raise reason

    def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Take no more calls, finish those that have arrived, and leave the pools. Nothing happens the second time.

        After `timeout` seconds, calls that still wait end with the error that they were not run, and those that run are left
        without an answer.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._cluster.has_ended(self)
            self._ends.put(None)
            if not self._cluster.portal.loop.is_closed():
                self._cluster.portal.run(self._host.close, timeout)
            if self._portal_of_actors is not None:
                self._portal_of_actors.close()

    def wait_timers(self, timeout: float) -> None:
        """Return when no run of an `@every` method waits or is under way. Raises TimeoutError after `timeout` seconds."""
        for served in self._actors:
            served.actor.wait_timers(timeout)

    def _loop_of_actors(self) -> asyncio.AbstractEventLoop:
        """The loop for asynchronous methods: a thread of its own, so that user code never holds up the connection."""
        with self._portal_lock:
            if self._portal_of_actors is None:
                self._portal_of_actors = Portal("fluster-actors")
            return self._portal_of_actors.loop


def _time_for_calls() -> float:
    """Seconds in which calls are finished: in a task, so many that `on_stop` has some of the grace as well."""
    grace = os.environ.get(KILL_GRACE)
    return SHUTDOWN_TIMEOUT_S if grace is None else float(grace) * _CALLS_SHARE_OF_GRACE


async def _host_of(cluster: Cluster) -> Host:
    return Host(cluster.asynchronous)


def _check_instance(name: str, instance: object) -> None:
    if isinstance(instance, type):
        kind = instance.__name__
        raise TypeError(
            f"register({name!r}, {kind}) got the class: pass an instance, {kind}(…), or have the cluster make one "
            f"with deploy(cluster, {kind}, …)"
        )
    if not methods_of(type(instance)):
        raise TypeError(
            f"register({name!r}, {instance!r}): {type(instance).__name__} has no method that could be called: "
            "give it one whose name has no leading underscore"
        )
