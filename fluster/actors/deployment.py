"""A class on its way to be actors of a cluster."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fluster.actors import frames
from fluster.actors.definition import check_class, methods_of, name_of, options_of, resources_of
from fluster.actors.hosting import host
from fluster.actors.pool import AsyncActorPool
from fluster.cluster.arguments import check_count
from fluster.cluster.client import AsyncCluster
from fluster.cluster.ownership import launch_owned
from fluster.errors import (
    ActorDiedError,
    ActorNameTakenError,
    FlusterError,
    JobFailedError,
    JobRefusedError,
    RemoteError,
)
from fluster.restored_errors import restored
from fluster_bus import codec, subjects
from fluster_bus.delivery import Delivery
from fluster_bus.messages import (
    Entrypoint,
    EnvironmentConfig,
    JobId,
    JobRequest,
    JobStatus,
    ResourceConfig,
    TaskError,
    TaskRecord,
)
from fluster_bus.messages.jobs import MAX_REPLICAS
from fluster_bus.names import check_name, unique_name

log = logging.getLogger(__name__)

T = TypeVar("T")

# The other ends are those of the whole job, which tells the reason.
_ENDED_BY_ITSELF = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.WORKER_FAILED)
_RESTART_BACKOFF_S = 0.1  # before an actor whose process has died gets another
_LONG_S = 10.0  # after this a deployment says what it is waiting for


@dataclass(frozen=True)
class Deployment(Generic[T]):
    """A class on its way to be actors."""

    actor_class: type[T]
    request: JobRequest
    logs: bool | None = None  # whether the program shows what they write; None: as its cluster object does by itself

    @classmethod
    def of(
        cls,
        actor_class: type[T],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        name: str | None = None,
        replicas: int = 1,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        logs: bool | None = None,
    ) -> Deployment[T]:
        """Checked, and pickled as it is now. Raises TypeError, ValueError."""
        check_class(actor_class)
        if not methods_of(actor_class):
            raise TypeError(f"{actor_class.__name__} has no method that could be called: no name without underscore")
        _check_arguments(actor_class, args, kwargs)
        check_replicas(actor_class, replicas)
        chosen = check_name("actor name", name) if name is not None else name_of(actor_class)
        options = options_of(actor_class)
        request = JobRequest(
            name=chosen,
            entrypoint=Entrypoint(callable=host, args=(chosen, actor_class, args, dict(kwargs))),
            resources=resources or resources_of(actor_class),
            environment=environment or EnvironmentConfig(),
            replicas=replicas,
            max_task_failures=replicas,  # the others serve on
            max_retries_failure=options.max_restarts,
            retry_window_s=options.restart_window,
            retry_backoff_s=_RESTART_BACKOFF_S,
        )
        return cls(actor_class, request, logs)

    async def run(self, cluster: AsyncCluster) -> AsyncActorPool[T]:
        """The pool, once all its actors have answered."""
        name = self.request.name
        pool = AsyncActorPool(cluster, name, actor_class=self.actor_class)
        taken = await pool.wait_for_members(0)
        if taken:
            by = f"job {taken[0].job_id}" if taken[0].job_id else "a process outside of any job"
            raise ActorNameTakenError(
                f"{name!r} is served already, by {len(taken)} of {by}: choose another with deploy(…, name=…), or end "
                f"those first"
            )
        # The id is chosen here, so that the job is watched from before its beginning.
        pool.job_id = job_id = self.request.job_id or JobId(unique_name(name))
        failure = asyncio.create_task(_end_of_a_task(cluster, job_id), name=f"watch over {name}")
        try:
            await cluster.bus.flush()
            # What has one instance for all is no program's own; what a task deploys ends with its attempt all the same.
            has_seat = options_of(self.actor_class).has_seat
            lives_on = self.request.detached or (has_seat and not cluster.parent_of(self.request))
            await launch_owned(cluster, self.request.model_copy(update={"job_id": job_id, "detached": lives_on}))
            cluster.shown.follow(job_id, name, logs=self.logs, lives_on=lives_on)
            await _first(_all_answered(pool, self.request.replicas), failure, _end_of_job(cluster, job_id))
        except JobRefusedError:
            failure.cancel()
            raise
        except BaseException:
            failure.cancel()
            await asyncio.shield(asyncio.ensure_future(_leave_nothing(pool)))
            raise
        return pool


async def _leave_nothing(pool: AsyncActorPool[Any]) -> None:
    try:
        await pool.shutdown()
    except FlusterError as error:  # what made the deployment fail says more
        log.info("%s could not be ended: %s", pool, error)


async def _all_answered(pool: AsyncActorPool[Any], replicas: int) -> None:
    try:
        members = await pool.wait_for_members(replicas, job_id=pool.job_id, timeout=_LONG_S)
    except TimeoutError as late:
        log.warning("still waiting for actors: %s", late)
        members = await pool.wait_for_members(replicas, job_id=pool.job_id)
    nothing = codec.encode(((), {}))
    for answer in [pool.submit_to(member.endpoint_id, frames.PING, nothing) for member in members]:
        await answer


async def _end_of_a_task(cluster: AsyncCluster, job_id: JobId) -> None:
    """Raise why a task has ended. Its record tells, as the server republishes it; the other tasks may go on."""
    ended: asyncio.Future[TaskRecord] = asyncio.get_running_loop().create_future()

    def on_record(delivery: Delivery) -> None:
        if delivery.data:
            record = TaskRecord.from_json(delivery.data)
            if record.state in _ENDED_BY_ITSELF and not ended.done():
                ended.set_result(record)

    records = subjects.watch_jobs(cluster.namespace, f"{job_id}.{subjects.ANY_TOKEN}")
    subscription = await cluster.bus.subscribe(records, on_record)
    try:
        raise _failure_of(await ended)
    finally:
        if cluster.bus.connected:
            await subscription.unsubscribe()


async def _end_of_job(cluster: AsyncCluster, job_id: JobId) -> None:
    info = await cluster.wait(job_id)
    raise JobFailedError(info) if info.error is None else exception_of(info.error)


def _failure_of(task: TaskRecord) -> Exception:
    if task.error is not None:
        return exception_of(task.error)
    return ActorDiedError(
        f"task {task.task} of job {task.job_id} ended as {task.state} before its actor answered "
        f"(exit code {task.exit_code}): `fluster logs {task.job_id}` shows what it wrote"
    )


def exception_of(error: TaskError) -> Exception:
    """What a task raised, as itself where that can be had, with the traceback as a note."""
    otherwise = RemoteError(error.type, error.message, error.traceback)
    return restored(error.pickled, otherwise, traceback=error.traceback, where="in the actor's process")


async def _first(*running: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
    """Run side by side until one has ended; raise what it raised, and end the others."""
    tasks = [asyncio.ensure_future(each) for each in running]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if task in done:
            task.result()


def check_replicas(actor_class: type, replicas: int) -> int:
    """Return `replicas` if there can be so many. Raises ValueError."""
    check_count("replicas", replicas, 1, "the number of actors", most=MAX_REPLICAS)
    options = options_of(actor_class)
    if options.has_seat and replicas != 1:
        kind = "durable" if options.durable else "a singleton"
        raise ValueError(
            f"replicas={replicas!r}: {actor_class.__name__} is {kind}, of which there is one: leave it out"
        )
    return replicas


def _check_arguments(actor_class: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError here, rather than in a process far away, when the constructor does not take them."""
    try:
        signature = inspect.signature(actor_class)
    except (TypeError, ValueError):  # some classes of C have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        options = sorted(kwargs.keys() & {"resources", "max_concurrency", "timeout", "environment"})
        hint = f"; {', '.join(options)} belongs into @actor(…) above the class" if options else ""
        raise TypeError(
            f"{actor_class.__name__}{signature} cannot be made from these arguments: {error}{hint}"
        ) from error
