"""Which call goes to which member, in which message, and what becomes of it: decided here, without any I/O.

A call is in one place at a time: it waits in its pool (whose members are not known yet, or that is paused),
it is out in a numbered message, or it is over. The shell (caller.py) tells what happened; the desk answers with
messages to send and with calls that are over.

The answer "nobody listens" means that a call was not delivered, so it goes to the next member at once. In the time
after a reconnect it does not mean that a member is gone: it may be on its way back as well, and is tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fluster.actors import frames
from fluster.actors.calls import Broadcast, Call, Cancel, Done, Part, Send
from fluster.actors.failures import FULL, advice_of
from fluster.actors.frames import Moment, WireReply
from fluster.actors.members import Member
from fluster.actors.overflow import Overflow
from fluster.actors.policies import Policy, RoundRobin
from fluster.errors import ActorDiedError, ActorNotFoundError, ConnectionLostError, MailboxFullError, NotRunError

RECONNECT_GRACE_S = 5.0
MAX_TURNED_AWAY = 100_000  # calls of one pool that wait for room in mailboxes


class NobodyServesError(ActorNotFoundError):
    """The pool is empty. The shell knows how to say it better, and raises it as its parent."""


@dataclass(slots=True)
class _Out:
    """A message that is out."""

    pool: _Pool
    member: Member | None
    sent_at: Moment
    calls: dict[Any, Call]  # {index, or for a broadcast the endpoint id: call that was not answered yet}


@dataclass(slots=True, eq=False)
class _Pool:
    name: str
    policy: Policy
    shares_subject: bool
    members: dict[str, Member] = field(default_factory=dict)  # {endpoint id: member}, the oldest first
    choices: list[Member] = field(default_factory=list)  # those of them that take calls
    out: dict[str, int] = field(default_factory=dict)  # {endpoint id: calls}
    known: bool = False  # its members have been read
    paused: bool = False
    waiting: deque[Call | Broadcast] = field(default_factory=deque)
    overflow: Overflow = field(default_factory=Overflow)

    @property
    def blocked(self) -> bool:
        return self.paused or not self.known

    def keep_waiting(self, item: Call | Broadcast) -> None:
        """Those that wait stay in the order in which they were issued, also when one comes back."""
        comes_back = bool(self.waiting) and self.waiting[-1].order > item.order
        self.waiting.append(item)
        if comes_back:
            self.waiting = deque(sorted(self.waiting, key=lambda each: each.order))

    def update_choices(self) -> None:
        self.choices = [member for member in self.members.values() if not member.leaving]


class Desk:
    """The calls of one client."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._out: dict[int, _Out] = {}
        self._messages = 0
        self._calls = 0
        self._grace_until: Moment | None = None
        self.bytes_out = 0  # payloads of calls that are out
        self._turns_away = False  # some pool has calls that wait for room

    # ---- pools ------------------------------------------------------------------------------------------

    def open_pool(self, name: str, policy: Policy, *, shares_subject: bool = True) -> None:
        """Take calls for `name`; they wait until `on_known`.

        Without a subject that all its members hear, a broadcast asks each of them by itself.
        """
        self._pools[name] = _Pool(name, policy, shares_subject)

    def close_pool(self, name: str, error: Exception) -> list[Done]:
        """Forget a pool; its calls that wait or are out end with `error`."""
        done = self.fail_waiting(name, error)
        pool = self._pools.pop(name)
        for number in [number for number, out in self._out.items() if out.pool is pool]:
            done += [self._over(call, error) for call in self._take_all(number)]
        return done

    def fail_waiting(self, name: str, error: Exception) -> list[Done]:
        """End the calls of a pool that have not been sent."""
        pool = self._pools[name]
        waiting, pool.waiting = [*pool.overflow.clear(), *pool.waiting], deque()
        return [self._over(item, error) for item in waiting if not (isinstance(item, Call) and item.over)]

    def members(self, name: str) -> list[Member]:
        """The members of a pool that take calls, the oldest first."""
        return list(self._pools[name].choices)

    def on_known(self, name: str) -> None:
        """All members of a pool have been told."""
        self._pools[name].known = True

    def resume(self, name: str) -> None:
        """Let the calls of a paused pool go on."""
        if name in self._pools:
            self._pools[name].paused = False

    def on_member(self, name: str, member: Member) -> list[Done]:
        """A member is new or has changed. What was sent to it before it lost its connection is over."""
        pool = self._pools[name]
        pool.members[member.endpoint_id] = member
        pool.update_choices()
        disconnected_at = member.disconnected_at
        if disconnected_at is None:
            return []
        return self._fail_out(
            pool,
            member.endpoint_id,
            lambda out: frames.seconds_between(out.sent_at, disconnected_at) > 0,
            lambda call: ConnectionLostError(
                f"{call}: the actor lost its connection to the bus while the call was out; it may have run"
            ),
        )

    def on_member_leaving(self, name: str, endpoint_id: str) -> None:
        """A member takes no more calls."""
        pool = self._pools[name]
        member = pool.members.get(endpoint_id)
        if member is not None:
            pool.members[endpoint_id] = replace(member, leaving=True)
            pool.update_choices()

    def on_member_gone(self, name: str, endpoint_id: str) -> list[Done]:
        """A member has ended: what is out there will not be answered."""
        pool = self._pools[name]
        pool.members.pop(endpoint_id, None)
        pool.update_choices()
        done = self._fail_out(
            pool,
            endpoint_id,
            lambda _out: True,
            lambda call: ActorDiedError(
                f"{call}: the actor {endpoint_id} ended while the call was out; it may have run"
            ),
        )
        pool.out.pop(endpoint_id, None)
        return done

    def _fail_out(
        self, pool: _Pool, endpoint_id: str, concerns: Callable[[_Out], bool], error: Callable[[Call], Exception]
    ) -> list[Done]:
        done = []
        for number, out in list(self._out.items()):
            if out.pool is not pool or not concerns(out):
                continue
            for key in list(out.calls):
                if endpoint_id == (key if out.member is None else out.member.endpoint_id):
                    call = self._take(number, key)
                    done += [self._over(call, error(call))] if call is not None else []
        return done

    # ---- on their way out -------------------------------------------------------------------------------

    def route(self, items: Iterable[Call | Broadcast], now: Moment) -> tuple[list[Send], list[Done]]:
        """Messages for calls, in order; those of one member that follow each other travel together.

        A call that finds no member is over with ActorNotFoundError.
        """
        routing = _Routing(self, now)
        for item in items:
            routing.add(item)
        return routing.finish()

    def choose_alone(self, call: Call) -> Member | None:
        """The member for a call that nothing comes before in its pool; None when that is not so, or when in doubt.

        From any thread: it asks, and changes no books. The call is not out here until it is adopted.
        """
        pool = self._pools.get(call.pool)
        if pool is None or pool.blocked or pool.waiting or pool.overflow or any(list(pool.out.values())):
            return None
        if call.pinned is not None:
            return pool.members.get(call.pinned)
        policy, choices = call.policy or pool.policy, pool.choices
        if not choices or not isinstance(policy, RoundRobin):  # others count the calls of each member
            return None
        return policy.choose(choices, pool.out) if _Routing.is_wanted(call) else None

    def adopt(self, number: int, call: Call, member: Member, sent_at: Moment) -> list[Done]:
        """Take over a call that was sent alone, in a message of its own with a negative number."""
        call.order = call.order or self._next_order()
        pool = self._pools.get(call.pool)
        if pool is None:
            return [self._over(call, ActorNotFoundError(f"{call}: the pool was shut down"))]
        self._put_out(number, _Out(pool, member, sent_at, {0: call}))
        return []

    def route_waiting(self, name: str, now: Moment) -> tuple[list[Send], list[Done]]:
        """As `route`, for the calls that wait in a pool."""
        routing = _Routing(self, now)
        if name in self._pools:
            routing.add_waiting(self._pools[name])
        return routing.finish()

    def has_waiting(self, name: str) -> bool:
        pool = self._pools.get(name)
        return pool is not None and (bool(pool.waiting) or pool.overflow.has_room())

    def in_grace(self, now: Moment) -> bool:
        """True for a while after a reconnect, when members may be missing that come back."""
        return self._grace_until is not None and frames.seconds_between(now, self._grace_until) > 0

    def take_back(self, number: int) -> list[Call]:
        """The calls of a message that could not be sent, in order, to be routed again."""
        out = self._out.get(number)
        calls = []
        for key in list(out.calls) if out is not None else ():
            call = self._take(number, key)
            if out is not None and call is not None:
                call.pinned = key if out.member is None else call.pinned
                calls.append(call)
        return calls

    def where(self, call: Call) -> tuple[Member, tuple[int, int]] | None:
        """Who has a call, and as what: (number of its message, place there). None for one that is not out."""
        out = self._out.get(call.number) if call.number is not None else None
        if out is None or call.number is None:
            return None
        key = _key(out, call)
        member = out.pool.members.get(key) if out.member is None else out.member
        return None if member is None else (member, (call.number, 0 if out.member is None else key))

    def is_wanted(self, number: int, endpoint_id: str, place: int) -> bool:
        """True while somebody waits for that call."""
        out = self._out.get(number)
        call = out.calls.get(endpoint_id if out.member is None else place) if out is not None else None
        return call is not None and not call.over

    # ---- on their way back ------------------------------------------------------------------------------

    def recipient(self, number: int) -> Member | None:
        """To whom a message went that is out; None for a broadcast."""
        out = self._out.get(number)
        return None if out is None else out.member

    def on_refused(self, number: int, error: Exception) -> list[Done]:
        """The member could not read a message: its calls end with `error`."""
        return [self._over(call, error) for call in self._take_all(number)] if number in self._out else []

    def on_reply(self, number: int, endpoint_id: str, replies: list[WireReply]) -> list[Done | Part]:
        """Calls that were answered, and parts of those that are streams. Answers that nobody waits for any more are dropped."""
        out = self._out.get(number)
        if out is None:
            return []
        done: list[Done | Part] = []
        for index, ok, payload in replies:
            key = endpoint_id if out.member is None else index
            if ok > 1:  # not the end of it
                call = out.calls.get(key)
                if call is not None and not call.over:
                    done.append(Part(call, ok, payload))
                continue
            call = self._take(number, key)
            if call is None:
                continue
            if call.waits and not ok and not call.over and advice_of(payload) == FULL:
                self._turn_away(out.pool, endpoint_id, call)
                continue
            if self._turns_away:
                out.pool.overflow.on_answer()
            call.over = True
            done.append(Done(call, bool(ok), payload))
        return done

    def _turn_away(self, pool: _Pool, endpoint_id: str, call: Call) -> None:
        call.tried = (*call.tried, endpoint_id)
        everywhere = call.pinned is not None or all(each.endpoint_id in call.tried for each in pool.choices)
        if everywhere:
            call.tried = ()
        pool.overflow.turn_away(call, everywhere=everywhere)
        self._turns_away = True

    @property
    def bytes_turned_away(self) -> int:
        """Payloads of calls that wait for room in mailboxes."""
        return sum(pool.overflow.bytes for pool in self._pools.values()) if self._turns_away else 0

    def turned_away(self) -> list[str]:
        """Pools with calls that wait for room in mailboxes."""
        if not self._turns_away:
            return []
        names = [pool.name for pool in self._pools.values() if pool.overflow]
        self._turns_away = bool(names)
        return names

    def probe(self, name: str) -> None:
        """Let one of the calls that wait for room go, to see whether there is some."""
        if name in self._pools:
            self._pools[name].overflow.probe()

    def on_no_responders(self, number: int, now: Moment) -> tuple[list[Call], list[Done]]:
        """Calls that were not delivered and are to be routed again, and those for which there is no other member.

        In the time after a reconnect the latter wait in their pool, which is paused: the shell resumes it.
        """
        out = self._out.get(number)
        if out is None:
            return [], []
        again: list[Call] = []
        done: list[Done] = []
        for key in list(out.calls):
            call = self._take(number, key)
            if call is None:
                continue
            if out.member is None:  # a broadcast: each member is asked by itself, and tells by itself
                call.pinned = key
                again.append(call)
                continue
            call.tried = (*call.tried, out.member.endpoint_id)
            if call.pinned is None and any(each.endpoint_id not in call.tried for each in out.pool.choices):
                again.append(call)
            elif self.in_grace(now):
                self._pause(out.pool, call)
            else:
                done.append(self._over(call, _nobody_listens(call)))
        return again, done

    def _pause(self, pool: _Pool, call: Call) -> None:
        call.tried = ()
        pool.paused = True
        pool.keep_waiting(call)

    def paused(self) -> list[str]:
        return [pool.name for pool in self._pools.values() if pool.paused]

    def on_timeout(self, call: Call) -> list[Cancel]:
        """Nobody waits for this call any more; what to tell the actor that has it."""
        cancels = self.withdraw([call])
        out = self._out.get(call.number) if call.number is not None else None
        if out is not None and call.number is not None:
            self._take(call.number, _key(out, call))
        return cancels

    def withdraw(self, calls: Iterable[Call]) -> list[Cancel]:
        """Calls that were cancelled, and what to tell the actors that have them.

        One that is out counts as such until it is answered: its actor may still be at it, and others are better off
        elsewhere. Its Done is then of no concern to anybody.
        """
        cancels: dict[str, Cancel] = {}  # {endpoint id: the message that is being filled}
        full: list[Cancel] = []
        for call in calls:
            if call.over:
                continue
            call.over = True  # where it waits it is passed over
            found = self.where(call)
            if found is None:
                continue
            member, place = found
            self.bytes_out -= len(call.payload)
            call.payload = b""
            cancel = cancels.get(member.endpoint_id)
            if cancel is None:
                self._messages += 1  # it comes after the calls, also where broadcasts are put in order
                cancel = cancels[member.endpoint_id] = Cancel(self._messages, member, [])
            cancel.places.append(place)
            if len(cancel.places) == frames.MAX_CANCELS:
                full.append(cancels.pop(member.endpoint_id))
        return full + list(cancels.values())

    def on_disconnected(self, concerns: Callable[[int], bool] = lambda number: number > 0) -> list[Done]:
        """A connection is lost: what is out on it, by the numbers of its messages, may never be answered."""
        return [
            self._over(
                call,
                ConnectionLostError(
                    f"{call}: the connection to the bus was lost while the call was out; it may have run"
                ),
            )
            for number in list(self._out)
            if concerns(number)
            for call in self._take_all(number)
        ]

    def on_reconnected(self, now: Moment) -> None:
        """The connection is back; others may still be missing."""
        self._grace_until = now.after(RECONNECT_GRACE_S)

    def close(self, error: Exception) -> list[Done]:
        """End everything."""
        return [done for name in list(self._pools) for done in self.close_pool(name, error)]

    @staticmethod
    def _over(item: Call | Broadcast, error: Exception) -> Done:
        if isinstance(item, Call):
            item.over = True
        return Done(item, ok=False, error=error)

    def _take_all(self, number: int) -> Iterator[Call]:
        out = self._out[number]
        for key in list(out.calls):
            call = self._take(number, key)
            if call is not None:
                yield call

    def _take(self, number: int, key: Any) -> Call | None:
        """A call, which is out no more."""
        out = self._out.get(number)
        call = out.calls.pop(key, None) if out is not None else None
        if out is None or call is None:
            return None
        call.number = None
        self.bytes_out -= len(call.payload)
        if not out.calls:
            del self._out[number]
        endpoint_id = key if out.member is None else out.member.endpoint_id
        if endpoint_id in out.pool.out:
            out.pool.out[endpoint_id] -= 1
        return call

    def _send(self, pool: _Pool, member: Member | None, calls: dict[Any, Call], now: Moment) -> Send:
        self._messages += 1
        self._put_out(self._messages, _Out(pool, member, now, calls))
        return Send(self._messages, pool.name, member, list(calls.values()))

    def _put_out(self, number: int, out: _Out) -> None:
        self._out[number] = out
        for key, call in out.calls.items():
            call.number = number
            self.bytes_out += len(call.payload)
            endpoint_id = key if out.member is None else out.member.endpoint_id
            out.pool.out[endpoint_id] = out.pool.out.get(endpoint_id, 0) + 1

    def _next_order(self) -> int:
        self._calls += 1
        return self._calls

    # ---- what is where ----------------------------------------------------------------------------------

    def out(self) -> list[Call]:
        """The calls that are out."""
        return [call for out in self._out.values() for call in out.calls.values()]

    def waiting(self) -> list[Call | Broadcast]:
        """The calls that wait in their pools, those that are over included."""
        return [item for pool in self._pools.values() for item in (*pool.waiting, *pool.overflow)]

    def sanity_check(self) -> None:
        """Raise AssertionError when the books do not agree with each other."""
        counted: dict[tuple[str, str], int] = {}
        for number, out in self._out.items():
            if not out.calls:
                raise AssertionError(f"message {number} is out without calls")
            for key, call in out.calls.items():
                if call.number != number or (call.over and not call.ticket.cancelled()):
                    raise AssertionError(f"{call} is out in message {number} and says {call.number}, {call.over=}")
                place = (out.pool.name, key if out.member is None else out.member.endpoint_id)
                counted[place] = counted.get(place, 0) + 1
        for pool in self._pools.values():
            for endpoint_id, count in pool.out.items():
                if count != counted.get((pool.name, endpoint_id), 0):
                    raise AssertionError(f"{endpoint_id} of {pool.name} has {count} calls by the books: {counted}")
            for item in (*pool.waiting, *pool.overflow):
                if isinstance(item, Call) and item.number is not None:
                    raise AssertionError(f"{item} waits and is out")


