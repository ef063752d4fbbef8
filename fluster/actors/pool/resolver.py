"""How a name becomes a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fluster.actors.pool.blocking_pool import ActorPool
from fluster.actors.protocol.members import Member
from fluster.cluster import Cluster
from fluster.errors import ActorNotFoundError
from fluster_bus.core.names import near


class Resolver(Protocol):
    """Finds the actors of a name."""

    def lookup(self, name: str) -> ActorPool[Any]:
        """The pool of that name."""
        ...


class ClusterResolver:
    """Finds actors in the cluster's registry; the pool follows the members that come and go."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def lookup(self, name: str) -> ActorPool[Any]:
        """The pool of that name, which may be empty as yet."""
        return ActorPool(self._cluster, name)


class FixedResolver:
    """Finds actors at addresses that are given: `{name: address or [addresses]}`, as `pool.members()` tells them."""

    def __init__(self, addresses: Mapping[str, str | Sequence[str]], cluster: Cluster) -> None:
        self._members = {
            name: tuple(Member.at(name, each) for each in ([given] if isinstance(given, str) else given))
            for name, given in addresses.items()
        }
        self._cluster = cluster

    def lookup(self, name: str) -> ActorPool[Any]:
        """The pool of that name. Raises ActorNotFoundError when no address was given for it."""
        if name not in self._members:
            raise ActorNotFoundError(f"no address was given for {name!r}{near(name, self._members)}")
        return ActorPool(self._cluster, name, fixed=self._members[name])
