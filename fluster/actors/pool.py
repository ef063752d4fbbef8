"""Pools: all actors of one name, and the ways to call them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, NoReturn, TypeVar, cast

from fluster.actors.broadcast import Answers, AsyncBroadcastResult, BroadcastResult
from fluster.actors.caller import Caller
from fluster.actors.calls import Broadcast, Call
from fluster.actors.census import census
from fluster.actors.definition import MethodInfo, check_timeout, methods_of, near
from fluster.actors.futures import ActorFuture
from fluster.actors.members import Member
from fluster.actors.policies import Policy, RoundRobin
from fluster.cluster import AsyncCluster, Cluster
from fluster.cluster.portal import blocking
from fluster.errors import ActorTimeoutError
from fluster.tracing import announce, begin_call, end_with
from fluster_bus import codec
from fluster_bus.messages import JobId
from fluster_bus.names import check_name

T = TypeVar("T")

_MOST_CHECKED = 1_000  # names of methods that are known to be right


class AsyncActorPool(Generic[T]):
    """All actors that serve `name`; their methods are awaited.

    Make it where the cluster's event loop runs. `actor_class`, where it is known, tells wrong names at once.
    """

    def __init__(
        self,
        cluster: AsyncCluster,
        name: str,
        *,
        actor_class: type[T] | None = None,
        job_id: JobId | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        policy: Policy | None = None,
        fixed: tuple[Member, ...] | None = None,
    ) -> None:
        if not isinstance(cluster, AsyncCluster):
            raise TypeError(f"AsyncActorPool takes an AsyncCluster, not {cluster!r}: for a Cluster take ActorPool")
        self.name = check_name("actor name", name)
        # What the caller knows it by: pools of one name share their members, unless they were given others.
        self._key = name if fixed is None else f"{name} at {', '.join(member.address for member in fixed)}"
        self.job_id = job_id
        self.cluster = cluster
        self.actor_class = actor_class
        self._caller = Caller.of(cluster, loop or asyncio.get_running_loop())
        self._methods: Mapping[str, MethodInfo] | None = None if actor_class is None else methods_of(actor_class)
        self._checked: set[str] = set()  # names of methods
        self._policy = policy or RoundRobin()
        self._caller.open_pool(self._key, self._policy, fixed=fixed)
        self._closing = weakref.finalize(self, self._caller.close_pool, self._key)
        self._closing.atexit = False  # the connection is closed by then, and all with it

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __getattr__(self, name: str) -> NoReturn:
        raise _no_attribute(self, name, self._methods_or_none())

    def __reduce__(self) -> NoReturn:
        raise TypeError("an AsyncActorPool belongs to its event loop: pass its name, and make a pool there")

    # ---- calls ------------------------------------------------------------------------------------------

    @property
    def call(self) -> Verb[Any]:
        """`await pool.call().method(…)`: one member after the other, chosen at each call."""
        return Verb(self, "call", self._submit)

    @property
    def submit(self) -> Verb[Any]:
        """`pool.submit().method(…)`: the same, as an ActorFuture."""
        return Verb(self, "submit", self._submit)

    @property
    def broadcast(self) -> Verb[Any]:
        """`pool.broadcast().method(…)`: every member; an AsyncBroadcastResult."""
        return Verb(self, "broadcast", lambda *call: AsyncBroadcastResult(self._broadcast(*call)))

    def _submit(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None, wait: bool
    ) -> ActorFuture[Any]:
        return self.submit_to(None, method, codec.encode((args, kwargs)), timeout=timeout, wait=wait)

    def submit_to(
        self,
        endpoint_id: str | None,
        method: str,
        payload: bytes,
        *,
        timeout: float | None = None,
        wait: bool = False,
    ) -> ActorFuture[Any]:
        """Send a call whose arguments are pickled already, to one member or to whom the policy chooses."""
        timeout = self._timeout_of(method) if timeout is None else timeout
        future = ActorFuture[Any](f"{self.name}.{method}", self._caller.loop, self._caller.withdraw)
        deadline = self._caller.deadline_of(timeout)
        call = Call(self._key, method, payload, future, timeout, deadline, pinned=endpoint_id, owner=self)
        call.waits = wait
        if self._methods is not None and method in self._methods:
            call.retries = self._methods[method].retries
        traced = begin_call(self.name, method)
        if traced is not None:
            span, call.trace = traced
            end_with(span, future)
        try:
            self._caller.submit(call)
        except BaseException:
            future.cancel()  # whoever follows it, as a trace does, is told
            raise
        return future

    def _broadcast(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float | None, wait: bool
    ) -> Answers[Any]:
        if wait:
            raise TypeError("broadcast(wait=True): a broadcast does not wait for room; send it again to who had none")
        timeout = self._timeout_of(method) if timeout is None else timeout
        answers = Answers[Any](f"{self.name}.{method}", self._caller.loop, self._caller.withdraw)
        payload = codec.encode((args, kwargs))
        self._caller.submit(
            Broadcast(
                self._key,
                method,
                payload,
                answers.open,
                answers.fail,
                timeout,
                self._caller.deadline_of(timeout),
                owner=self,
                trace=announce(self.name, method),
            )
        )
        return answers

    def _timeout_of(self, method: str) -> float | None:
        info = self._methods.get(method) if self._methods is not None else None
        return info.timeout if info is not None else None

    def _methods_or_none(self) -> Mapping[str, MethodInfo] | None:
        return vars(self).get("_methods")

    def check_method(self, name: str) -> None:
        """Raise AttributeError when the actors have no such method, as far as that is known here."""
        if name in self._checked:
            return
        if name.startswith("_"):
            raise AttributeError(f"{name!r} cannot be called from outside: it begins with an underscore")
        check_name("method", name)
        if self._methods is not None and name not in self._methods:
            kind = self.actor_class.__name__ if self.actor_class is not None else self.name
            raise AttributeError(f"{kind} has no method {name!r}{near(name, self._methods)}")
        if len(self._checked) < _MOST_CHECKED:
            self._checked.add(name)

    # ---- members ----------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many members are known to take calls; right after the pool was made none are known yet."""
        return self._caller.size(self._key)

    async def members(self) -> list[Member]:
        """How each member is: those that are registered first, the oldest first, then who is about to be, or has died.

        Of the latter the controller tells; when it does not answer, they are left out.
        """
        roster = await self._caller.roster(self._key)
        job_ids = roster.jobs | ({self.job_id} if self.job_id is not None else set())
        jobs = await self._caller.jobs(job_ids)
        return census(self.name, roster.members.values(), jobs)

    async def wait_for_size(self, size: int, timeout: float | None = 60.0) -> None:
        """Return as soon as there are `size` members. Raises ActorTimeoutError after `timeout` seconds."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"wait_for_size({size!r}): give a number of members")
        await self.wait_for_members(size, timeout=timeout)

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

    async def shutdown(self) -> None:
        """End the actors, if `deploy` started them, and wait until they have; then give the pool up.

        Actors that serve from elsewhere go on.
        """
        if self.job_id is not None:
            await self.cluster.terminate(self.job_id, reason=f"pool {self.name} was shut down")
            await self.cluster.wait(self.job_id)
        self._closing()

    def give_up(self, error: Exception) -> None:
        """Let the pool go; what waits or is out ends with `error`. The actors go on."""
        if self._closing.detach() is not None:
            self._caller.close_pool(self._key, error)

    def refuse(self, error: Exception) -> None:
        """End the calls that wait for a member, and refuse those to come: there will be no members."""
        self._policy.waits_for_members = False
        self._caller.fail_waiting(self._key, error)


class ActorPool(Generic[T]):
    """All actors that serve `name`; their methods are called as if they were here. Use it from any thread.

    It can be pickled: where it is unpickled it finds the same actors, by `current_cluster()`.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        *,
        actor_class: type[T] | None = None,
        job_id: JobId | None = None,
        policy: Policy | None = None,
        fixed: tuple[Member, ...] | None = None,
    ) -> None:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"ActorPool takes a Cluster, not {cluster!r}: for an AsyncCluster take AsyncActorPool")
        self.portal = cluster.portal
        self.asynchronous: AsyncActorPool[T] = AsyncActorPool(
            cluster.asynchronous,
            name,
            actor_class=actor_class,
            job_id=job_id,
            loop=cluster.portal.loop,
            policy=policy,
            fixed=fixed,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __getattr__(self, name: str) -> NoReturn:
        asynchronous = vars(self).get("asynchronous")
        raise _no_attribute(self, name, None if asynchronous is None else asynchronous._methods)  # noqa: SLF001

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        pool = self.asynchronous
        return _found_again, (pool.name, pool.actor_class, pool.job_id)

    @property
    def name(self) -> str:
        return self.asynchronous.name

    @property
    def job_id(self) -> JobId | None:
        """The job whose tasks the actors are, if `deploy` started them."""
        return self.asynchronous.job_id

    @property
    def call(self) -> Verb[T]:
        """`pool.call().method(…)`: one member after the other, chosen at each call; its result.

        Raises what the method raises; ActorNotFoundError at once when nobody serves the name; ActorDiedError,
        ConnectionLostError, MailboxFullError; ActorTimeoutError (a TimeoutError) after `call(timeout=…)` seconds.
        """
        return Verb(self.asynchronous, "call", lambda *call: _result(self.asynchronous._submit(*call)))  # noqa: SLF001

    @property
    def submit(self) -> Verb[Any]:
        """`pool.submit().method(…)`: the same, as an ActorFuture."""
        return self.asynchronous.submit

    @property
    def broadcast(self) -> Verb[Any]:
        """`pool.broadcast().method(…)`: every member; a BroadcastResult."""
        return Verb(
            self.asynchronous,
            "broadcast",
            lambda *call: BroadcastResult(self.asynchronous._broadcast(*call)),  # noqa: SLF001
        )

    members = blocking(AsyncActorPool.members)
    wait_for_size = blocking(AsyncActorPool.wait_for_size)
    shutdown = blocking(AsyncActorPool.shutdown)

    @property
    def size(self) -> int:
        """How many members take calls now."""
        return len(self.portal.run(self.asynchronous.wait_for_members, 0))


class Verb(Generic[T]):
    """What stands between a pool and a method: `pool.call()`, `pool.submit()`, `pool.broadcast()`."""

    __slots__ = ("_pool", "_start", "_verb")

    def __init__(self, pool: AsyncActorPool[Any], verb: str, start: Callable[..., Any]) -> None:
        self._pool = pool
        self._verb = verb
        self._start = start

    def __call__(self, *, timeout: float | None = None, wait: bool = False) -> T:
        """The actors' methods. `timeout` in seconds counts from each call, and goes before the method's own.

        With `wait`, a call that finds all mailboxes full waits for room, rather than raise MailboxFullError.
        """
        if timeout is not None:
            check_timeout(timeout)
        return cast("T", _Methods(self._pool, self._start, timeout, wait))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"write pool.{self._verb}().{name}(…): {self._verb} is called first")


