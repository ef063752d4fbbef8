"""Actors: classes whose instances serve calls from anywhere in the cluster, and the pools that call them."""

from fluster.actors.broadcast import AsyncBroadcastResult, BroadcastResult
from fluster.actors.context import ActorContext
from fluster.actors.definition import actor, method
from fluster.actors.deploy import deploy
from fluster.actors.futures import ActorFuture
from fluster.actors.members import Member, MemberState
from fluster.actors.pool import ActorPool, AsyncActorPool
from fluster.actors.reader import ActorStream
from fluster.actors.resolver import ClusterResolver, FixedResolver, Resolver
from fluster.actors.server import ActorServer
from fluster.actors.timers import every

__all__ = [
    "ActorContext",
    "ActorFuture",
    "ActorPool",
    "ActorServer",
    "ActorStream",
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
