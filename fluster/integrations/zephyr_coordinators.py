"""Zephyr's coordinators in the process that waits for them. Its versions ask for one in different ways."""

from __future__ import annotations

from collections.abc import Callable

from fray.actor import ActorGroup, ActorHandle, HostedActor
from fray.client import JobHandle
from fray.current_client import set_current_client
from fray.types import ActorConfig, EnvironmentConfig, JobRequest, JobStatus, ResourceConfig

from fluster.integrations.fray import FlusterClient
from fluster_bus.messages.jobs import MAX_REPLICAS

_COORDINATOR_JOB: Callable[..., None] | None = None

try:  # from 0.2.227 on a coordinator is an actor of its own
    from zephyr.context import MAX_IRIS_WORKER_REPLICAS as MAX_WORKERS
    from zephyr.context import ZephyrContext
    from zephyr.coordinator import ZephyrCoordinator
except ImportError:  # in 0.2.20 it is hosted by a job, which launches the workers too
    from zephyr.execution import ZephyrContext, ZephyrCoordinator, _run_coordinator_job

    _COORDINATOR_JOB = _run_coordinator_job
    MAX_WORKERS = MAX_REPLICAS

__all__ = ["MAX_WORKERS", "PipelineClient", "ZephyrContext"]


class PipelineClient(FlusterClient):
    """A fray client for a ZephyrContext whose coordinator runs in this process, which waits for it anyway.

    So its pool has its first worker sooner, what the coordinator logs is seen here, and it needs no room on the
    cluster. When this process is killed, its workers end with the shards that they are at.
    """

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> JobHandle:
        """As a FlusterClient's, but for coordinators."""
        called = request.entrypoint.callable_entrypoint
        if called is not None and called.callable is _COORDINATOR_JOB:
            return _CoordinatorJob(request.name, lambda: self._run(called.callable, called.args))
        return super().submit(request, adopt_existing)

    def _run(self, function: Callable[..., None], args: tuple[object, ...]) -> None:
        with set_current_client(self):
            function(*args)

    def create_actor_group(
        self,
        actor_class: type,
        *args: object,
        name: str,
        count: int,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008 - as the protocol has it
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        environment: EnvironmentConfig | None = None,
        **kwargs: object,
    ) -> ActorGroup:
        """As a FlusterClient's, but for coordinators."""
        if actor_class is ZephyrCoordinator:
            return _Coordinator(self.host_actor(actor_class, *args, name=name, actor_config=actor_config, **kwargs))
        return super().create_actor_group(
            actor_class,
            *args,
            name=name,
            count=count,
            resources=resources,
            actor_config=actor_config,
            environment=environment,
            **kwargs,
        )


class _Coordinator:
    """A group of one, which is there."""

    def __init__(self, hosted: HostedActor) -> None:
        self._hosted = hosted

    def wait_ready(self, count: int | None = None, timeout: float | None = None) -> list[ActorHandle]:  # noqa: ARG002
        return [self._hosted.handle]

    def shutdown(self) -> None:
        self._hosted.shutdown()


class _CoordinatorJob:
    """A job that is run by waiting for it."""

    def __init__(self, job_id: str, run: Callable[[], None]) -> None:
        self.job_id = job_id
        self._run = run

    def wait(self, timeout: float | None = None, *, raise_on_failure: bool = True) -> JobStatus:  # noqa: ARG002
        self._run()
        return JobStatus.SUCCEEDED

    def terminate(self) -> None:
        """It is over: its waiting caller has ended it."""
