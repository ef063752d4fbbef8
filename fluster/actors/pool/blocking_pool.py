"""Pools for programs that block, and how a name becomes one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar

from fluster.actors.client.broadcast import BroadcastResult
from fluster.actors.definition.definition import check_timeout
from fluster.actors.pool.handles import ActorHandle, Methods, Verb, member_id
from fluster.actors.pool.pool import AsyncActorPool, no_attribute
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import Policy
from fluster.actors.results.futures import result_of
from fluster.actors.results.maps import MAX_OUT, MapResults, UnorderedMapResults
from fluster.cluster import Cluster
from fluster.cluster.blocking_methods import blocking, blocking_iterator
from fluster.errors import ActorNotFoundError, ForkedError
from fluster_bus.core.errors import ClosedError, FlusterError
from fluster_bus.core.names import near
from fluster_bus.messages import JobId

if TYPE_CHECKING:
    from fluster.cluster.portal import Portal

T_co = TypeVar("T_co", covariant=True)

_PATIENCE_S = 2.0  # to show a pool must not wait for a cluster that does not answer


class ActorPool(Generic[T_co]):
    """All actors that serve `name`; their methods are called as if they were here. Use it from any thread.

    `policy` chooses the member for a call: "round-robin" (unless told otherwise), "least" (the one with the fewest calls
    of this client), "random", or an object of your own (fluster.actors.protocol.policies).

    It can be pickled: where it is unpickled it finds the same actors, by `current_cluster()`.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        actor_class: type[T_co] | None = None,
        job_id: JobId | None = None,
        policy: str | Policy | None = None,
        fixed: tuple[Member, ...] | None = None,
    ) -> None:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"ActorPool takes a Cluster, not {cluster!r}: for an AsyncCluster take AsyncActorPool")
        self.portal: Portal = cluster.portal
        self.asynchronous: AsyncActorPool[T_co] = AsyncActorPool(
            cluster.asynchronous,
            name,
            actor_class=actor_class,
            job_id=job_id,
            loop=cluster.portal.loop,
            policy=policy,
            fixed=fixed,
        )
        self.asynchronous.use_lane()
        # Made once, which an AsyncActorPool could not: it would be kept by what it keeps.
        submit, broadcast = self.asynchronous.submit_call, self.asynchronous._offer_broadcast  # noqa: SLF001
        self._call = Verb[T_co](self.asynchronous, "call", lambda *call: result_of(submit(*call, alone=True)))
        self._submit = Verb[Any](self.asynchronous, "submit", submit)
        self._broadcast = Verb[Any](self.asynchronous, "broadcast", lambda *call: BroadcastResult(*broadcast(*call)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def _repr_html_(self) -> str:
        """What notebooks show: its members, asked for now."""
        heading = f"ActorPool {self.name}"
        try:
            return self.portal.run(_live_view, heading, self.asynchronous)
        except (ClosedError, ForkedError) as error:
            return _still_view(heading, error)

    def __getattr__(self, name: str) -> NoReturn:
        asynchronous = vars(self).get("asynchronous")
        raise no_attribute(self, name, None if asynchronous is None else asynchronous._methods)  # noqa: SLF001

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _found_again, (self.name, self.asynchronous.recipe)

    @property
    def name(self) -> str:
        return self.asynchronous.name

    @property
    def job_id(self) -> JobId | None:
        """The job whose tasks the actors are, if `deploy` started them."""
        return self.asynchronous.job_id

    @property
    def call(self) -> Verb[T_co]:
        """`pool.call().method(…)`: one member after the other, chosen at each call; its result.

        Raises what the method raises; ActorNotFoundError at once when no actor serves the name; ActorDiedError,
        ConnectionLostError, MailboxFullError; ActorTimeoutError (a TimeoutError) after `call(timeout=…)` seconds.
        """
        return self._call

    @property
    def submit(self) -> Verb[Any]:
        """`pool.submit().method(…)`: the same, as an ActorFuture."""
        return self._submit

    @property
    def broadcast(self) -> Verb[Any]:
        """`pool.broadcast().method(…)`: every member; a BroadcastResult."""
        return self._broadcast

    def map(self, *, max_out: int = MAX_OUT, timeout: float | None = None) -> Any:
        """`for result in pool.map().method(items)`: results in the order of the items.

        The method is called for each item, or with one of each of several iterables, `max_out` at a time. Items are taken
        as results are asked for. What a call raised is raised in its turn, and the iterator goes on after it; `close()`
        ends it.
        """
        return Methods(
            self.asynchronous, self.asynchronous.mapped(MapResults, max_out), check_timeout(timeout), wait=True
        )

    def map_unordered(self, *, max_out: int = MAX_OUT, timeout: float | None = None) -> Any:
        """As `map`, each result as it comes."""
        return Methods(
            self.asynchronous, self.asynchronous.mapped(UnorderedMapResults, max_out), check_timeout(timeout), wait=True
        )

    def on(self, key: object) -> ActorHandle[T_co]:
        """`pool.on(key).call().method(…)`: for each key always the same member while it lives, for every client.

        Raises TypeError for a key other than text, bytes, int, bool, or a tuple of these.
        """
        return ActorHandle(self, None, key)

    def to(self, member: Member | str) -> ActorHandle[T_co]:
        """`pool.to(member).call().method(…)`: that one of `members()`, which may also be given by its endpoint's id."""
        return ActorHandle(self, member_id(self.name, member), None)

    members = blocking(AsyncActorPool[object].members)
    wait_for_size = blocking(AsyncActorPool[object].wait_for_size)
    logs = blocking_iterator(AsyncActorPool[object].logs)
    shutdown = blocking(AsyncActorPool[object].shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.shutdown()

    @property
    def size(self) -> int:
        """How many members take calls now."""
        return len(self.portal.run(self.asynchronous.wait_for_members, 0))


def _found_again(name: str, recipe: dict[str, Any]) -> ActorPool[Any]:
    from fluster.cluster import current_cluster

    return ActorPool(current_cluster(), name, **recipe)


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


def _still_view(heading: str, state: object) -> str:
    """HTML of a pool of which no more is known."""
    from fluster_bus.messages.notebook import view  # which only notebooks need

    return view(heading, {"state": state})


async def _live_view(heading: str, pool: AsyncActorPool[object]) -> str:
    """HTML of a pool and its members, if the cluster answers soon."""
    from fluster_bus.messages.notebook import table, view

    try:
        async with asyncio.timeout(_PATIENCE_S):
            members = await pool.members()
    except (FlusterError, TimeoutError) as error:
        return _still_view(heading, f"unknown: {str(error) or f'nothing came in {_PATIENCE_S:g} s'}")
    columns = ("member", "state", "worker", "job", "restarts", "last error")
    return view(heading, {"members": f"{len(members):,}"}, table(columns, [*map(_row, members)]))


def _row(member: Member) -> tuple[object, ...]:
    return member.endpoint_id, member.state, member.worker_id, member.job_id, member.restarts, member.last_error
