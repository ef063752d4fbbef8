"""Which call goes to which member, in which message, and what becomes of it: decided here, without any I/O.

A call is in one place at a time: it waits in its pool (whose members are not known yet, or that is paused),
it is out in a numbered message, or it is over. The shell (caller.py) tells what happened; the router answers with
messages to send and with calls that are over.

The answer "no responders" means that a call was not delivered, so it goes to the next member at once. In the time
after a reconnect it does not mean that a member is gone: it may be on its way back as well, and is tried again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import (
    Broadcast,
    Call,
    Cancel,
    Done,
    Part,
    Send,
    died_while_out,
    failed,
    lost_while_out,
)
from fluster.actors.protocol.failures import FULL, advice_of
from fluster.actors.protocol.frames import Moment, WireReply
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import UNCOUNTED, Policy
from fluster.actors.routing.messages_out import BroadcastOut, MessageOut, MessagesOut
from fluster.actors.routing.pool_state import PoolState
from fluster.actors.routing.routing_pass import RoutingPass, nobody_listens
from fluster.errors import ActorNotFoundError, ConnectionLostError

RECONNECT_GRACE_S = 5.0


class Router:
    """The calls of one client."""

    def __init__(self) -> None:
        self._pools: dict[str, PoolState] = {}
        self._messages = MessagesOut()
        self._orders = itertools.count(1)
        self._grace_until: Moment | None = None
        self._turns_away = False  # some pool has calls that wait for room

    # ---- pools ------------------------------------------------------------------------------------------

    def open_pool(self, name: str, policy: Policy, *, shares_subject: bool = True) -> None:
        """Take calls for `name`; they wait until `on_known`.

        Without a subject that all its members hear, a broadcast asks each of them by itself.
        """
        self._pools[name] = PoolState(name, policy, shares_subject)

    def close_pool(self, name: str, error: Exception) -> list[Done]:
        """Forget a pool; its calls that wait or are out end with `error`."""
        done = self.fail_waiting(name, error)
        out = self._messages.take_of_pool(self._pools.pop(name))
        return done + [failed(call, error) for call in out]

    def take_waiting(self, name: str) -> list[Call | Broadcast]:
        """The calls of a pool that have not been sent, in order; they wait here no more."""
        return self._pools[name].take_waiting()

    def fail_waiting(self, name: str, error: Exception) -> list[Done]:
        """End the calls of a pool that have not been sent."""
        return [failed(item, error) for item in self.take_waiting(name)]

    def members(self, name: str) -> list[Member]:
        """The members of a pool that take calls, the oldest first."""
        return list(self._pools[name].choices)

    def on_known(self, name: str) -> None:
        """All members of a pool have been reported."""
        self._pools[name].known = True

    def resume(self, name: str) -> None:
        """Let the calls of a paused pool go on."""
        if name in self._pools:
            self._pools[name].resume()

    def on_member(self, name: str, member: Member) -> list[Done]:
        """A member is new or has changed. What was sent to it before it lost its connection is over.

        So is its part of a broadcast that was sent before it was back: that it missed one is not reported otherwise.
        """
        pool = self._pools[name]
        pool.put_member(member)
        disconnected_at = member.disconnected_at
        if disconnected_at is None:
            return []

        def was_cut_off(message: MessageOut) -> bool:
            until = disconnected_at if message.member is not None else member.reconnected_at or disconnected_at
            return frames.seconds_between(message.sent_at, until) > 0

        cut_off = self._messages.take_of_member(pool, member.endpoint_id, was_cut_off)
        return [failed(call, lost_while_out(call)) for call in cut_off]

    def on_member_leaving(self, name: str, endpoint_id: str) -> None:
        """A member takes no more calls."""
        self._pools[name].on_leaving(endpoint_id)

    def on_member_gone(self, name: str, endpoint_id: str, reason: str = "") -> list[Done]:
        """A member has ended: what is out there will not be answered."""
        pool = self._pools[name]
        pool.on_gone(endpoint_id)
        out = self._messages.take_of_member(pool, endpoint_id, lambda _message: True)
        pool.out.pop(endpoint_id, None)
        return [failed(call, died_while_out(call, endpoint_id, reason)) for call in out]

    # ---- on their way out -------------------------------------------------------------------------------

    def route(self, items: Iterable[Call | Broadcast], now: Moment) -> tuple[list[Send], list[Done]]:
        """Messages for calls, in order; those of one member that follow each other travel together.

        A call that finds no member is over with ActorNotFoundError.
        """
        routing = self._routing(now)
        for item in items:
            item.order = item.order or next(self._orders)
            pool = self._pools.get(item.pool)
            if pool is None:
                routing.refuse(item, _was_shut_down(item))
            else:
                routing.add(pool, item)
        return routing.finish()

    def route_waiting(self, name: str, now: Moment) -> tuple[list[Send], list[Done]]:
        """As `route`, for the calls that wait in a pool."""
        routing = self._routing(now)
        if name in self._pools:
            routing.add_waiting(self._pools[name])
        return routing.finish()

    def _routing(self, now: Moment) -> RoutingPass:
        return RoutingPass(self._messages, now, apart=self.in_grace(now))

    def choose_alone(self, item: Call, now: Moment) -> MessageOut | None:
        """The message for a call that nothing comes before where it goes; None when that is not so, or when in doubt.

        From any thread: it asks, and changes no state. The message is not out here until `take_in`.
        """
        pool = self._pools.get(item.pool)
        if pool is None or not pool.is_idle(item.pinned):
            return None
        member: Member | None
        if item.pinned is not None:
            member = pool.members.get(item.pinned)
        else:
            policy, choices = item.policy or pool.policy, pool.choices
            member = policy.choose(choices, pool.out) if choices and isinstance(policy, UNCOUNTED) else None
        if member is None or not member.hears_lanes or not item.begin():
            return None
        return MessageOut(pool, member, now, {0: item})

    def choose_alone_all(self, broadcast: Broadcast, now: Moment) -> BroadcastOut | None:
        """The same for a broadcast, which gets its members then."""
        pool = self._pools.get(broadcast.pool)
        if broadcast.carry is None or pool is None or not pool.is_idle(None):
            return None
        members = pool.on_lanes
        if not (members and pool.shares_subject) or self.in_grace(now):
            return None
        message = BroadcastOut(pool, broadcast, members, now)
        broadcast.carry(members, message)
        return message

    def take_in(self, number: int, message: MessageOut) -> list[Done]:
        """Take in a message that a waiting thread sent, with a negative number."""
        for call in message.calls.values():
            call.order = call.order or next(self._orders)
        if self._pools.get(message.pool.name) is not message.pool:
            return [failed(call, _was_shut_down(call)) for call in message.calls.values()]
        self._messages.put(number, message)
        return []

    def has_waiting(self, name: str) -> bool:
        pool = self._pools.get(name)
        return pool is not None and pool.has_waiting

    def in_grace(self, now: Moment) -> bool:
        """True for a while after a reconnect, when members may be missing that come back."""
        return self._grace_until is not None and frames.seconds_between(now, self._grace_until) > 0

    def take_back(self, number: int) -> list[Call]:
        """The calls of a message that could not be sent, in order, to be routed again."""
        message = self._messages.get(number)
        calls = self._messages.take_all(number)
        if message is not None and message.member is None:
            for endpoint_id, call in calls.items():
                call.pinned = endpoint_id
        return list(calls.values())

    @property
    def bytes_out(self) -> int:
        """Payloads of calls that are out."""
        return self._messages.bytes

    def where(self, call: Call) -> tuple[Member, tuple[int, int]] | None:
        """Who has a call, and as what: (number of its message, index there). None for one that is not out."""
        return self._messages.where(call)

    def is_wanted(self, number: int, endpoint_id: str, index: int) -> bool:
        """True while that call is waited for."""
        message = self._messages.get(number)
        call = message.calls.get(message.key(endpoint_id, index)) if message is not None else None
        return call is not None and not call.over

    # ---- on their way back ------------------------------------------------------------------------------

    def expects(self, number: int) -> bool:
        """True for a message that was sent and may be answered: what comes for others is not read."""
        return self._messages.expects(number)

    def recipient(self, number: int) -> Member | None:
        """To whom a message went that is out; None for a broadcast."""
        message = self._messages.get(number)
        return None if message is None else message.member

    def on_refused(self, number: int, error: Exception) -> list[Done]:
        """The member could not read a message: its calls end with `error`."""
        return [failed(call, error) for call in self._messages.take_all(number).values()]

    def on_reply(self, number: int, endpoint_id: str, replies: list[WireReply]) -> list[Done | Part]:
        """Calls that were answered, and parts of those that are streams. Answers that are not waited for are dropped."""
        message = self._messages.get(number)
        if message is None:
            return []
        if message.member is not None:
            endpoint_id = message.member.endpoint_id
        done: list[Done | Part] = []
        taken: list[Call] = []
        for index, ok, payload in replies:
            key = endpoint_id if message.member is None else index
            if ok > 1:  # not the end of it
                call = message.calls.get(key)
                if call is not None and not call.over:
                    done.append(Part(call, ok, payload))
                continue
            call = message.calls.pop(key, None)
            if call is None:
                continue
            taken.append(call)
            if call.waits and not ok and not call.over and advice_of(payload) == FULL:
                message.pool.turn_away(call, endpoint_id)
                self._turns_away = True
                continue
            if self._turns_away:
                message.pool.overflow.on_answer()
            call.over = True
            done.append(Done(call, bool(ok), payload))
        if taken:
            self._messages.strike(number, message, endpoint_id, taken)
        return done

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
        message = self._messages.get(number)
        if message is None:
            return [], []
        again: list[Call] = []
        done: list[Done] = []
        calls = self._messages.take_all(number)
        if message.member is not None and self.in_grace(now):
            endpoint_id = message.member.endpoint_id
            message.pool.on_nobody_listens(endpoint_id)
            if endpoint_id not in message.pool.overtaking:  # what is out later has been out then
                message.pool.overtaking[endpoint_id] = self._messages.out_at(message.pool, endpoint_id)
        for key, call in calls.items():
            if message.member is None:  # a broadcast: each member is asked by itself, and tells by itself
                call.pinned = key
                again.append(call)
                continue
            call.tried = (*call.tried, message.member.endpoint_id)
            if call.pinned is None and message.pool.untried(call):
                again.append(call)
            elif self.in_grace(now):
                message.pool.pause(call, message.member.endpoint_id)
            else:
                done.append(failed(call, nobody_listens(call)))
        return again, done

    def paused(self) -> list[str]:
        return [pool.name for pool in self._pools.values() if pool.paused]

    def on_timeout(self, call: Call) -> list[Cancel]:
        """This call is no longer waited for. Returns what to tell the actor that has it."""
        cancels = self.withdraw([call])
        message = self._messages.get(call.number)
        if message is not None and call.number is not None:
            self._messages.take(call.number, message.key_of(call))
        return cancels

    def withdraw(self, calls: Iterable[Call]) -> list[Cancel]:
        """Calls that were cancelled, and what to tell the actors that have them.

        One that is out counts as such until it is answered: its actor may still be at it, and others are better off
        elsewhere. Its Done is then ignored.
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
            member, position = found
            self._messages.drop_payload(call)
            cancel = cancels.get(member.endpoint_id)
            if cancel is None:  # its number comes after those of the calls, also where broadcasts are put in order
                cancel = cancels[member.endpoint_id] = Cancel(self._messages.next_number(), member, [])
            cancel.calls.append(position)
            if len(cancel.calls) == frames.MAX_CANCELS:
                full.append(cancels.pop(member.endpoint_id))
        return full + list(cancels.values())

    def on_disconnected(self, concerns: Callable[[int], bool] = lambda number: number > 0) -> list[Done]:
        """A connection is lost: what is out on it, by the numbers of its messages, may never be answered."""
        lost = "the connection to the bus was lost while the call was out; it may have run"
        out = (self._messages.take_all(number) for number in self._messages.numbers() if concerns(number))
        return [failed(call, ConnectionLostError(f"{call}: {lost}")) for calls in out for call in calls.values()]

    def on_reconnected(self, now: Moment) -> None:
        """The connection is back; others may still be missing."""
        self._grace_until = now.after(RECONNECT_GRACE_S)
        for pool in self._pools.values():
            pool.listening.clear()

    def close(self, error: Exception) -> list[Done]:
        """End everything."""
        return [done for name in list(self._pools) for done in self.close_pool(name, error)]

    # ---- what is where ----------------------------------------------------------------------------------

    def out(self) -> list[Call]:
        """The calls that are out."""
        return self._messages.calls()

    def waiting(self) -> list[Call | Broadcast]:
        """The calls that wait in their pools, those that are over included."""
        return [item for pool in self._pools.values() for item in (*pool.waiting, *pool.overflow)]

    def sanity_check(self) -> None:
        """Raise AssertionError when the books do not agree with each other."""
        counted = self._messages.count()
        for pool in self._pools.values():
            for endpoint_id, count in pool.out.items():
                if count != counted.get((pool.name, endpoint_id), 0):
                    raise AssertionError(f"{endpoint_id} of {pool.name} has {count} calls by the books: {counted}")
            for item in (*pool.waiting, *pool.overflow):
                if isinstance(item, Call) and item.number is not None:
                    raise AssertionError(f"{item} waits and is out")


def _was_shut_down(item: Call | Broadcast) -> Exception:
    return ActorNotFoundError(f"{item}: the pool was shut down")
