"""Methods that block, made of the awaited ones of an object on a portal's loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from fluster.remote_errors.kindred_errors import shave
from fluster_bus.core.errors import ClosedError

if TYPE_CHECKING:
    import asyncio

    from fluster.cluster.portal import Portal

T = TypeVar("T")
P = ParamSpec("P")
AsyncT_contra = TypeVar("AsyncT_contra", contravariant=True)
AsyncT = TypeVar("AsyncT")


class OnPortal(Protocol[AsyncT]):  # type: ignore[misc]  # invariant on purpose: the attribute can be read only
    """An object whose asynchronous twin lives on a portal's loop."""

    @property
    def portal(self) -> Portal:
        """Where it lives."""
        ...

    @property
    def asynchronous(self) -> AsyncT:
        """The object whose methods are awaited."""
        ...


def blocking(method: Callable[Concatenate[AsyncT, P], Awaitable[T]]) -> Callable[Concatenate[OnPortal[AsyncT], P], T]:
    """The blocking form of an asynchronous twin's method, with its signature and docstring."""

    def call(self: OnPortal[AsyncT], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return self.portal.run(functools.partial(method, self.asynchronous, *args, **kwargs))
        except Exception as error:
            shave(error)
            raise

    functools.update_wrapper(call, method)
    return call


_END: Any = object()


class _Steps(Generic[T]):
    """An asynchronous generator, one step after the other. Lives on the portal's loop."""

    def __init__(self, items: AsyncIterator[T]) -> None:
        self._items: Any = items
        self._step: asyncio.Task[object] | None = None

    async def next(self) -> T:
        import asyncio

        self._step = asyncio.current_task()
        try:
            item: T = await anext(self._items, _END)
            return item
        finally:
            self._step = None

    async def close(self) -> None:
        """End the generator, also when Ctrl-C left a step that is not waited for."""
        if self._step is not None:
            import asyncio

            self._step.cancel()
            await asyncio.wait([self._step])
        await self._items.aclose()


def blocking_iterator(
    method: Callable[Concatenate[AsyncT, P], AsyncIterator[T]],
) -> Callable[Concatenate[OnPortal[AsyncT], P], Iterator[T]]:
    """The blocking form of a method that is an asynchronous generator. What comes in batches is waited for once a
    batch.
    """

    def call(self: OnPortal[AsyncT], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = method(self.asynchronous, *args, **kwargs)
        batches = getattr(items, "batches", None)
        steps: _Steps[Any] = _Steps(items if batches is None else batches)
        try:
            while (item := self.portal.run(steps.next)) is not _END:
                if batches is None:
                    yield item
                else:
                    yield from item
        finally:
            with contextlib.suppress(ClosedError):  # what ran on its loop has ended with it
                self.portal.run(steps.close)

    functools.update_wrapper(call, method)
    return call
