"""A fray client whose jobs and actors are Fluster's."""

from __future__ import annotations

import functools
import threading

from fray.actor import ActorContext, HostedActor
from fray.client import JobAlreadyExists
from fray.types import ActorConfig, EnvironmentConfig, JobRequest, JobStatus, ResourceConfig

from fluster.actors import ActorServer
from fluster.cluster import Cluster, current_cluster
from fluster.cluster.ownership import launch_owned
from fluster.cluster.task.task_context import TaskIdentity
from fluster.cluster.workspaces import with_stored_workspace
from fluster.errors import JobNotFoundError, JobRefusedError
from fluster.integrations.fray import jobs, requests
from fluster.integrations.fray.groups import FlusterActorGroup
from fluster.integrations.fray.handles import FlusterActorHandle
from fluster.integrations.fray.hosting import LAST_CALLS_S, check_servable, host, made, serve
from fluster.integrations.fray.jobs import FlusterJobHandle, client_here
from fluster_bus.core.names import unique_name
from fluster_bus.messages import Entrypoint, JobId
from fluster_bus.messages import EnvironmentConfig as FlusterEnvironment
from fluster_bus.messages import JobRequest as FlusterJobRequest

_LIVE = (JobStatus.PENDING, JobStatus.RUNNING)
_RESTART_BACKOFF_S = 0.1  # before an actor whose process has died gets another


class FlusterClient:
    """fray's client over a Fluster cluster, by default the one that this process belongs to (`current_cluster()`).

    Jobs are jobs, a group of actors is one job with a task for each; launched from within a job, they end with it, and
    groups that a program makes on a shared cluster end with the program, also when it is killed. What fray can ask for
    and Fluster does not have raises NotImplementedError, which names it. The client can be pickled; in another process
    it works over that one's cluster.

    `environment`, one of Fluster's, surrounds the jobs and actors that name none of their own, and those that they
    launch. Its workspace is packed once, when it is first needed.
    """

    def __init__(self, cluster: Cluster | None = None, *, environment: FlusterEnvironment | None = None) -> None:
        if cluster is not None and not isinstance(cluster, Cluster):
            raise TypeError(f"FlusterClient takes a Cluster, not {cluster!r}")
        self.cluster = cluster if cluster is not None else current_cluster()
        self._environment = environment if environment is not None else FlusterEnvironment()
        self._lock = threading.Lock()
        self._groups: list[FlusterActorGroup] = []
        self._servers: list[ActorServer] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.cluster!r})"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return client_here, ()

    # ---- jobs -------------------------------------------------------------------------------------------

    def submit(self, request: JobRequest, adopt_existing: bool = True) -> FlusterJobHandle:
        """Launch a job, whose id is its name; one of a job's own jobs also tells which that is.

        If such a job has not ended yet, it is that one, or, with `adopt_existing=False`, JobAlreadyExists. One that has
        ended gives its name away. Raises NotImplementedError, TypeError, ValueError, and what `Cluster.launch` raises.
        """
        identity = TaskIdentity.from_environment()
        job_id = JobId(requests.name_of(request.name, "" if identity is None else identity.job_id))
        handle = FlusterJobHandle(job_id, self)
        job = requests.job_of(request, jobs.run, self._default()).model_copy(update={"job_id": job_id})
        try:
            self.cluster.launch(job)
        except JobRefusedError as refused:
            if not self._exists(job_id):
                raise
            if handle.status() not in _LIVE:
                self.cluster.launch(job.model_copy(update={"on_conflict": "replace"}))
            elif not adopt_existing:
                raise JobAlreadyExists(request.name, handle) from refused
        return handle

    def _default(self) -> FlusterEnvironment:
        """The environment of who names none, as it travels."""
        with self._lock:
            if self._environment.workspace is not None:
                asynchronous = self.cluster.asynchronous
                self._environment = self.cluster.portal.run(
                    with_stored_workspace, asynchronous.bus, asynchronous.namespace, self._environment
                )
            return self._environment

    def _exists(self, job_id: JobId) -> bool:
        try:
            self.cluster.poll(job_id)
        except JobNotFoundError:
            return False
        return True

    # ---- actors -----------------------------------------------------------------------------------------

    def host_actor(
        self,
        actor_class: type,
        *args: object,
        name: str,
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008 - as the protocol has it
        **kwargs: object,
    ) -> HostedActor:
        """Make the actor in this process, and serve it from here until `shutdown()` of what is returned."""
        check_servable(actor_class)
        actor_name = unique_name(requests.name_of(name))
        identity = TaskIdentity.from_environment()
        handle = FlusterActorHandle(actor_name, 0 if identity is None else identity.task, self)
        context = ActorContext(handle=handle, index=0, group_name=name)
        instance = made(context, self, actor_class, args, kwargs)
        server = ActorServer(self.cluster)
        serve(server, actor_name, instance, self, actor_config.max_concurrency)
        server.serve_background()
        with self._lock:
            self._servers.append(server)
        return HostedActor(handle, stop=functools.partial(server.shutdown, LAST_CALLS_S))

    def create_actor(
        self,
        actor_class: type,
        *args: object,
        name: str,
        resources: ResourceConfig = ResourceConfig(),  # noqa: B008 - as the protocol has it
        actor_config: ActorConfig = ActorConfig(),  # noqa: B008
        environment: EnvironmentConfig | None = None,
        **kwargs: object,
    ) -> FlusterActorHandle:
        """An actor, once it takes calls. Raises as `create_actor_group` and its `wait_ready` do; then nothing is
        left.
        """
        group = self.create_actor_group(
            actor_class,
            *args,
            name=name,
            count=1,
            resources=resources,
            actor_config=actor_config,
            environment=environment,
            **kwargs,
        )
        try:
            return group.wait_ready()[0]
        except BaseException:
            group.shutdown()
            raise

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
    ) -> FlusterActorGroup:
        """`count` actors, which come up as there is room for them. Their names are made unique.

        Raises NotImplementedError, TypeError for what cannot be pickled or served, ValueError, and what
        `Cluster.launch` raises.
        """
        check_servable(actor_class)
        default = self._default()
        job_id = JobId(unique_name(requests.name_of(name)))
        retries = actor_config.max_task_retries or 0
        restarts = {} if actor_config.max_restarts is None else {"max_retries_preemption": actor_config.max_restarts}
        request = FlusterJobRequest(
            name=job_id,
            job_id=job_id,
            entrypoint=Entrypoint(
                callable=host,
                args=(str(job_id), name, actor_class, args, kwargs),
                kwargs={"max_concurrency": actor_config.max_concurrency, "environment": default},
            ),
            resources=requests.resources_of(resources),
            environment=requests.environment_of(environment, resources, default),
            replicas=count,
            gang=requests.is_slice(resources, count),
            max_retries_failure=retries,
            retry_backoff_s=_RESTART_BACKOFF_S,
            must_return=True,  # one that a method makes leave has failed, whatever its exit code
            priority=requests.priority_of(actor_config.priority),
            **restarts,
        )
        self.cluster.portal.run(launch_owned, self.cluster.asynchronous, request)
        group = FlusterActorGroup(job_id, count, self)
        with self._lock:
            self._groups.append(group)
        return group

    def shutdown(self, wait: bool = True) -> None:
        """End the actors that this client made; with `wait`, return when they have ended.

        Jobs go on, and the cluster stays connected.
        """
        with self._lock:
            groups, self._groups = self._groups, []
            servers, self._servers = self._servers, []
        for server in servers:
            server.shutdown(LAST_CALLS_S)
        for group in groups:
            group.terminate()
        for group in groups if wait else ():
            group.shutdown()
