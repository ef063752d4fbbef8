"""What stands between a pool and a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from fluster.actors.definition.definition import check_timeout
from fluster.remote_errors.restored_errors import shave

if TYPE_CHECKING:
    from fluster.actors.pool.pool import AsyncActorPool

T = TypeVar("T")


class Verb(Generic[T]):
    """What stands between a pool and a method: `pool.call()`, `pool.submit()`, `pool.broadcast()`."""

    __slots__ = ("_methods", "_verb")

    def __init__(self, pool: AsyncActorPool[Any], verb: str, start: Callable[..., Any]) -> None:
        self._verb = verb
        self._methods = Methods(pool, start, None, wait=False)

    def __call__(self, *, timeout: float | None = None, wait: bool = False) -> T:
        """The actors' methods. `timeout` in seconds counts from each call, and goes before the method's own.

        With `wait`, a call that finds all mailboxes full waits for room, rather than raise MailboxFullError.
        """
        methods = self._methods
        if timeout is not None or wait:
            methods = methods._with(check_timeout(timeout), wait=wait)  # noqa: SLF001 - what has no underscore is the actors'
        return methods  # type: ignore[return-value]  # it stands for the methods of T

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"write pool.{self._verb}().{name}(…): {self._verb} is called first")


class Methods:
    """The actors' methods, behind a verb. Those that were asked for stay here as attributes, which Python finds by itself."""

    def __init__(
        self, pool: AsyncActorPool[Any], start: Callable[..., Any], timeout: float | None, *, wait: bool
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
