"""The jobs whose tasks are the workers of a pool. Lives on the loop of the cluster's connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from fluster.cluster import AsyncCluster
from fluster.cluster.ownership import launch_owned, release
from fluster.errors import ActorDiedError
from fluster.worker_pool.runner import work
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BusError, ClosedError
from fluster_bus.messages import (
    Entrypoint,
    EnvironmentConfig,
    JobId,
    JobInfo,
    JobRequest,
    ResourceConfig,
    TaskRecord,
)

log = logging.getLogger(__name__)

_PAUSE_S = 1.0  # before the cluster is asked again after an error
# A worker that died is begun anew, since tasks may kill it; one that never gets up must not be begun for ever.
_RESTARTS = 20
_RESTART_BACKOFF_S = 0.1
_START_FAILURES = 3  # of one worker, before any was there: then something is wrong with all of them


@dataclass(frozen=True)
class PoolPlan:
    """What a pool's workers are."""

    name: str
    resources: ResourceConfig
    environment: EnvironmentConfig | None
    task_retries: int
    task_timeout: float | None
    logs: bool | None = None  # whether the program shows what they write; None: as its cluster object does by itself

    def request(self, workers: int) -> JobRequest:
        """The job that runs so many of them."""
        return JobRequest(
            name=self.name,
            entrypoint=Entrypoint(callable=work, args=(self.name,)),
            resources=self.resources,
            environment=self.environment or EnvironmentConfig(),
            replicas=workers,
            max_task_failures=workers,  # the others work on
            max_retries_failure=_RESTARTS,
            retry_backoff_s=_RESTART_BACKOFF_S,
            must_return=True,  # a worker that a task makes leave is begun anew, whatever its exit code
        )


class WorkerJobs:
    """Launches the jobs of one pool and stays until they end. `on_end` gets the reason why there will be no more workers."""

    def __init__(self, cluster: AsyncCluster, plan: PoolPlan, on_end: Callable[[Exception], object]) -> None:
        self._cluster = cluster
        self._plan = plan
        self._on_end = on_end
        self._jobs: dict[asyncio.Task[None], asyncio.Future[JobId]] = {}  # {who stays until it ends: its id}
        self._had_workers = False
        self._launched = 0  # workers

    def launch(self, workers: int) -> None:
        """Launch a job of so many workers."""
        launched: asyncio.Future[JobId] = asyncio.get_running_loop().create_future()
        first, self._launched = self._launched, self._launched + workers
        life = asyncio.create_task(self._live(workers, first, launched), name=f"job of {self._plan.name}")
        self._jobs[life] = launched

    async def job_ids(self) -> list[JobId]:
        """Of all that were to be launched so far. Raises what kept them from being launched."""
        return [await asyncio.shield(launched) for launched in self._jobs.values()]

    def launched(self) -> list[JobId]:
        """The jobs of those that have been launched."""
        return [
            each.result()
            for each in self._jobs.values()
            if each.done() and not each.cancelled() and each.exception() is None
        ]

    def on_workers(self) -> None:
        """There are workers: those that fail from now on were able to begin."""
        self._had_workers = True

    async def _live(self, workers: int, first: int, launched: asyncio.Future[JobId]) -> None:
        """Launch a job and stay until it ends; when the last has ended, what has not been sent then will never be."""
        error: Exception
        try:
            job_id = await launch_owned(self._cluster, self._plan.request(workers))
            self._cluster.shown.follow(job_id, self._plan.name, first=first, logs=self._plan.logs)
            launched.set_result(job_id)
            starting = asyncio.create_task(self._watch_start(job_id), name=f"start of {self._plan.name}")
            try:
                info = await self._wait(job_id)
            finally:
                starting.cancel()
            error = ActorDiedError(f"the workers of {self._plan.name} have ended, as {info.status}{_reason_of(info)}")
        except Exception as caught:
            error = caught
            if not launched.done():
                launched.set_exception(error)
                launched.exception()  # those who wait get it, whether there are any or not
        log.info("workers of %s have ended: %s", self._plan.name, error)
        if all(life.done() or life is asyncio.current_task() for life in self._jobs):
            self._on_end(error)

    async def _watch_start(self, job_id: JobId) -> None:
        """End a job whose workers cannot be begun, before they are tried again for minutes."""
        failed: asyncio.Future[TaskRecord] = asyncio.get_running_loop().create_future()

        def on_record(delivery: Delivery) -> None:
            if delivery.data and not self._had_workers and not failed.done():
                record = TaskRecord.from_json(delivery.data)
                if record.failures >= _START_FAILURES:
                    failed.set_result(record)

        records = subjects.watch_jobs(self._cluster.namespace, f"{job_id}.{subjects.ANY_TOKEN}")
        try:
            subscription = await self._cluster.bus.subscribe(records, on_record)
        except BusError as error:
            log.info("the start of %s is not watched: %s", job_id, error)
            return
        try:
            record = await failed
        finally:
            if self._cluster.bus.connected:
                await subscription.unsubscribe()
        reason = f"a worker failed {record.failures} times before any was there: {record.last_failure}"
        wrote = f"; `fluster logs {job_id}` shows what it wrote" if record.has_output else ""
        self._on_end(ActorDiedError(f"{self._plan.name}: {reason}{wrote}"))
        try:
            await self._cluster.terminate(job_id, reason=reason)
        except BusError as error:
            log.info("%s could not be ended: %s", job_id, error)

    async def _wait(self, job_id: JobId) -> JobInfo:
        """How a job ended, when it has."""
        while True:
            try:
                return await self._cluster.wait(job_id)
            except ClosedError:
                raise
            except BusError as error:  # the workers may go on while their state is not known
                log.info("the state of %s cannot be read: %s", job_id, error)
                await asyncio.sleep(_PAUSE_S)

    async def terminate(self, *, wait: bool) -> None:
        """End those that have not ended; with `wait`, return when they have. Once the cluster object is closed they go on."""
        running = [(life, launched) for life, launched in self._jobs.items() if not life.done()]
        try:
            for _life, launched in running:
                job_id = await asyncio.shield(launched)
                await self._cluster.terminate(job_id, reason=f"{self._plan.name} was shut down")
                release(self._cluster, job_id)
        except ClosedError as error:
            log.info("the workers of %s go on unless their cluster has ended: %s", self._plan.name, error)
            return
        if wait and running:
            await asyncio.wait([life for life, _launched in running])
            for _life, launched in running:
                await self._cluster.shown.finish(await launched)

    def close(self) -> None:
        """Stay no longer; jobs that have not ended go on."""
        for life in self._jobs:
            life.cancel()


def _reason_of(info: JobInfo) -> str:
    return f": {info.error_message}" if info.error_message else ""
