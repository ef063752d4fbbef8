"""Actors: classes whose instances serve calls from anywhere in the cluster, and the pools that call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluster.actors.definition.context import ActorContext
from fluster.actors.definition.definition import actor, method
from fluster.actors.deploy.deploying import deploy
from fluster_bus.core.lazy_imports import lazy_names

if TYPE_CHECKING:
    from fluster.actors.client.broadcast import Answer, AsyncBroadcastResult, BroadcastResult
    from fluster.actors.definition.timers import every
    from fluster.actors.pool.blocking_pool import ActorPool, ClusterResolver, FixedResolver, Resolver
    from fluster.actors.pool.handles import ActorHandle, AsyncActorHandle, Verb
    from fluster.actors.pool.pool import AsyncActorPool
    from fluster.actors.protocol.members import Member, MemberState
    from fluster.actors.results.futures import ActorFuture
    from fluster.actors.results.reader import ActorStream
    from fluster.actors.server.server import ActorServer

__all__ = [
    "ActorContext",
    "ActorFuture",
    "ActorHandle",
    "ActorPool",
    "ActorServer",
    "ActorStream",
    "Answer",
    "AsyncActorHandle",
    "AsyncActorPool",
    "AsyncBroadcastResult",
    "BroadcastResult",
    "ClusterResolver",
    "FixedResolver",
    "Member",
    "MemberState",
    "Resolver",
    "Verb",
    "actor",
    "deploy",
    "every",
    "method",
]

# The rest is found when asked for: a script that starts a cluster of its own has no use for it before.
if not TYPE_CHECKING:
    __getattr__ = lazy_names(
        __name__,
        {
            "pool.blocking_pool": ("ActorPool", "ClusterResolver", "FixedResolver", "Resolver"),
            "client.broadcast": ("Answer", "AsyncBroadcastResult", "BroadcastResult"),
            "results.futures": ("ActorFuture",),
            "pool.handles": ("ActorHandle", "AsyncActorHandle", "Verb"),
            "protocol.members": ("Member", "MemberState"),
            "pool.pool": ("AsyncActorPool",),
            "results.reader": ("ActorStream",),
            "server.server": ("ActorServer",),
            "definition.timers": ("every",),
        },
    )
