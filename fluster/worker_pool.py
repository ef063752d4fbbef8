"""Functions run side by side by workers on the cluster."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, Self, TypeVar

from fluster.actors.deploy import Deployment
from fluster.actors.futures import ActorFuture
from fluster.actors.policies import LeastOutstanding
from fluster.actors.pool import AsyncActorPool
from fluster.cluster import AsyncCluster, Cluster
from fluster.cluster.portal import blocking
from fluster.errors import ActorDiedError
from fluster_bus import codec
from fluster_bus.errors import BusError, ClosedError
from fluster_bus.messages import EnvironmentConfig, JobId, JobInfo, ResourceConfig
from fluster_bus.names import check_name, unique_name

log = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")
P = ParamSpec("P")

_DEFAULT_RESOURCES = ResourceConfig()
_PAUSE_S = 1.0  # before the cluster is asked again after an error
_KEPT_FUNCTIONS = 64  # of those that a worker has read


class _TaskExecutor:
    """What runs in each worker."""

    def run(self, function: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return _function(function)(*args, **kwargs)


@functools.lru_cache(maxsize=_KEPT_FUNCTIONS)
def _function(pickled: bytes) -> Callable[..., Any]:
    function: Callable[..., Any] = codec.decode(pickled)
    return function


class _Workers:
    """The workers of a pool, and what is out with them. Lives on the loop of the cluster's connection."""

    def __init__(self, cluster: AsyncCluster, deployment: Deployment[_TaskExecutor]) -> None:
        self.deployment = deployment
        self.error: Exception | None = None  # why there are no workers any more
        self.pool: AsyncActorPool[_TaskExecutor] = AsyncActorPool(
            cluster, deployment.request.name, policy=LeastOutstanding()
        )
        self._cluster = cluster
        self._launched: asyncio.Future[JobId] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(), name=f"job of {self.pool.name}")

    @classmethod
    async def start(cls, cluster: AsyncCluster, deployment: Deployment[_TaskExecutor]) -> Self:
        return cls(cluster, deployment)

    async def _live(self) -> None:
        """Launch the job and stay until it ends; what has not been sent then will never be."""
        name = self.pool.name
        try:
            job_id = await self._cluster.launch(self.deployment.request)
            self._launched.set_result(job_id)
            info = await self._end_of_job(job_id)
            reason = f": {info.error_message}" if info.error_message else ""
            self._end(ActorDiedError(f"the workers of {name} have ended, as {info.status}{reason}"))
        except Exception as error:
            log.info("%s has no workers: %s", name, error)
            self._end(error)
            if not self._launched.done():
                self._launched.set_exception(error)
                self._launched.exception()  # it is told to those who wait, whether there are any or not

    async def _end_of_job(self, job_id: JobId) -> JobInfo:
        while True:
            try:
                return await self._cluster.wait(job_id)
            except ClosedError:
                raise
            except BusError as error:  # the workers may go on while nobody can tell how they are
                log.info("how %s is cannot be told: %s", job_id, error)
                await asyncio.sleep(_PAUSE_S)

    def _end(self, error: Exception) -> None:
        self.error = error
        self.pool.refuse(error)

    async def wait_for_workers(self, min_workers: int | None = None, timeout: float | None = 60.0) -> None:
        """Return as soon as `min_workers` are there, all unless told otherwise.

        Raises ActorTimeoutError after `timeout` seconds, and why there are none any more when the workers ended.
        """
        wanted = self.deployment.request.replicas if min_workers is None else min_workers
        waiting = asyncio.ensure_future(self.pool.wait_for_size(wanted, timeout))
        try:
            await asyncio.wait([waiting, self._life], return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() and self.error is not None:
                raise copy.copy(self.error)
            await waiting
        finally:
            waiting.cancel()

    async def size(self) -> int:
        return len(await self.pool.wait_for_members(0))

    async def shutdown(self, *, wait: bool) -> None:
        """End the workers; with `wait`, return when they have ended."""
        ended = ActorDiedError(f"{self.pool.name} was shut down before the task was done")
        try:
            job_id = await asyncio.shield(self._launched)
            self._end(ended)
            if not self._life.done():
                await self._cluster.terminate(job_id, reason=f"{self.pool.name} was shut down")
                if wait:
                    await asyncio.wait([self._life])
        finally:
            self._life.cancel()
            self.pool.give_up(ended)


class WorkerPool:
    """`num_workers` workers on the cluster that run functions; the first tasks run as soon as one of them is there.

    Each worker runs one task at a time, and each task goes to a worker that has the fewest. Functions and arguments
    travel as pickles, by value where they were defined in a script or notebook.

    A task whose worker dies ends with ActorDiedError. Use it from any thread; as a context manager it shuts down at
    the end, after all tasks are done.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_workers: int,
        resources: ResourceConfig = _DEFAULT_RESOURCES,
        *,
        environment: EnvironmentConfig | None = None,
        name_prefix: str = "worker",
    ) -> None:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"WorkerPool takes a Cluster, not {cluster!r}")
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise ValueError(f"num_workers={num_workers!r}: give the number of workers, 1 or more")
        name = unique_name(check_name("name_prefix", name_prefix))
        deployment = Deployment.of(
            _TaskExecutor,
            (),
            {},
            name=name,
            replicas=num_workers,
            resources=resources,
            environment=environment,
        )
        self.portal = cluster.portal
        self.asynchronous = cluster.portal.run(_Workers.start, cluster.asynchronous, deployment)
        self._lock = threading.Lock()
        self._unfinished: set[concurrent.futures.Future[Any]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"WorkerPool({self.name!r})"

    @property
    def name(self) -> str:
        return self.asynchronous.pool.name

    @property
    def num_workers(self) -> int:
        """How many workers were asked for."""
        return self.asynchronous.deployment.request.replicas

    @property
    def size(self) -> int:
        """How many workers there are now."""
        return self.portal.run(self.asynchronous.size)

    wait_for_workers = blocking(_Workers.wait_for_workers)

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorFuture[T]:
        """Run `function(*args, **kwargs)` on a worker: its future. Raises TypeError for what cannot be pickled."""
        return self._submit(_pickled(function), args, kwargs)

    def map(self, function: Callable[[Item], T], items: Iterable[Item]) -> list[ActorFuture[T]]:
        """Run `function(item)` for each item: their futures, in the order of the items."""
        pickled = _pickled(function)
        return [self._submit(pickled, (item,), {}) for item in items]

    def _submit(self, function: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ActorFuture[Any]:
        if self._closed:
            raise RuntimeError(f"{self} was shut down: make another")
        error = self.asynchronous.error
        if error is not None:
            raise copy.copy(error)
        payload = codec.encode(((function, args, kwargs), {}))
        future = self.asynchronous.pool.submit_to(None, _TaskExecutor.run.__name__, payload)
        with self._lock:
            self._unfinished.add(future)
        future.add_done_callback(self._on_done)
        return future

    def _on_done(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._unfinished.discard(future)

    def shutdown(self, wait: bool = True) -> None:
        """End the workers. With `wait` the tasks are finished first; else those not begun are cancelled.

        Nothing happens the second time.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unfinished = list(self._unfinished)
        if wait:
            concurrent.futures.wait(unfinished)
        else:
            for future in unfinished:
                future.cancel()
        self.portal.run(functools.partial(self.asynchronous.shutdown, wait=wait))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self.shutdown(wait=kind is None)


def _pickled(function: Callable[..., Any]) -> bytes:
    if not callable(function):
        raise TypeError(f"{function!r} cannot be called: pass the function itself, and its arguments behind it")
    return codec.encode(function)
