"""The context of a method of an actor: who the actor is, and which call it handles, cancelled or not."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from fluster.cluster.task.task_context import NAMESPACE, TaskIdentity
from fluster_bus.core.names import EndpointId, JobId, Namespace, WorkerId

if TYPE_CHECKING:
    import concurrent.futures

    from fluster.cluster import Cluster


class StateStore(Protocol):
    """Stores the state of a durable actor."""

    def save(self, state: object, reply: str) -> concurrent.futures.Future[None]:
        """Store `state`, within the call that answers to `reply`. The future raises as `ActorContext.save` does."""
        ...


class Cancellation:
    """Whether the caller of a call still waits. Set once by the connection's thread, read by those that run the method."""

    __slots__ = ("_callbacks", "_event", "_lock", "cancelled")

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self._event: threading.Event | None = None

    def cancel(self) -> None:
        with self._lock:
            if self.cancelled:
                return
            self.cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def on_cancel(self, callback: Callable[[], object]) -> None:
        """Have `callback` run once, in whichever thread: at once when it is cancelled already."""
        with self._lock:
            if not self.cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float | None) -> bool:
        """True as soon as it is cancelled, False after `timeout_s`."""
        if self._event is None:
            self._event = threading.Event()  # only the thread that runs the method waits
            self.on_cancel(self._event.set)
        return self._event.wait(timeout_s)


@dataclass(frozen=True)
class ActorContext:
    """Who this actor is, where it runs, and which call it is handling.

    Handed to a method whose first parameter is annotated with this class or named `ctx`; callers leave it out.
    """

    namespace: Namespace
    """The namespace of the cluster's connection."""
    actor_name: str | None = None
    """The name that the actor serves."""
    endpoint_id: EndpointId | None = None
    """The id by which members are known."""
    job_id: JobId | None = None
    """None, as are the fields that follow, for an actor outside of any job."""
    task: int = 0
    """The number of its task in the job, from 0."""
    num_tasks: int = 1
    """How many tasks the job has."""
    attempt: int = 0
    """The number of the task's attempt, from 1; 0 outside of any job."""
    worker_id: WorkerId | None = None
    """The worker that runs the task."""
    method: str | None = None
    """The method that is called; None outside of a call."""
    deadline: float | None = None
    """By time.monotonic() of this process; after it the answer is no longer waited for."""
    _cluster: Cluster | None = dataclasses.field(default=None, repr=False, compare=False)
    _cancellation: Cancellation | None = dataclasses.field(default=None, repr=False, compare=False)
    _durable: StateStore | None = dataclasses.field(default=None, repr=False, compare=False)
    _reply: str = dataclasses.field(default="", repr=False, compare=False)  # names the call

    @property
    def cancelled(self) -> bool:
        """True once the answer is no longer waited for: its caller cancelled the call, or it ran into its timeout."""
        return self._cancellation is not None and self._cancellation.cancelled

    def wait_cancelled(self, timeout: float | None = None) -> bool:
        """Wait until `cancelled`: True then, False after `timeout` seconds. For methods that block a thread."""
        if self._cancellation is None:
            raise RuntimeError(
                "there is no call that could be cancelled: wait_cancelled() belongs into a method's call"
            )
        return self._cancellation.wait(timeout)

    def save(self, state: object) -> None:
        """Keep `state`, for `on_restore` of the next instance of this durable actor; return when it is stored.

        The call that saves is not run again, so save last. Raises SupersededError when another instance has taken this
        one's place: then nothing was saved. TypeError for what cannot be pickled, MessageTooLargeError above 4 MiB, and
        RuntimeError for an actor that is not durable.
        """
        self._saving(state).result()

    async def save_async(self, state: object) -> None:
        """As `save`, for asynchronous methods: others go on meanwhile."""
        import asyncio

        await asyncio.wrap_future(self._saving(state))

    def _saving(self, state: object) -> concurrent.futures.Future[None]:
        if self._durable is None:
            raise RuntimeError(
                f"{self.actor_name or 'what runs here'} keeps no state: give its class @actor(durable=True)"
            )
        return self._durable.save(state, self._reply)

    @property
    def cluster(self) -> Cluster:
        """The cluster that this actor belongs to."""
        if self._cluster is not None:
            return self._cluster
        from fluster.cluster import current_cluster

        return current_cluster()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The context of this process's job; outside of any job only the namespace is known."""
        identity = TaskIdentity.from_environment(environment)
        if identity is None:
            return cls(namespace=Namespace(environment.get(NAMESPACE) or "default"))
        return cls(
            namespace=identity.namespace,
            job_id=identity.job_id,
            task=identity.task,
            num_tasks=identity.num_tasks,
            attempt=identity.attempt,
            worker_id=identity.worker_id,
        )
