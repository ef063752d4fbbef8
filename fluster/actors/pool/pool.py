"""Pools: all actors of one name, and the ways to call them; to be awaited. Those that block are made of these."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar

from fluster.actors.client.broadcast import AsyncBroadcastResult, BroadcastAnswers
from fluster.actors.client.caller import Caller
from fluster.actors.client.carried_calls import BroadcastOffer
from fluster.actors.client.census import census
from fluster.actors.client.lane_calls import LaneFuture
from fluster.actors.client.rosters import Roster
from fluster.actors.definition.definition import MethodInfo, check_timeout, methods_of, options_of
from fluster.actors.pool.handles import AsyncActorHandle, Methods, Verb, member_id
from fluster.actors.protocol.calls import Broadcast, Call, Ticket, own_thread
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import ByKey, Policy, policy_of
from fluster.actors.results.futures import ActorFuture
from fluster.actors.results.loop_calls import is_running
from fluster.actors.results.maps import (
    MAX_OUT,
    AsyncMapResults,
    AsyncUnorderedMapResults,
    MapCalls,
    check_max_out,
    iterated,
)
from fluster.cluster import AsyncCluster
from fluster.cluster.ownership import release
from fluster.errors import ActorTimeoutError
from fluster.tracing import announce, begin_call, end_with
from fluster_bus.core.names import check_name, near
from fluster_bus.messages import JobId, LogLine
from fluster_bus.payloads import payloads

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

P = ParamSpec("P")
Pool = TypeVar("Pool", bound="AsyncActorPool[Any]")

_MOST_CHECKED = 1_000  # names of methods that are known to be right


def _on_own_loop(
    method: Callable[Concatenate[Pool, P], Coroutine[object, None, T]],
) -> Callable[Concatenate[Pool, P], Coroutine[object, None, T]]:
    """Have a method run on the loop of its pool's connection, whichever awaits it."""

    @functools.wraps(method)
    async def call(self: Pool, /, *args: P.args, **kwargs: P.kwargs) -> T:
        running = method(self, *args, **kwargs)
        if is_running(self.loop):
            return await running
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, self.loop))

    return call


