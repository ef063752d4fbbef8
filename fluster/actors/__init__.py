"""Actors: classes whose instances serve calls from anywhere in the cluster, and the pools that call them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluster.actors.context import ActorContext
from fluster.actors.definition import actor, method
from fluster.actors.deploying import deploy
from fluster.later import names_of

if TYPE_CHECKING:
    from fluster.actors.blocking_pool import ActorPool
    from fluster.actors.broadcast import Answer, AsyncBroadcastResult, BroadcastResult
    from fluster.actors.futures import ActorFuture
    from fluster.actors.handles import ActorHandle, AsyncActorHandle
    from fluster.actors.members import Member, MemberState
    from fluster.actors.pool import AsyncActorPool
    from fluster.actors.reader import ActorStream
    from fluster.actors.resolver import ClusterResolver, FixedResolver, Resolver
    from fluster.actors.server import ActorServer
    from fluster.actors.timers import every

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
    "actor",
    "deploy",
    "every",
    "method",
]

# The rest is found when asked for: a script that starts a cluster of its own has no use for it before.
if not TYPE_CHECKING:
    __getattr__ = names_of(
        __name__,
        blocking_pool=("ActorPool",),
        broadcast=("Answer", "AsyncBroadcastResult", "BroadcastResult"),
        futures=("ActorFuture",),
        handles=("ActorHandle", "AsyncActorHandle"),
        members=("Member", "MemberState"),
        pool=("AsyncActorPool",),
        reader=("ActorStream",),
        resolver=("ClusterResolver", "FixedResolver", "Resolver"),
        server=("ActorServer",),
        timers=("every",),
    )