class _Methods:
    __slots__ = ("_pool", "_start", "_timeout", "_wait")

    def __init__(self, pool: AsyncActorPool[Any], start: Callable[..., Any], timeout: float | None, wait: bool) -> None:
        self._pool = pool
        self._start = start
        self._timeout = timeout
        self._wait = wait

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self._pool.check_method(name)
        start, timeout, wait = self._start, self._timeout, self._wait

        def method(*args: Any, **kwargs: Any) -> Any:
            return start(name, args, kwargs, timeout, wait)

        method.__name__ = name
        return method


def _result(future: ActorFuture[Any]) -> Any:
    try:
        return future.result()
    except BaseException:
        future.cancel()  # nobody has it but who was interrupted here; one that has ended is left as it is
        raise


def _no_attribute(pool: object, name: str, methods: Mapping[str, MethodInfo] | None) -> AttributeError:
    kind = type(pool).__name__
    if not name.startswith("_") and (methods is None or name in methods):
        return AttributeError(f"{kind} has no attribute {name!r}: a method of the actors is pool.call().{name}(…)")
    return AttributeError(f"{kind} has no attribute {name!r}")


def _found_again(name: str, actor_class: type[Any] | None, job_id: JobId | None) -> ActorPool[Any]:
    from fluster.cluster import current_cluster

    return ActorPool(current_cluster(), name, actor_class=actor_class, job_id=job_id)
