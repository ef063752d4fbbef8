"""Some of a pool: one member, or whoever has a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fluster.actors.pool.verbs import Verb
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import Policy
from fluster.actors.results.futures import ActorFuture, result_of
from fluster.errors import NotRunError

if TYPE_CHECKING:
    from fluster.actors.pool.blocking_pool import ActorPool
    from fluster.actors.pool.pool import AsyncActorPool

T = TypeVar("T")


class AsyncActorHandle(Generic[T]):
    """`pool.to(member)` or `pool.on(key)`: its `call()` and `submit()` are the pool's, for that member.

    It can be pickled, as its pool can.
    """

    def __init__(self, pool: AsyncActorPool[T], member: str | None, key: object, policy: Policy | None) -> None:
        self._pool = pool
        self._member = member
        self._key = key
        self._policy = policy

    def __repr__(self) -> str:
        return f"{self._pool!r}{_shown(self._member, self._key)}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _found_again, (self._pool, self._member, self._key)

    @property
    def call(self) -> Verb[Any]:
        """`await handle.call().method(…)`"""
        return Verb(self._pool, "call", self._submit)

    @property
    def submit(self) -> Verb[Any]:
        """`handle.submit().method(…)`: an ActorFuture."""
        return Verb(self._pool, "submit", self._submit)

    def _submit(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
        wait: bool,
        *,
        alone: bool = False,
    ) -> ActorFuture[Any]:
        return self._pool.submit_call(
            method, args, kwargs, timeout, wait, pinned=self._member, policy=self._policy, alone=alone
        )


class ActorHandle(Generic[T]):
    """`pool.to(member)` or `pool.on(key)`: its `call()` and `submit()` are the pool's, for that member.

    It can be pickled, as its pool can.
    """

    def __init__(self, pool: ActorPool[T], member: str | None, key: object) -> None:
        self._pool = pool
        self._member = member
        self._key = key
        inner = pool.asynchronous
        self.asynchronous: AsyncActorHandle[T] = inner.to(member) if member is not None else inner.on(key)

    def __repr__(self) -> str:
        return f"{self._pool!r}{_shown(self._member, self._key)}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _found_again, (self._pool, self._member, self._key)

    @property
    def call(self) -> Verb[T]:
        """`handle.call().method(…)`: its result. Raises as `pool.call` does, and NotRunError when the member is gone."""
        submit = self.asynchronous._submit  # noqa: SLF001 - its twin's
        return Verb(self._pool.asynchronous, "call", lambda *call: result_of(submit(*call, alone=True)))

    @property
    def submit(self) -> Verb[Any]:
        """`handle.submit().method(…)`: an ActorFuture."""
        return self.asynchronous.submit


def _shown(member: str | None, key: object) -> str:
    return f".on({key!r})" if member is None else f".to({member!r})"


def _found_again(pool: Any, member: str | None, key: object) -> Any:
    return pool.to(member) if member is not None else pool.on(key)


def member_id(pool: str, member: Member | str) -> str:
    """The endpoint of a member. Raises TypeError, ValueError for one of another pool, NotRunError for one that has none."""
    if isinstance(member, Member):
        if member.name != pool:
            raise ValueError(f"{member.endpoint_id} is a member of {member.name!r}, not of {pool!r}")
        if not member.endpoint_id:
            raise NotRunError(
                f"task {member.task} of {pool!r} is {member.state} and takes no calls: choose one that is ready"
            )
        return str(member.endpoint_id)
    if not isinstance(member, str):
        raise TypeError(f"to({member!r}): give one of pool.members(), or its endpoint_id")
    return member
