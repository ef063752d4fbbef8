"""A pool as the router of its caller knows it: its members, how much they have, and the calls that wait."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fluster.actors.protocol.calls import Broadcast, Call
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import Policy


class Overflow:
    """Calls that found mailboxes full. They wait in the order in which they were issued, and go out again as the actors answer.

    No message tells when a mailbox has room. But each answer has made some: two calls may follow it, so their number
    doubles until one is turned away again. Where no answers come, since other clients take the room, one call is sent
    now and then to see.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[int, Call]] = []  # a heap of (order, call)
        self._room = 0  # how many may be sent
        self.bytes = 0  # of their payloads

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return (call for _order, call in sorted(self._calls))

    def has_room(self) -> bool:
        return bool(self._calls) and self._room > 0

    def add(self, call: Call) -> None:
        heapq.heappush(self._calls, (call.order, call))
        self.bytes += len(call.payload)

    def turn_away(self, call: Call, *, everywhere: bool) -> None:
        """A mailbox was full; unless all were `everywhere`, the call may go to another at once."""
        self._room = 0 if everywhere else self._room + 1
        self.add(call)

    def on_answer(self) -> None:
        """A mailbox has one call less."""
        self._room += 2

    def probe(self) -> None:
        """Let one call go, to see whether there is room."""
        self._room = max(self._room, 1)

    def take(self) -> Call | None:
        """The next call that may be sent; those that are over are passed over."""
        while self._calls and self._room > 0:
            _order, call = heapq.heappop(self._calls)
            self.bytes -= len(call.payload)
            if not call.over:
                self._room -= 1
                return call
        return None

    def clear(self) -> list[Call]:
        """Give all back that are not over."""
        calls = [call for call in self if not call.over]
        self._calls.clear()
        self.bytes = 0
        return calls


@dataclass(slots=True, eq=False)
class PoolState:
    """Calls wait here until the members are known, while it is paused, and in `overflow` for room in mailboxes."""

    name: str
    policy: Policy
    shares_subject: bool  # that all its members hear
    members: dict[str, Member] = field(default_factory=dict)  # {endpoint id: member}, the oldest first
    choices: list[Member] = field(default_factory=list)  # those of them that take calls
    on_lanes: list[Member] = field(default_factory=list)  # the same, where all of them hear lanes; else none
    out: dict[str, int] = field(default_factory=dict)  # {endpoint id: calls}
    known: bool = False  # its members have been read
    paused: bool = False
    waiting: deque[Call | Broadcast] = field(default_factory=deque)
    overflow: Overflow = field(default_factory=Overflow)
    # After a reconnect each member is sent one call alone, by which it is seen whether it listens again.
    probing: set[str] = field(default_factory=set)  # endpoints that have been sent one
    listening: set[str] = field(default_factory=set)  # endpoints from which it did not come back
    # {endpoint id: out there as an earlier one came back}.
    overtaking: dict[str, list[Call]] = field(default_factory=dict)
    overtook: dict[str, int] = field(default_factory=dict)  # {endpoint id: the last of those that it has had}

    @property
    def blocked(self) -> bool:
        return self.paused or not self.known

    @property
    def has_waiting(self) -> bool:
        """True when some call that waits may go."""
        return bool(self.waiting) or self.overflow.has_room()

    def is_idle(self, endpoint_id: str | None) -> bool:
        """True when a call would go at once, and none waits nor is out, there or at one member. From any thread."""
        out = any(list(self.out.values())) if endpoint_id is None else self.out.get(endpoint_id, 0)
        return not (out or self.blocked or self.waiting or self.overflow)

    # ---- members ----------------------------------------------------------------------------------------

    def put_member(self, member: Member) -> None:
        """A member is new or has changed."""
        self.members[member.endpoint_id] = member
        self._update_choices()

    def on_leaving(self, endpoint_id: str) -> None:
        """A member takes no more calls."""
        member = self.members.get(endpoint_id)
        if member is not None:
            self.put_member(replace(member, leaving=True))

    def on_gone(self, endpoint_id: str) -> None:
        """A member has ended."""
        self.members.pop(endpoint_id, None)
        self.overtaking.pop(endpoint_id, None)
        self.overtook.pop(endpoint_id, None)
        self._update_choices()

    def _update_choices(self) -> None:
        self.choices = [member for member in self.members.values() if not member.leaving]
        self.on_lanes = self.choices if all(member.hears_lanes for member in self.choices) else []

    def untried(self, call: Call) -> Sequence[Member]:
        """Those that take calls and have not had this one."""
        return [each for each in self.choices if each.endpoint_id not in call.tried] if call.tried else self.choices

    # ---- calls ------------------------------------------------------------------------------------------

    def keep_waiting(self, item: Call | Broadcast) -> None:
        """Those that wait stay in the order in which they were issued, also when one comes back."""
        comes_back = bool(self.waiting) and self.waiting[-1].order > item.order
        self.waiting.append(item)
        if comes_back:
            self.waiting = deque(sorted(self.waiting, key=lambda each: each.order))

    def pause(self, call: Call, endpoint_id: str) -> None:
        """Have all wait, with this one that comes back from there."""
        call.tried = ()
        call.turned_back = endpoint_id
        self.paused = True
        self.keep_waiting(call)

    def resume(self) -> None:
        """Have none wait. What was sent behind calls that came back, and did not come back itself, has overtaken them."""
        self.paused = False
        self.listening |= self.probing
        self.probing.clear()
        for endpoint_id, calls in self.overtaking.items():
            ahead = [call.order for call in calls if call.turned_back is None]
            self.overtook[endpoint_id] = max([self.overtook.get(endpoint_id, 0), *ahead])
        self.overtaking.clear()

    def probe(self, endpoint_id: str) -> None:
        """A call goes to a member of which it is not known whether it listens again: others wait until it is."""
        if endpoint_id not in self.listening:
            self.probing.add(endpoint_id)
            self.paused = True

    def on_nobody_listens(self, endpoint_id: str) -> None:
        """A call came back from there."""
        self.probing.discard(endpoint_id)
        self.listening.discard(endpoint_id)

    def is_overtaken(self, call: Call, endpoint_id: str) -> bool:
        """Whether that member has had a later call than this one, which it was to have before."""
        return call.turned_back == endpoint_id and call.order < self.overtook.get(endpoint_id, 0)

    def turn_away(self, call: Call, endpoint_id: str) -> None:
        """A mailbox was full."""
        call.tried = (*call.tried, endpoint_id)
        everywhere = call.pinned is not None or not self.untried(call)
        if everywhere:
            call.tried = ()
        self.overflow.turn_away(call, everywhere=everywhere)

    def take_waiting(self) -> list[Call | Broadcast]:
        """All that wait, which no longer do; without those that are over."""
        waiting, self.waiting = [*self.overflow.clear(), *self.waiting], deque()
        return [item for item in waiting if not item.over]