class _Routing:
    """One pass over calls, joining those of a member as long as nothing comes between that could be overtaken."""

    def __init__(self, desk: Desk, now: Moment) -> None:
        self._desk = desk
        self._now = now
        self._joining: dict[str, tuple[_Pool, Member, list[Call]]] = {}  # {endpoint id: its calls so far}
        self._sends: list[Send] = []
        self._done: list[Done] = []

    def add(self, item: Call | Broadcast) -> None:
        pool = self._desk._pools.get(item.pool)  # noqa: SLF001 - a part of the desk, in a class of its own
        if item.order == 0:
            item.order = self._desk._next_order()  # noqa: SLF001
        if pool is None:
            self._done.append(Desk._over(item, ActorNotFoundError(f"{item}: the pool was shut down")))  # noqa: SLF001
        elif isinstance(item, Call) and item.waits and pool.overflow:
            self._add_overflow(pool, item)
        elif pool.waiting or not self._place(pool, item):
            pool.keep_waiting(item)  # also behind others that wait: none overtakes

    def _add_overflow(self, pool: _Pool, call: Call) -> None:
        if len(pool.overflow) < MAX_TURNED_AWAY:
            pool.overflow.add(call)
            return
        text = f"{call}: the mailboxes are full, and {MAX_TURNED_AWAY:,} calls wait for room already: wait for some"
        self._refuse(call, MailboxFullError(text))

    def add_waiting(self, pool: _Pool) -> None:
        while pool.waiting and self._place(pool, pool.waiting[0]):
            pool.waiting.popleft()
        while not pool.waiting and (call := pool.overflow.take()) is not None:
            if all(each.endpoint_id in call.tried for each in pool.choices):
                call.tried = ()
            if not self._place(pool, call):
                pool.overflow.add(call)
                break

    def _place(self, pool: _Pool, item: Call | Broadcast) -> bool:
        """True when the item does not have to wait: it goes out, or it is over."""
        if pool.blocked:
            return False
        if isinstance(item, Broadcast):
            return self._place_broadcast(pool, item)
        if item.over:
            return True
        member: Member | None
        if item.pinned is not None:
            member = pool.members.get(item.pinned)
            if member is None:
                return self._refuse(item, NotRunError(f"{item}: the actor {item.pinned} ended; the call was not run"))
        else:
            choices = pool.choices
            if item.tried:
                choices = [each for each in choices if each.endpoint_id not in item.tried]
            if not choices:
                return self._refuse(item, _nobody_listens(item))
            try:
                member = (item.policy or pool.policy).choose(choices, pool.out)
            except Exception as error:  # a user's: it must not end the other calls of this client
                return self._refuse(item, error)
        if self.is_wanted(item):
            self._joining.setdefault(member.endpoint_id, (pool, member, []))[2].append(item)
            # Counted at once, so that the policy sees it when it chooses for the next call.
            pool.out[member.endpoint_id] = pool.out.get(member.endpoint_id, 0) + 1
        return True

    def _place_broadcast(self, pool: _Pool, broadcast: Broadcast) -> bool:
        members = pool.choices
        if not members:
            return self._refuse(broadcast, _nobody_listens(broadcast))
        calls = {}
        for member, ticket in zip(members, broadcast.open(members), strict=True):
            call = Call(
                broadcast.pool,
                broadcast.method,
                broadcast.payload,
                ticket,
                timeout_s=broadcast.timeout_s,
                deadline=broadcast.deadline,
                retries=0,
                order=broadcast.order,
                owner=broadcast.owner,
                trace=broadcast.trace,
            )
            if self.is_wanted(call):
                calls[member.endpoint_id] = call
        in_json = any(member.takes_json_only for member in members)  # such a reply does not say whose it is
        if not pool.shares_subject or in_json or self._desk.in_grace(self._now):
            # After a reconnect, one of many that misses the message would go unnoticed; asked by itself it is told.
            for endpoint_id, call in calls.items():
                call.pinned = endpoint_id
                self._place(pool, call)
        elif calls:
            self._flush(pool)
            self._sends.append(self._desk._send(pool, None, dict(calls), self._now))  # noqa: SLF001
        return True

    @staticmethod
    def is_wanted(call: Call) -> bool:
        if not call.begun:
            call.begun = call.ticket.begin(call)
        return call.begun

    def _refuse(self, item: Call | Broadcast, error: Exception) -> bool:
        self._done.append(Desk._over(item, error))  # noqa: SLF001
        return True

    def _flush(self, of: _Pool | None = None) -> None:
        for endpoint_id, (pool, member, calls) in list(self._joining.items()):
            if of is None or of is pool:
                del self._joining[endpoint_id]
                pool.out[endpoint_id] -= len(calls)
                for batch in _batches(member, calls):
                    self._sends.append(self._desk._send(pool, member, dict(enumerate(batch)), self._now))  # noqa: SLF001

    def finish(self) -> tuple[list[Send], list[Done]]:
        self._flush()
        return self._sends, self._done


def _batches(member: Member, calls: list[Call]) -> Iterable[list[Call]]:
    if member.takes_json_only:  # in the form that people write too, a message is one call
        return [[call] for call in calls]
    return frames.batches((len(call.payload), call) for call in calls)


def _key(out: _Out, call: Call) -> Any:
    return next(key for key, each in out.calls.items() if each is call)


def _nobody_listens(item: Call | Broadcast) -> Exception:
    if isinstance(item, Call) and item.pinned is not None:
        return NotRunError(f"{item}: nobody listens at {item.pinned}: it has ended; the call was not run")
    return NobodyServesError(f"{item}: nobody serves {item.pool!r}; the call was not run")
