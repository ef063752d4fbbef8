"""A class on its way to be actors of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar, get_args

from fluster.actors.definition.definition import (
    ActorOptions,
    check_class,
    check_environment,
    check_resources,
    check_timeout,
    methods_of,
    name_of,
    options_of,
    resources_of,
)
from fluster.actors.deploy.hosting import host
from fluster.actors.pool.pool import AsyncActorPool
from fluster.actors.protocol import frames
from fluster.cluster.client import AsyncCluster
from fluster.cluster.jobs.arguments import check_count
from fluster.cluster.ownership import launch_owned
from fluster.errors import (
    ActorDiedError,
    ActorNameTakenError,
    ActorTimeoutError,
    FlusterError,
    JobFailedError,
    JobNotFoundError,
    JobRefusedError,
    RemoteError,
)
from fluster.remote_errors.kindred_errors import restored
from fluster_bus.core import codec, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.names import check_name, unique_name
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
from fluster_bus.running.coroutines import wait_set

log = logging.getLogger(__name__)

T = TypeVar("T")

IfExists = Literal["error", "get", "replace"]
Lifetime = Literal["program", "detached"]

# The other ends are those of the whole job, which tells the reason.
_ENDED_BY_ITSELF = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.WORKER_FAILED)
_RESTART_BACKOFF_S = 0.1  # before an actor whose process has died gets another
_UNDO_TIMEOUT_S = 15.0  # for the end of what a deployment has begun
_EXPLAIN_TIMEOUT_S = 2.0
_LONG_S = 10.0  # after this a deployment says what it is waiting for


@dataclass(frozen=True)
class Deployment(Generic[T]):
    """A class on its way to be actors. Raises ValueError, TypeError."""

    actor_class: type[T]
    request: JobRequest  # of `job_request`
    if_exists: IfExists
    lifetime: Lifetime | None
    timeout: float | None  # seconds
    logs: bool | None  # whether the program shows what they write; None: as its cluster object does by itself
    over: asyncio.Event = field(default_factory=asyncio.Event)  # it has come to its end, or is taken back

    def __post_init__(self) -> None:
        _check_choice("if_exists", self.if_exists, get_args(IfExists))
        if self.lifetime is not None:
            _check_choice("lifetime", self.lifetime, get_args(Lifetime))
        check_timeout(self.timeout)

    async def run(self, cluster: AsyncCluster) -> AsyncActorPool[T]:
        """The pool, once all its actors have answered."""
        limit = asyncio.timeout(self.timeout)
        why: list[str] = []
        try:
            async with limit:
                return await self._run(cluster, why)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ActorTimeoutError(
                f"{self.request.name} was not there within {self.timeout:g} s, and what was begun of it is taken back"
                f"{''.join(f': {reason}' for reason in why)}"
            ) from None  # what was waited for, step by step, tells nothing more
        finally:
            self.over.set()

    async def wait_over(self) -> None:
        """Return when nothing is left of a deployment that is being cancelled."""
        await wait_set(self.over, _UNDO_TIMEOUT_S)

    async def _run(self, cluster: AsyncCluster, why: list[str]) -> AsyncActorPool[T]:
        name = self.request.name
        pool = AsyncActorPool(cluster, name, actor_class=self.actor_class)
        if await _is_served(pool, self.if_exists):
            return pool
        # The id is chosen here, so that the job is watched from before its beginning.
        pool.job_id = job_id = self.request.job_id or JobId(unique_name(name))
        failure = asyncio.create_task(_end_of_a_task(cluster, job_id), name=f"watch over {name}")
        try:
            await cluster.bus.flush()
            # What has one instance for all does not belong to a program; what a task deploys ends with its attempt all the same.
            has_seat = options_of(self.actor_class).has_seat
            by_itself = self.lifetime is None and has_seat and not cluster.parent_of(self.request)
            lives_on = self.lifetime == "detached" or by_itself
            await launch_owned(cluster, self.request.model_copy(update={"job_id": job_id, "detached": lives_on}))
            cluster.shown.follow(job_id, name, logs=self.logs, lives_on=lives_on)
            await _first(_all_answered(pool, self.request.replicas), failure, _end_of_job(cluster, job_id))
        except JobRefusedError:
            failure.cancel()
            raise
        except BaseException as error:
            failure.cancel()
            is_late = self.timeout is not None and isinstance(error, asyncio.CancelledError)
            why += await asyncio.shield(asyncio.ensure_future(_leave_nothing(pool, is_late=is_late)))
            raise
        return pool


def job_request(
    actor_class: type[object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    *,
    name: str | None,
    replicas: int,
    resources: ResourceConfig | None,
    environment: EnvironmentConfig | None,
) -> JobRequest:
    """A job whose tasks are actors of a class, checked, and pickled as it is now. Raises TypeError, ValueError."""
    check_class(actor_class)
    if not methods_of(actor_class):
        raise TypeError(f"{actor_class.__name__} has no method that could be called: no name without underscore")
    _check_arguments(actor_class, args, kwargs)
    check_replicas(actor_class, replicas)
    chosen = check_name("actor name", name) if name is not None else name_of(actor_class)
    options = options_of(actor_class)
    return JobRequest(
        name=chosen,
        entrypoint=Entrypoint(callable=host, args=(chosen, actor_class, args, dict(kwargs))),
        resources=resources_of(actor_class) if resources is None else check_resources(resources),
        environment=check_environment(environment) or options.environment or EnvironmentConfig(),
        replicas=replicas,
        max_task_failures=replicas,  # the others serve on
        max_retries_failure=options.max_restarts,
        retry_window_s=options.restart_window,
        retry_backoff_s=_RESTART_BACKOFF_S,
    )


async def _is_served(pool: AsyncActorPool[object], if_exists: IfExists) -> bool:
    """True when the pool that serves the name already is to be had; False once none does. Raises ActorNameTakenError."""
    taken = await pool.wait_for_members(0)
    if not taken or if_exists == "get":
        return bool(taken)
    jobs = {member.job_id for member in taken}
    by = f"job {taken[0].job_id}" if taken[0].job_id else "a process outside of any job"
    for job_id in jobs:
        if job_id is None or (if_exists == "error" and not await _has_ended(pool.cluster, job_id)):
            remedy = "" if job_id is None else ', or say if_exists="get" or "replace" (--if-exists)'
            raise ActorNameTakenError(
                f"{pool.name!r} is served already, by {len(taken)} of {by}: choose another with deploy(…, name=…), or end "
                f"those first{remedy}"
            )
    ending = [job_id for job_id in jobs if job_id is not None]
    for job_id in ending:
        await pool.cluster.terminate(job_id, reason=f"{pool.name} is replaced by a newer deployment")
    await pool.cluster.wait(ending)
    roster = await pool.roster()
    while roster.present():  # what those left is being removed
        await roster.change()
    return False


async def _has_ended(cluster: AsyncCluster, job_id: JobId) -> bool:
    try:
        return (await cluster.poll(job_id)).status.finished()
    except JobNotFoundError:
        return False


async def _leave_nothing(pool: AsyncActorPool[object], *, is_late: bool) -> list[str]:
    """Why it was not there yet, if it `is_late` and the reason is known."""
    why: list[str] = []
    if is_late and pool.job_id is not None:
        with contextlib.suppress(FlusterError, TimeoutError):
            async with asyncio.timeout(_EXPLAIN_TIMEOUT_S):
                why.append(await pool.cluster.explain(pool.job_id))
    try:
        await pool.shutdown()
    except FlusterError as error:  # what made the deployment fail says more
        log.info("%s could not be ended: %s", pool, error)
    return why


async def _all_answered(pool: AsyncActorPool[object], replicas: int) -> None:
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
    reason = f": {task.transitions[-1].reason}" if task.transitions else ""
    # What never ran, for want of its image or its packages say, wrote nothing.
    wrote = f"; `fluster logs {task.job_id}` shows what it wrote" if task.has_output else ""
    return ActorDiedError(
        f"task {task.task} of job {task.job_id} ended as {task.state} before its actor answered{reason}{wrote}"
    )


def exception_of(error: TaskError) -> Exception:
    """What a task raised, as itself where that can be had, with the traceback as a note."""
    otherwise = RemoteError(error.type, error.message, error.traceback)
    return restored(error.pickled, otherwise, traceback=error.traceback, where="in the actor's process")


async def _first(*running: Coroutine[object, None, None] | asyncio.Task[None]) -> None:
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


def _check_choice(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option}={value!r} is not known: choose {' or '.join(repr(each) for each in known)}")


def _check_arguments(actor_class: type[object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Raise TypeError here, rather than in a process far away, when the constructor does not take them."""
    try:
        signature = inspect.signature(actor_class)
    except (TypeError, ValueError):  # some classes of C have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        options = sorted(kwargs.keys() & {field.name for field in dataclasses.fields(ActorOptions)})
        hint = f"; {', '.join(options)} belongs into @actor(…) above the class" if options else ""
        raise TypeError(
            f"{actor_class.__name__}{signature} cannot be made from these arguments: {error}{hint}"
        ) from error