class AsyncActorPool(Generic[T_co]):
    """All actors that serve `name`; their methods are awaited.

    Make it where the cluster's event loop runs; its methods may be awaited on any. `actor_class`, where it is known, tells
    wrong names at once. `policy` chooses the member for a call: "round-robin" (unless told otherwise), "least" (the one
    with the fewest calls of this client), "random", or an object of your own (fluster.actors.protocol.policies).

    It can be pickled: where it is unpickled it finds the same actors, by `current_cluster()`.
    """

    def __init__(
        self,
        cluster: AsyncCluster,
        name: str,
        *,
        actor_class: type[T_co] | None = None,
        job_id: JobId | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        policy: str | Policy | None = None,
        fixed: tuple[Member, ...] | None = None,
    ) -> None:
        if not isinstance(cluster, AsyncCluster):
            raise TypeError(f"AsyncActorPool takes an AsyncCluster, not {cluster!r}: for a Cluster take ActorPool")
        self.name: str = check_name("actor name", name)
        # What the caller knows it by: pools of one name share their members, unless they were given others.
        self._key = name if fixed is None else f"{name} at {', '.join(member.address for member in fixed)}"
        self.job_id = job_id
        self.cluster = cluster
        self.actor_class = actor_class
        self._caller = Caller.of(cluster, loop or asyncio.get_running_loop())
        self._methods: Mapping[str, MethodInfo] | None = None if actor_class is None else methods_of(actor_class)
        self._checked: set[str] = set()  # names of methods
        # Without one of its own, all pools of this name share the turns that their members take.
        self._policy = None if policy is None else policy_of(policy)
        self._by_key = ByKey()
        self._fixed = fixed
        is_durable = actor_class is not None and fixed is None and options_of(actor_class).durable
        self._caller.open_pool(self._key, fixed=fixed, is_durable=is_durable)
        self._closing = weakref.finalize(self, self._caller.close_pool, self._key)
        self._closing.atexit = False  # the connection is closed by then, and all with it

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute(self, name, self._methods_or_none())

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return _found_again, (self.name, self.recipe)

    @property
    def recipe(self) -> dict[str, object]:
        """What, beside its name, makes a pool like this one elsewhere."""
        return {
            "actor_class": self.actor_class,
            "job_id": self.job_id,
            "policy": self._policy,
            "fixed": self._fixed,
        }

    # ---- calls ------------------------------------------------------------------------------------------

    @property
    def call(self) -> Verb[Any]:
        """`await pool.call().method(…)`: one member after the other, chosen at each call."""
        return Verb(self, "call", self.submit_call)

    @property
    def submit(self) -> Verb[Any]:
        """`pool.submit().method(…)`: the same, as an ActorFuture."""
        return Verb(self, "submit", self.submit_call)

    @property
    def broadcast(self) -> Verb[Any]:
        """`pool.broadcast().method(…)`: every member; an AsyncBroadcastResult."""
        return Verb(self, "broadcast", self._submit_broadcast)

    def map(self, *, max_out: int = MAX_OUT, timeout: float | None = None) -> Any:
        """`async for result in pool.map().method(items)`: results in the order of the items.

        The method is called for each item, or with one of each of several iterables, `max_out` at a time. Items are taken
        as results are asked for.
        """
        return Methods(self, self.mapped(AsyncMapResults, max_out), check_timeout(timeout), wait=True)

    def map_unordered(self, *, max_out: int = MAX_OUT, timeout: float | None = None) -> Any:
        """As `map`, each result as it comes."""
        return Methods(self, self.mapped(AsyncUnorderedMapResults, max_out), check_timeout(timeout), wait=True)

    def mapped(self, results: Callable[[MapCalls], Any], max_out: int) -> Callable[..., Any]:
        """What calls a method for items, and hands out the results."""
        check_max_out(max_out)

        def start(
            method: str, iterables: tuple[Iterable[Any], ...], kwargs: dict[str, Any], timeout: float | None, wait: bool
        ) -> Any:
            if not iterables:
                raise TypeError(f"map().{method}() takes the items to call it for: map().{method}(items)")
            items = zip(*map(iterated, iterables), strict=False)
            return results(MapCalls(items, lambda item: self.submit_call(method, item, kwargs, timeout, wait), max_out))

        return start

    def on(self, key: object) -> AsyncActorHandle[T_co]:
        """`pool.on(key).call().method(…)`: for each key always the same member while it lives, for every client.

        Raises TypeError for a key other than text, bytes, int, bool, or a tuple of these.
        """
        return AsyncActorHandle(self, None, key, self._by_key.for_key(key))

    def to(self, member: Member | str) -> AsyncActorHandle[T_co]:
        """`pool.to(member).call().method(…)`: that one of `members()`, which may also be given by its endpoint's id."""
        return AsyncActorHandle(self, member_id(self.name, member), None, None)

    def submit_call(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float | None,
        wait: bool,
        *,
        pinned: str | None = None,
        policy: Policy | None = None,
        alone: bool = False,
    ) -> ActorFuture[Any]:
        """Send a call to one member, or to whom a policy chooses; with `wait` it waits for room in full mailboxes.

        `alone`: the thread that submits it waits for it before it does anything else, and may carry it itself.
        """
        payload = payloads.encode((args, kwargs))
        return self.submit_to(pinned, method, payload, timeout=timeout, wait=wait, policy=policy, alone=alone)

    def submit_to(
        self,
        endpoint_id: str | None,
        method: str,
        payload: bytes,
        *,
        timeout: float | None = None,
        wait: bool = False,
        policy: Policy | None = None,
        alone: bool = False,
    ) -> ActorFuture[Any]:
        """As `submit_call`, with arguments that are pickled already."""
        info = self._methods.get(method) if self._methods is not None else None
        if timeout is None and info is not None:
            timeout = info.timeout
        future: ActorFuture[Any] = (LaneFuture if alone else ActorFuture)(
            f"{self.name}.{method}", self._caller.loop, self._caller.withdraw
        )
        call = Call(
            self._key,
            method,
            payload,
            future,
            timeout,
            None if timeout is None else self._caller.deadline_of(timeout),
            endpoint_id,
            wait,
            None if info is None else info.retries,
            policy or self._policy,
            self,
            blocks=own_thread() if alone else None,
        )
        traced = begin_call(self.name, method)
        if traced is not None:
            span, call.trace = traced
            end_with(span, future)
        try:
            if isinstance(future, LaneFuture):
                future.wait_alone = self._caller.carried.submit(call)
            else:
                self._caller.submit(call)
        except BaseException:
            future.cancel()  # for those that follow it, as a trace does
            raise
        return future

    def send(self, endpoint_id: str, method: str, payload: bytes, ticket: Ticket) -> Callable[[], None]:
        """As `submit_to`, for one who keeps a ticket of his own: what tells the actor how far its items were taken."""
        call = Call(self._key, method, payload, ticket, pinned=endpoint_id, owner=self)
        self._caller.submit(call)
        return functools.partial(self._caller.tell_read, call)

    async def roster(self) -> Roster:
        """The members, and when they change."""
        return await self._caller.roster(self._key)

    def _new_broadcast(
        self, method: str, args: tuple[object, ...], kwargs: dict[str, object], timeout: float | None, wait: bool
    ) -> tuple[BroadcastAnswers[Any], Broadcast]:
        if wait:
            raise TypeError("broadcast(wait=True): a broadcast does not wait for room; send it again to who had none")
        timeout = self._timeout_of(method) if timeout is None else timeout
        answers: BroadcastAnswers[Any] = BroadcastAnswers(
            f"{self.name}.{method}", self._caller.loop, self._caller.withdraw
        )
        payload = payloads.encode((args, kwargs))
        broadcast = Broadcast(
            self._key,
            method,
            payload,
            answers.open,
            answers.fail,
            answers.carry,
            timeout,
            self._caller.deadline_of(timeout),
            owner=self,
            trace=announce(self.name, method),
        )
        return answers, broadcast

    def _submit_broadcast(self, *call: Any) -> AsyncBroadcastResult[Any]:
        answers, broadcast = self._new_broadcast(*call)
        self._caller.submit(broadcast)
        return AsyncBroadcastResult(answers)

    def _offer_broadcast(self, *call: Any) -> tuple[BroadcastAnswers[Any], BroadcastOffer]:
        """Send to every member, for a thread that may wait for the answers next, and read them itself."""
        answers, broadcast = self._new_broadcast(*call)
        return answers, self._caller.carried.offer(broadcast)

    def _timeout_of(self, method: str) -> float | None:
        info = self._methods.get(method) if self._methods is not None else None
        return info.timeout if info is not None else None

    def _methods_or_none(self) -> Mapping[str, MethodInfo] | None:
        return vars(self).get("_methods")

    def check_method(self, name: str) -> bool:
        """Raise AttributeError when the actors have no such method, as far as that is known here.

        Gives whether the name is remembered; so many are not.
        """
        if name in self._checked:
            return True
        if name.startswith("_"):
            raise AttributeError(f"{name!r} cannot be called from outside: it begins with an underscore")
        check_name("method", name)
        if self._methods is not None and name not in self._methods:
            kind = self.actor_class.__name__ if self.actor_class is not None else self.name
            raise AttributeError(f"{kind} has no method {name!r}{near(name, self._methods)}")
        if len(self._checked) == _MOST_CHECKED:
            return False
        self._checked.add(name)
        return True

    def use_lane(self) -> None:
        """Let threads that wait for their calls carry them themselves."""
        self._caller.use_lane()

    # ---- members ----------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where its connection lives."""
        return self._caller.loop

    @property
    def size(self) -> int:
        """How many members are known to take calls; right after the pool was made none are known yet."""
        return self._caller.size(self._key)

    @_on_own_loop
    async def members(self) -> list[Member]:
        """How each member is: those that are registered first, the oldest first, then who is about to be, or has died.

        Of the latter the controller tells; when it does not answer, they are left out.
        """
        roster = await self._caller.roster(self._key)
        jobs = await self._caller.jobs(set(await self._job_ids()))
        return census(self.name, roster.members.values(), jobs)

    async def wait_for_size(self, size: int, timeout: float | None = 60.0) -> None:
        """Return as soon as there are `size` members. Raises ActorTimeoutError after `timeout` seconds."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"wait_for_size({size!r}): give a number of members")
        await self.wait_for_members(size, timeout=timeout)

    @_on_own_loop
    async def wait_for_members(
        self, size: int, *, job_id: JobId | None = None, timeout: float | None = None
    ) -> list[Member]:
        """The first `size` members or more, of one job if it is given, as soon as there are as many."""
        check_timeout(timeout)
        found: list[Member] = []
        try:
            async with asyncio.timeout(timeout):
                roster = await self._caller.roster(self._key)
                while True:
                    found = [member for member in roster.present() if job_id in (None, member.job_id)]
                    if len(found) >= size:
                        return found
                    await roster.change()
        except TimeoutError as error:
            raise ActorTimeoutError(
                f"pool {self.name!r} has {len(found)} of {size} members after {timeout:g} s: "
                "is there room for them on the cluster? `fluster ps` tells"
            ) from error

    @_on_own_loop
    async def _job_ids(self) -> list[JobId]:
        """Those whose tasks the members are, or were."""
        roster = await self._caller.roster(self._key)
        return sorted(roster.jobs | ({self.job_id} if self.job_id is not None else set()))

    def logs(
        self,
        *,
        follow: bool = False,
        tail: int | None = None,
        since: datetime | timedelta | None = None,
        grep: str | None = None,
    ) -> AsyncGenerator[LogLine]:
        """What the actors of jobs wrote, as `cluster.logs` gives it; with `follow` also what comes, until they have ended.

        What actors write that serve from a program of their own is that program's.
        """
        from fluster.cluster.jobs.batched_logs import Batched, merged_logs

        async def batches() -> AsyncGenerator[list[LogLine]]:
            job_ids = await self._job_ids()
            merged = merged_logs(self.cluster, job_ids, follow=follow, tail=tail, since=since, grep=grep)
            async with aclosing(merged) as lists:
                async for lines in lists:
                    yield lines

        return Batched(batches())

    @_on_own_loop
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.shutdown()

    async def shutdown(self) -> None:
        """End the actors, if `deploy` started them, and wait until they have; then give the pool up.

        Actors that serve from elsewhere go on.
        """
        if self.job_id is not None:
            await self.cluster.terminate(self.job_id, reason=f"pool {self.name} was shut down")
            release(self.cluster, self.job_id)
            await self.cluster.wait(self.job_id)
            await self.cluster.shown.finish(self.job_id)
        self._closing()

    def give_up(self, error: Exception) -> None:
        """Let the pool go; what waits or is out ends with `error`. The actors go on."""
        if self._closing.detach() is not None:
            self._caller.close_pool(self._key, error)


def no_attribute(pool: object, name: str, methods: Mapping[str, MethodInfo] | None) -> AttributeError:
    """What is raised for a name that a pool does not have, where it may be one of the actors' methods."""
    kind = type(pool).__name__
    if not name.startswith("_") and (methods is None or name in methods):
        return AttributeError(f"{kind} has no attribute {name!r}: a method of the actors is pool.call().{name}(…)")
    return AttributeError(f"{kind} has no attribute {name!r}")


def _found_again(name: str, recipe: dict[str, Any]) -> AsyncActorPool[Any]:
    from fluster.cluster import current_cluster

    cluster = current_cluster()
    return AsyncActorPool(cluster.asynchronous, name, loop=cluster.portal.loop, **recipe)
