"""What stands between a pool and a method: the verbs, and the handles of one member or of a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from fluster.actors.definition.definition import check_timeout
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import Policy
from fluster.actors.results.futures import ActorFuture, result_of
from fluster.errors import NotRunError
from fluster.remote_errors.kindred_errors import shave

if TYPE_CHECKING:
    from fluster.actors.pool.blocking_pool import ActorPool
    from fluster.actors.pool.pool import AsyncActorPool

T_co = TypeVar("T_co", covariant=True)


class Verb(Generic[T_co]):
    """What stands between a pool and a method: `pool.call()`, `pool.submit()`, `pool.broadcast()`."""

    __slots__ = ("_methods", "_verb")

    def __init__(self, pool: AsyncActorPool[object], verb: str, start: Callable[..., object]) -> None:
        self._verb = verb
        self._methods = Methods(pool, start, None, wait=False)

    def __call__(self, *, timeout: float | None = None, wait: bool = False) -> T_co:
        """The actors' methods. `timeout` in seconds counts from each call, and goes before the method's own.

        With `wait`, a call that finds all mailboxes full waits for room, rather than raise MailboxFullError.
        """
        methods = self._methods
        if timeout is not None or wait:
            methods = methods._with(check_timeout(timeout), wait=wait)  # noqa: SLF001 - what has no underscore is the actors'
        return methods  # type: ignore[return-value]  # it stands for the methods of T_co

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"write pool.{self._verb}().{name}(…): {self._verb} is called first")


class Methods:
    """The actors' methods, behind a verb. Those that were asked for stay here as attributes, which Python finds by itself."""

    def __init__(
        self, pool: AsyncActorPool[object], start: Callable[..., object], timeout: float | None, *, wait: bool
    ) -> None:
        self._pool = pool
        self._start = start
        self._timeout = timeout
        self._wait = wait

    def _with(self, timeout: float | None, *, wait: bool) -> Methods:
        """The same, called otherwise."""
        return Methods(self._pool, self._start, timeout, wait=wait)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # Python's own, asked for also before there is a pool
            raise AttributeError(name)
        is_known = self._pool.check_method(name)
        start, timeout, wait = self._start, self._timeout, self._wait

        def method(*args: Any, **kwargs: Any) -> Any:
            try:
                return start(name, args, kwargs, timeout, wait)
            except Exception as error:
                shave(error)
                raise

        method.__name__ = name
        if is_known:
            vars(self)[name] = method
        return method


class AsyncActorHandle(Generic[T_co]):
    """`pool.to(member)` or `pool.on(key)`: its `call()` and `submit()` are the pool's, for that member.

    It can be pickled, as its pool can.
    """

    def __init__(self, pool: AsyncActorPool[T_co], member: str | None, key: object, policy: Policy | None) -> None:
        self._pool = pool
        self._member = member
        self._key = key
        self._policy = policy

    def __repr__(self) -> str:
        return f"{self._pool!r}{_shown(self._member, self._key)}"

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
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
        args: tuple[object, ...],
        kwargs: dict[str, object],
        timeout: float | None,
        wait: bool,
        *,
        alone: bool = False,
    ) -> ActorFuture[Any]:
        return self._pool.submit_call(
            method, args, kwargs, timeout, wait, pinned=self._member, policy=self._policy, alone=alone
        )


class ActorHandle(Generic[T_co]):
    """`pool.to(member)` or `pool.on(key)`: its `call()` and `submit()` are the pool's, for that member.

    It can be pickled, as its pool can.
    """

    def __init__(self, pool: ActorPool[T_co], member: str | None, key: object) -> None:
        self._pool = pool
        self._member = member
        self._key = key
        inner = pool.asynchronous
        self.asynchronous: AsyncActorHandle[T_co] = inner.to(member) if member is not None else inner.on(key)

    def __repr__(self) -> str:
        return f"{self._pool!r}{_shown(self._member, self._key)}"

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _found_again, (self._pool, self._member, self._key)

    @property
    def call(self) -> Verb[T_co]:
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
