"""Having the cluster run a class as actors.

Imports next to nothing, as programs import it before they start a LocalCluster.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from fluster.cluster.blocking import Cluster
from fluster.cluster.client import AsyncCluster
from fluster_bus.core.lazy_imports import import_later

if TYPE_CHECKING:
    from fluster.actors.deploy.deployment import IfExists, Lifetime
    from fluster.actors.pool.blocking_pool import ActorPool
    from fluster.actors.pool.pool import AsyncActorPool
    from fluster_bus.messages import EnvironmentConfig, ResourceConfig

import_later("fluster.actors.pool.blocking_pool", "fluster.actors.deploy.deployment")

T = TypeVar("T")
Options = ParamSpec("Options")


class _Deploy(Protocol[Options]):
    """`deploy` as type checkers see it: what it returns depends on the cluster."""

    @overload
    def __call__(
        self, cluster: Cluster, actor_class: type[T], /, *args: Options.args, **options: Options.kwargs
    ) -> ActorPool[T]: ...
    @overload
    def __call__(
        self, cluster: AsyncCluster, actor_class: type[T], /, *args: Options.args, **options: Options.kwargs
    ) -> Coroutine[object, None, AsyncActorPool[T]]: ...


def _for_either_cluster(
    function: Callable[Concatenate[Cluster | AsyncCluster, type[Any], Options], object],
) -> _Deploy[Options]:
    return cast("_Deploy[Options]", function)


@_for_either_cluster
def deploy(
    cluster: Cluster | AsyncCluster,
    actor_class: type[T],
    /,
    *args: object,
    name: str | None = None,
    replicas: int = 1,
    resources: ResourceConfig | None = None,
    environment: EnvironmentConfig | None = None,
    if_exists: IfExists = "error",
    lifetime: Lifetime | None = None,
    timeout: float | None = None,
    logs: bool | None = None,
    **kwargs: object,
) -> ActorPool[T] | Coroutine[object, None, AsyncActorPool[T]]:
    """A pool of `replicas` actors, each an instance `actor_class(*args, **kwargs)` in a process of its own.

    Returns when all have answered; with an AsyncCluster it is awaited. `name`, `resources` and `environment` are the class's,
    as `@actor(…)` says, unless given here. Options of deploy() are not passed to the constructor, which may be given arguments
    of those names by position.

    If the name is served already, `if_exists` says what to do: "error"; "get" the pool that is there, as it is; "replace" it,
    which ends the job that serves the name first.

    The actors live until `pool.shutdown()`, the end of `with deploy(…) as pool`, or the end of what deployed them: a task's
    attempt, else this program (`lifetime="program"`). With `lifetime="detached"` they live on, as durable actors and singletons
    do by themselves when no job deploys them.

    `timeout` is in seconds: then what was begun is taken back and ActorTimeoutError (a TimeoutError) says why it took so long.
    Ctrl-C takes it back as well.

    With `logs` what they write comes to this program's stderr, after `name[index] |`; a LocalCluster does so
    by itself, see there. `pool.logs()` has all of it.

    Raises what a constructor raised, ActorNameTakenError, JobRefusedError, and JobFailedError when the actors could
    not be run; then nothing of them is left. An `actor_class` that is not a class, or arguments that it does not take, are a TypeError.
    """
    from fluster.actors.deploy.deployment import Deployment, job_request
    from fluster.actors.pool.blocking_pool import ActorPool

    if not isinstance(cluster, Cluster | AsyncCluster):
        raise TypeError(f"deploy() takes a cluster first, not {cluster!r}: write deploy(cluster, TheClass, …)")
    request = job_request(
        actor_class, args, kwargs, name=name, replicas=replicas, resources=resources, environment=environment
    )
    deployment = Deployment(actor_class, request, if_exists, lifetime, timeout, logs)
    if isinstance(cluster, AsyncCluster):
        return deployment.run(cluster)
    try:
        asynchronous = cluster.portal.run(deployment.run, cluster.asynchronous)
    except KeyboardInterrupt:
        cluster.portal.run(deployment.wait_over)
        raise
    return ActorPool(cluster, asynchronous.name, actor_class=actor_class, job_id=asynchronous.job_id)
