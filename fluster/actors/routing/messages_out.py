"""The messages of a client that are out, each with those of its calls that were not answered yet.

A broadcast that its waiting thread carries keeps its answers as they come, and makes calls for members that need them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fluster.actors.protocol.calls import Broadcast, Call, Send
from fluster.actors.protocol.frames import Moment
from fluster.actors.protocol.members import Member
from fluster.actors.routing.pool_state import PoolState


@dataclass(slots=True)
class MessageOut:
    """A message that is out: to one member, or to all of the pool when there is none."""

    pool: PoolState
    member: Member | None
    sent_at: Moment
    calls: dict[Any, Call]  # {index, or for a broadcast the endpoint id: call}

    def endpoint_id(self, key: Any) -> str:
        """Who has that one of its calls."""
        return key if self.member is None else self.member.endpoint_id

    def key(self, endpoint_id: str, index: int) -> Any:
        """As what that member knows one of its calls."""
        return endpoint_id if self.member is None else index

    def key_of(self, call: Call) -> Any:
        return next(key for key, each in self.calls.items() if each is call)


_MAX_LATE = 1_000


class MessagesOut:
    """They are numbered, and their calls counted with their pools by the member that has them."""

    def __init__(self) -> None:
        self._out: dict[int, MessageOut] = {}
        self._late: dict[int, None] = {}  # the last numbers that were given up, which may be answered yet
        self._last = 0
        self.bytes = 0  # payloads of the calls

    def next_number(self) -> int:
        self._last += 1
        return self._last

    def send(self, pool: PoolState, member: Member | None, calls: dict[object, Call], now: Moment) -> Send:
        """One more message; its calls are out from now on."""
        number = self.next_number()
        self.put(number, MessageOut(pool, member, now, calls))
        return Send(number, pool.name, member, list(calls.values()))

    def put(self, number: int, message: MessageOut) -> None:
        self._out[number] = message
        size = 0
        for call in message.calls.values():
            call.number = number
            size += len(call.payload)
        self.bytes += size
        counts = message.pool.out
        if message.member is not None:
            endpoint_id = message.member.endpoint_id
            counts[endpoint_id] = counts.get(endpoint_id, 0) + len(message.calls)
        else:
            for endpoint_id in message.calls:
                counts[endpoint_id] = counts.get(endpoint_id, 0) + 1

    def get(self, number: int | None) -> MessageOut | None:
        return None if number is None else self._out.get(number)

    def numbers(self) -> list[int]:
        return list(self._out)

    def take(self, number: int, key: Any) -> Call | None:
        """A call, which is out no more."""
        message = self._out.get(number)
        call = message.calls.pop(key, None) if message is not None else None
        if message is not None and call is not None:
            self.strike(number, message, message.endpoint_id(key), [call])
            if not message.calls:
                self._late[number] = None
                if len(self._late) > _MAX_LATE:
                    del self._late[next(iter(self._late))]
        return call

    def expects(self, number: int) -> bool:
        """True for a message that may be answered yet, also where the answer is no longer waited for."""
        return number in self._out or number in self._late

    def strike(self, number: int, message: MessageOut, endpoint_id: str, calls: Sequence[Call]) -> None:
        """Calls that one member had were taken from a message: strike them from the books."""
        size = 0
        for call in calls:
            call.number = None
            size += len(call.payload)
        self.bytes -= size
        if not message.calls:
            del self._out[number]
        if endpoint_id in message.pool.out:
            message.pool.out[endpoint_id] -= len(calls)

    def take_all(self, number: int) -> dict[Any, Call]:
        """The calls of a message by their keys, in order; none of one that is not out."""
        message = self._out.get(number)
        keys = list(message.calls) if message is not None else []
        return {key: call for key in keys if (call := self.take(number, key)) is not None}

    def take_of_pool(self, pool: PoolState) -> list[Call]:
        numbers = [number for number, message in self._out.items() if message.pool is pool]
        return [call for number in numbers for call in self.take_all(number).values()]

    def take_of_member(self, pool: PoolState, endpoint_id: str, concerns: Callable[[MessageOut], bool]) -> list[Call]:
        """The calls that a member has, of those messages that `concerns` says."""
        taken: list[Call] = []
        for number, message in list(self._out.items()):
            if message.pool is pool and concerns(message):
                for key in [key for key in message.calls if message.endpoint_id(key) == endpoint_id]:
                    call = self.take(number, key)
                    taken += [call] if call is not None else []
        return taken

    def out_at(self, pool: PoolState, endpoint_id: str) -> list[Call]:
        """The calls that a member has."""
        return [
            call
            for message in self._out.values()
            if message.pool is pool
            for key, call in message.calls.items()
            if message.endpoint_id(key) == endpoint_id
        ]

    def drop_payload(self, call: Call) -> None:
        """The payload of a call is no longer needed, though the call is still out."""
        self.bytes -= len(call.payload)
        call.payload = b""

    def where(self, call: Call) -> tuple[Member, tuple[int, int]] | None:
        """Who has a call, and as what: (number of its message, index there). None for one that is not out."""
        message = self.get(call.number)
        if message is None or call.number is None:
            return None
        key = message.key_of(call)
        if message.member is not None:
            return message.member, (call.number, key)
        member = message.pool.members.get(key)
        return None if member is None else (member, (call.number, 0))

    def calls(self) -> list[Call]:
        return [call for message in self._out.values() for call in message.calls.values()]

    def count(self) -> dict[tuple[str, str], int]:
        """The calls by (pool, endpoint id), counted anew. Raises AssertionError when the books do not agree."""
        counted: dict[tuple[str, str], int] = {}
        for number, message in self._out.items():
            if not message.calls:
                raise AssertionError(f"message {number} is out without calls")
            for key, call in message.calls.items():
                if call.number != number or (call.over and not call.ticket.cancelled()):
                    raise AssertionError(f"{call} is out in message {number} and says {call.number}, {call.over=}")
                member = (message.pool.name, message.endpoint_id(key))
                counted[member] = counted.get(member, 0) + 1
        return counted


class BroadcastOut:
    """One that is out, as a MessageOut is, but without a call and a future for each member until `make_calls` makes them.

    Most end with a plain result of each, which then is all that there is to know.
    """

    __slots__ = (
        "_lock",
        "_message",
        "_results",
        "_wakes",
        "broadcast",
        "members",
        "missing",
        "number",
        "pool",
        "sent_at",
    )

    def __init__(self, pool: PoolState, broadcast: Broadcast, members: Sequence[Member], now: Moment) -> None:
        self.pool = pool
        self.broadcast = broadcast
        self.members = members
        self.sent_at = now
        self.number: int | None = None
        self.missing: set[str] = {
            member.endpoint_id for member in members
        }  # those that have not answered; for who looks only
        self._results: dict[str, bytes] = {}
        self._message: MessageOut | None = None
        self._wakes: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def take(self, endpoint_id: str, payload: bytes) -> bool:
        """Keep the result of a member; False when it is to be given to its call, as there are calls."""
        with self._lock:
            if self._message is not None:
                return False
            if endpoint_id in self.missing:  # else it is new, and was not asked
                self._results[endpoint_id] = payload
                self.missing.remove(endpoint_id)
        if not self.missing:
            self._wake()
        return True

    def results(self) -> list[bytes] | None:
        """The payloads of all, in the order of the members; None when some are missing, or there are calls."""
        if self.missing or self._message is not None:
            return None
        return [self._results[member.endpoint_id] for member in self.members]

    def make_calls(self) -> MessageOut:
        """The message with the calls that are not answered yet: those who wait are given futures, from any thread."""
        with self._lock:
            if self._message is None:
                calls = self.broadcast.calls(self.members)
                for endpoint_id, payload in self._results.items():
                    call = calls.pop(endpoint_id)
                    call.over = True
                    call.ticket.settle(True, payload)
                for call in calls.values():
                    call.number = self.number
                self._message = MessageOut(self.pool, None, self.sent_at, calls)
        self._wake()
        return self._message

    def when_changed(self, wake: Callable[[], object]) -> None:
        """Have `wake` called once all have answered, or calls were made, or one of those is answered."""
        with self._lock:
            message = self._message
            if message is None:
                self._wakes.append(wake)
        futures: list[Any] = [] if message is None else [call.ticket for call in list(message.calls.values())]

        def on_done(_done: object) -> None:
            wake()

        for future in futures:
            future.add_done_callback(on_done)
        if not futures and (message is not None or not self.missing):
            wake()

    def _wake(self) -> None:
        with self._lock:
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            wake()
