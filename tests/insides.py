"""The private parts that tests look into, each opened at one place, with the reason for it."""

from __future__ import annotations

from typing import Any

from fluster.actors.client.caller import Caller
from fluster.actors.pool.blocking_pool import ActorPool
from fluster.actors.server.host import Served
from fluster.actors.server.server import ActorServer
from fluster.cluster.local import LocalCluster
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.nats_client import QuickClient


def caller_of(pool: ActorPool[Any]) -> Caller:
    """What routes a pool's calls; which way a call goes shows in its time alone."""
    return pool.asynchronous._caller


def served_by(server: ActorServer) -> list[Served]:
    """The actors of a server."""
    return server._actors


def nats_client_of(bus: Bus) -> QuickClient:
    """What a bus is connected by: to close it without its knowing, and to see what it subscribes to."""
    return bus._nats


def supervisor_pid(cluster: LocalCluster) -> int:
    """The process that starts a local cluster's daemons."""
    return cluster._supervisor._process.pid
