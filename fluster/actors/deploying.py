"""Having the cluster run a class as actors.

Imports next to nothing, as programs import it before they start a LocalCluster.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, overload

from fluster.cluster.blocking import Cluster
from fluster.cluster.client import AsyncCluster
from fluster.later import import_later

if TYPE_CHECKING:
    from fluster.actors.blocking_pool import ActorPool
    from fluster.actors.pool import AsyncActorPool

import_later("fluster.actors.blocking_pool", "fluster.actors.deployment")

T = TypeVar("T")


@overload
def deploy(
    cluster: Cluster,
    actor_class: type[T],
    /,
    *args: Any,
    name: str | None = None,
    replicas: int = 1,
    logs: bool | None = None,
    **kwargs: Any,
) -> ActorPool[T]: ...
@overload
def deploy(
    cluster: AsyncCluster,
    actor_class: type[T],
    /,
    *args: Any,
    name: str | None = None,
    replicas: int = 1,
    logs: bool | None = None,
    **kwargs: Any,
) -> Coroutine[Any, Any, AsyncActorPool[T]]: ...
def deploy(
    cluster: Cluster | AsyncCluster,
    actor_class: type[T],
    /,
    *args: Any,
    name: str | None = None,
    replicas: int = 1,
    logs: bool | None = None,
    **kwargs: Any,
) -> ActorPool[T] | Coroutine[Any, Any, AsyncActorPool[T]]:
    """A pool of `replicas` actors, each an instance `actor_class(*args, **kwargs)` in a process of its own.

    Returns when all have answered; with an AsyncCluster it is awaited. `name` is the class's unless given; resources
    and the like stand in `@actor(…)`. Called from within a job, the actors end with it; else they live until
    `pool.shutdown()`. With `logs` what they write comes to this program's stderr, after `name[index] |`; a LocalCluster does so
    by itself, see there. `pool.logs()` has all of it.

    Raises what a constructor raised, ActorNameTakenError, JobRefusedError, and JobFailedError when the actors could
    not be run; then nothing of them is left. What is no class, or arguments that it does not take, is a TypeError.
    """
    from fluster.actors.blocking_pool import ActorPool
    from fluster.actors.deployment import Deployment

    if not isinstance(cluster, Cluster | AsyncCluster):
        raise TypeError(f"deploy() takes a cluster first, not {cluster!r}: write deploy(cluster, TheClass, …)")
    deployment = Deployment.of(actor_class, args, kwargs, name=name, replicas=replicas, logs=logs)
    if isinstance(cluster, AsyncCluster):
        return deployment.run(cluster)
    asynchronous = cluster.portal.run(deployment.run, cluster.asynchronous)
    return ActorPool(cluster, asynchronous.name, actor_class=actor_class, job_id=asynchronous.job_id)
