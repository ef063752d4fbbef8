"""Calls, what the router says about them, and the thread whose calls to its own actor would never end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from fluster.actors.protocol import frames
from fluster.actors.protocol.frames import Moment, WireCall
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import Policy
from fluster.errors import ActorDeadlockError, ActorDiedError, ActorError, ConnectionLostError
from fluster.tracing import Carrier

log = logging.getLogger(__name__)


class Ticket(Protocol):
    """Receives how a call ends: a future, or an object that does the same."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def begin(self, call: object, /) -> bool: ...
    def settle(self, ok: bool, payload: bytes) -> None: ...
    def set_exception(self, exception: BaseException) -> None: ...


class _Sendable:
    """What travels to actors."""

    __slots__ = ()
    method: str
    deadline: Moment | None
    trace: Carrier | None

    def to_wire(self, payload: bytes) -> WireCall:
        """As it travels, with its payload as that does."""
        deadline = None if self.deadline is None else frames.plain(self.deadline)
        if self.trace is None:
            return self.method, deadline, payload
        return self.method, deadline, payload, dict(self.trace)


@dataclass(eq=False, slots=True)
class Call(_Sendable):
    """One call to one member: the one that a policy chooses, unless `pinned` names it."""

    pool: str
    method: str
    payload: bytes
    ticket: Ticket  # another as soon as it is found to be a stream
    timeout_s: float | None = None
    deadline: Moment | None = None
    pinned: str | None = None  # the only endpoint that it may go to
    waits: bool = False  # for room, when it finds mailboxes full
    retries: int | None = None  # as its method declares; None: as the registry tells
    policy: Policy | None = None  # that chooses its member, unless it is the pool's
    owner: object = None  # lives on as long as the call is under way
    trace: Carrier | None = None  # tells the actor of the caller's span
    blocks: OwnThread | None = None  # waits for it
    # The router's notes:
    order: int = 0
    tried: tuple[str, ...] = ()  # endpoints that did not respond
    turned_back: str | None = None  # the endpoint that did not respond, while it waits to be sent there again
    begun: bool = False  # was sent once
    over: bool = False
    number: int | None = None  # of the message in which it is out
    # The shell's:
    timer: Any = None
    retried: int = 0

    def begin(self) -> bool:
        """The call is about to be sent; False when it was cancelled before."""
        if not self.begun:
            self.begun = self.ticket.begin(self)
        return self.begun

    def __str__(self) -> str:
        return f"{self.pool}.{self.method}"


class Carried(Protocol):
    """A broadcast that the thread which waits for it carries."""

    def results(self) -> list[bytes] | None: ...
    def make_calls(self) -> object: ...


@dataclass(eq=False, slots=True)
class Broadcast(_Sendable):
    """A call to every member of a pool.

    `open` gets them, and returns the call to each by its endpoint, begun; the call is made by the function that `open` is
    given for the call's ticket. Where a thread carries it, `carry` gets the members, and `open` when calls are to be made
    after all, if ever.
    """

    pool: str
    method: str
    payload: bytes
    open: Callable[[Sequence[Member], Callable[[Ticket], Call]], dict[str, Call]]
    fail: Callable[[Exception], None]
    carry: Callable[[Sequence[Member], Carried], object] | None = None
    timeout_s: float | None = None
    deadline: Moment | None = None
    owner: object = None
    trace: Carrier | None = None
    order: int = 0
    over: bool = False  # before it was known who the members are
    timer: Any = None  # until then

    def calls(self, members: Sequence[Member]) -> dict[Any, Call]:
        """The calls to these members, by their endpoints, begun."""
        if self.timer is not None:
            self.timer.cancel()
        return self.open(members, self._call)

    def _call(self, ticket: Ticket) -> Call:
        return Call(
            self.pool,
            self.method,
            self.payload,
            ticket,
            timeout_s=self.timeout_s,
            deadline=self.deadline,
            retries=0,
            order=self.order,
            owner=self.owner,
            trace=self.trace,
            begun=True,
        )

    def __str__(self) -> str:
        return f"{self.pool}.{self.method}"


class Send(NamedTuple):
    """A message to publish: to one member, or to all of a pool when `member` is None."""

    number: int
    pool: str
    member: Member | None
    calls: list[Call]


class Cancel(NamedTuple):
    """A message to publish: tells a member of calls that are no longer waited for."""

    number: int
    member: Member
    calls: list[tuple[int, int]]  # [(number of the message that took the call there, index in it), …]


class Part(NamedTuple):
    """What came of a call that goes on, as it is a stream: OPENED or ITEMS of frames.py."""

    call: Call
    kind: int
    payload: Any


@dataclass(slots=True)
class Done:
    """A call that is over: answered with a payload, or ended by an error that was found out here."""

    call: Call | Broadcast
    ok: bool
    payload: bytes = b""
    error: Exception | None = None


def failed(item: Call | Broadcast, error: Exception) -> Done:
    """End a call by an error that was found out here."""
    item.over = True
    return Done(item, ok=False, error=error)


def faulted(item: Call | Broadcast, error: Exception) -> Done:
    """End a call that cannot be sent by a fault of Fluster's own, which is logged."""
    log.error("%s could not be sent", item, exc_info=error)
    told = ActorError(f"{item}: it was not sent, by a fault of Fluster's own: {type(error).__name__}: {error}")
    told.__cause__ = error
    return failed(item, told)


def died_while_out(call: object, endpoint_id: str, reason: str = "") -> ActorDiedError:
    """What ends a call whose actor has ended before it answered."""
    how = f" ({reason})" if reason else ""
    return ActorDiedError(f"{call}: the actor {endpoint_id} ended{how} while the call was out; it may have run")


def lost_while_out(call: object) -> ConnectionLostError:
    """What ends a call whose actor could not answer it for a while."""
    lost = "the actor lost its connection to the bus while the call was out; it may have run"
    return ConnectionLostError(f"{call}: {lost}")


@dataclass(frozen=True)
class OwnThread:
    """The only thread of an actor that runs one call at a time: if it waits there for that actor, it waits forever."""

    endpoint_id: str
    name: str  # of the actor
    methods: Collection[str]

    in_use: ClassVar[bool] = False  # whether there is any: plain callers need not look further

    def enter(self) -> None:
        """This thread is it, from now on."""
        OwnThread.in_use = True
        _thread.own = self

    def deadlock(self, call: Call, member: Member) -> ActorDeadlockError | None:
        """Why a call to `member`, for which this thread waits, could never end; None when it may."""
        if member.endpoint_id != self.endpoint_id or call.method in (member.timeouts or ()):
            return None
        return self._deadlock(
            call, ", or give the class max_concurrency, or one of the two methods a concurrency_group of its own"
        )

    def stored_deadlock(self, call: Call) -> ActorDeadlockError | None:
        """The same for a call that is stored for the one actor of its name."""
        if call.pool != self.name:
            return None
        return self._deadlock(call, ", or submit() it, and do not wait for it here")

    def _deadlock(self, call: Call, other_remedies: str) -> ActorDeadlockError | None:
        if call.method not in self.methods or call.deadline is not None:
            return None
        return ActorDeadlockError(
            f"{call} was called by the actor itself, which runs one call at a time and would wait for its own end: "
            f"write self.{call.method}(…){other_remedies}; it was not run"
        )


class _Thread(threading.local):
    own: OwnThread | None = None


_thread = _Thread()


def own_thread() -> OwnThread | None:
    """What this thread is the only one to run."""
    return _thread.own if OwnThread.in_use else None
