"""Handles of actors: what `client.create_actor` gives, and what actors pass to each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fray.current_client import set_current_client

from fluster.actors import ActorFuture, ActorPool
from fluster.actors.protocol.members import Member
from fluster.errors import ActorDiedError, ActorNotFoundError, ConnectionLostError
from fluster.integrations.fray.jobs import client_here
from fluster.integrations.fray.versions import ActorUnavailableError

if TYPE_CHECKING:
    from fluster.integrations.fray.client import FlusterClient

_UNAVAILABLE = (ActorDiedError, ActorNotFoundError, ConnectionLostError)


class FlusterActorHandle:
    """An actor of a group, by its rank there: it stays the same when the actor's process is begun anew.

    `handle.method.remote(…)` and `handle.method.submit(…)` give a future, `handle.method(…)` the result. It can be
    pickled; in another process it works over that one's cluster.
    """

    def __init__(self, actor_name: str, index: int, client: FlusterClient | None = None) -> None:
        self._actor_name = actor_name
        self._index = index
        self._client = client
        self._pool: ActorPool[Any] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._actor_name}[{self._index}]>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlusterActorHandle):
            return NotImplemented
        return (self._actor_name, self._index) == (other._actor_name, other._index)

    def __hash__(self) -> int:
        return hash((self._actor_name, self._index))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _handle, (self._actor_name, self._index)

    def __getattr__(self, name: str) -> FlusterActorMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return FlusterActorMethod(self, name)

    def _bound(self) -> tuple[FlusterClient, ActorPool[object]]:
        """Found when it is first used: the receiver of a handle need not know yet where its cluster is."""
        if self._client is None:
            self._client = client_here()
        if self._pool is None:
            self._pool = ActorPool(
                self._client.cluster, self._actor_name, policy=_ByRank(self._actor_name, self._index)
            )
        return self._client, self._pool


def _handle(actor_name: str, index: int) -> FlusterActorHandle:
    return FlusterActorHandle(actor_name, index, client_here(only_if_set=True))


class FlusterActorMethod:
    """A method of one actor."""

    def __init__(self, handle: FlusterActorHandle, name: str) -> None:
        self._handle = handle
        self._name = name

    def remote(self, *args: object, **kwargs: object) -> FlusterActorFuture:
        """Call it; the result comes with the future. Raises TypeError for arguments that cannot be pickled."""
        client, pool = self._handle._bound()  # noqa: SLF001 - its twin's
        return FlusterActorFuture(getattr(pool.submit(), self._name)(*args, **kwargs), client)

    def submit(self, *args: Any, **kwargs: Any) -> FlusterActorFuture:
        """The same: no call holds a connection of its own, however long it runs."""
        return self.remote(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method returns; what it raises is raised, and ActorUnavailableError when its actor is not there."""
        client, pool = self._handle._bound()  # noqa: SLF001 - its twin's
        with _read_by(client):
            return getattr(pool.call(), self._name)(*args, **kwargs)


class FlusterActorFuture:
    """The answer of an actor."""

    def __init__(self, future: ActorFuture[object], client: FlusterClient) -> None:
        self._future = future
        self._client = client

    def result(self, timeout: float | None = None) -> Any:
        """What the method returned; what it raised is raised.

        Raises TimeoutError after `timeout` seconds: the call goes on, and may be waited for again.
        ActorUnavailableError when the actor is not there, or has ended while the call was out.
        """
        with _read_by(self._client):
            return self._future.result(timeout)

    def done(self) -> bool:
        """Whether it has been answered."""
        return self._future.done()


@contextlib.contextmanager
def _read_by(client: FlusterClient) -> Iterator[None]:
    """Handles in an answer are that client's, and Fluster's word for an actor that is not there becomes fray's."""
    try:
        with set_current_client(client):
            yield
    except _UNAVAILABLE as error:
        raise ActorUnavailableError(str(error)) from error


class _ByRank:
    """Chooses one member, whichever process it is in."""

    def __init__(self, actor_name: str, index: int) -> None:
        self._actor_name = actor_name
        self._index = index

    def choose(self, members: Sequence[Member], out: Mapping[str, int]) -> Member:  # noqa: ARG002
        for member in members:
            if member.task == self._index:
                return member
        raise ActorNotFoundError(f"actor {self._index} of {self._actor_name!r} is not there at the moment")
