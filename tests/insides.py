"""The private parts that tests look into, each opened at one place, with the reason for it."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from fluster.actors.client.caller import Caller
from fluster.actors.pool.blocking_pool import ActorPool
from fluster.actors.server.host import Served
from fluster.actors.server.server import ActorServer
from fluster.cluster.blocking import Cluster
from fluster.cluster.local import LocalCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.nats_client import QuickClient


def caller_of(pool: ActorPool[Any]) -> Caller:
    """What routes a pool's calls; which way a call goes shows in its time alone."""
    return pool.asynchronous._caller  # noqa: SLF001 - users of a pool have no use for it, and must not close it


def served_by(server: ActorServer) -> list[Served]:
    """The actors of a server."""
    return server._actors  # noqa: SLF001 - what an actor's timers and mailboxes do is not seen by its clients


def nats_client_of(bus: Bus) -> QuickClient:
    """What a bus is connected by: to close it without its knowing, and to see what it subscribes to."""
    return bus._nats  # noqa: SLF001 - all else goes through the bus, so that it can be exchanged


def subscriptions_of(bus: Bus) -> list[str]:
    """The subjects that a bus is subscribed to."""
    return [each.subject for each in nats_client_of(bus)._subs.values()]  # noqa: SLF001 - nats-py does not list them


def refs_put_by(cluster: Cluster) -> Mapping[str, bytes]:
    """The payloads of the refs that were put and live: {id: payload}."""
    return cluster.asynchronous._refs._put  # noqa: SLF001 - that they are let go shows in memory alone


def mailbox_of(server: ActorServer) -> Sized:
    """The mailbox of a server's only actor, for the methods that have no group of their own."""
    return served_by(server)[0].actor._groups[None].mailbox  # noqa: SLF001 - calls in it are not seen by clients


def supervisor_pid(cluster: LocalCluster) -> int:
    """The process that starts a local cluster's daemons."""
    return cluster._supervisor._process.pid  # noqa: SLF001 - to be killed, as no user does
