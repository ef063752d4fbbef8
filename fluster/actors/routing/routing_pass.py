"""One pass over calls: to which members they go, and in which messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Broadcast, Call, Done, Send, failed, faulted
from fluster.actors.protocol.frames import Moment
from fluster.actors.protocol.members import Member
from fluster.actors.routing.messages_out import MessagesOut
from fluster.actors.routing.pool_state import PoolState
from fluster.errors import ActorNotFoundError, MailboxFullError, NotRunError

MAX_TURNED_AWAY = 100_000  # calls of one pool that wait for room in mailboxes


class NobodyServesError(ActorNotFoundError):
    """The pool is empty. The shell knows how to say it better, and raises it as its parent."""


class RoutingPass:
    """It joins the calls of a member as long as nothing comes between that could be overtaken.

    `apart` has broadcasts ask each member by itself: one of many that misses a message would go unnoticed.
    """

    def __init__(self, messages: MessagesOut, now: Moment, *, apart: bool) -> None:
        self._messages = messages
        self._now = now
        self._apart = apart
        self._joining: dict[str, tuple[PoolState, Member, list[Call]]] = {}  # {endpoint id: its calls so far}
        self._sends: list[Send] = []
        self._done: list[Done] = []

    def add(self, pool: PoolState, item: Call | Broadcast) -> None:
        """Send an item, or have it wait behind those of its pool that wait."""
        if isinstance(item, Call) and item.waits and pool.overflow:
            self._add_overflow(pool, item)
        elif pool.waiting or not self._place(pool, item):
            pool.keep_waiting(item)  # also behind others that wait: none overtakes

    def refuse(self, item: Call | Broadcast, error: Exception) -> None:
        self._done.append(failed(item, error))

    def _add_overflow(self, pool: PoolState, call: Call) -> None:
        if len(pool.overflow) < MAX_TURNED_AWAY:
            pool.overflow.add(call)
            return
        text = f"{call}: the mailboxes are full, and {MAX_TURNED_AWAY:,} calls wait for room already: wait for some"
        self.refuse(call, MailboxFullError(text))

    def add_waiting(self, pool: PoolState) -> None:
        """Send what waits in a pool, as far as it may go."""
        while pool.waiting and self._place(pool, pool.waiting[0]):
            pool.waiting.popleft()
        while not pool.waiting and (call := pool.overflow.take()) is not None:
            if not pool.untried(call):
                call.tried = ()
            if not self._place(pool, call):
                pool.overflow.add(call)
                break

    def _place(self, pool: PoolState, item: Call | Broadcast) -> bool:
        """True when the item does not have to wait: it goes out, or it is over."""
        if pool.blocked:
            return False
        self._take(pool, item)
        return True

    def _take(self, pool: PoolState, item: Call | Broadcast) -> None:
        try:
            if item.over:
                pass  # it is no longer waited for
            elif isinstance(item, Broadcast):
                self.place_broadcast(pool, item)
            else:
                self.place_call(pool, item)
        except Exception as error:
            self._done.append(faulted(item, error))

    def place_call(self, pool: PoolState, call: Call) -> None:
        member: Member | None
        if call.pinned is not None:
            member = pool.members.get(call.pinned)
            if member is None:
                self.refuse(call, NotRunError(f"{call}: the actor {call.pinned} ended; the call was not run"))
                return
        else:
            choices = pool.untried(call) if call.tried else pool.choices
            if not choices:
                self.refuse(call, nobody_listens(call))
                return
            try:
                member = (call.policy or pool.policy).choose(choices, pool.out)
            except Exception as error:  # a user's: it must not end the other calls of this client
                self.refuse(call, error)
                return
        if call.turned_back is not None and self._is_overtaken(pool, call, member):
            return
        if call.blocks is not None and (deadlock := call.blocks.deadlock(call, member)) is not None:
            self.refuse(call, deadlock)
        elif call.begin():
            endpoint_id = member.endpoint_id
            if self._apart:
                pool.probe(endpoint_id)
            joining = self._joining.get(endpoint_id)
            if joining is None:
                joining = self._joining[endpoint_id] = pool, member, []
            joining[2].append(call)
            # Counted at once, so that the policy sees it when it chooses for the next call.
            pool.out[endpoint_id] = pool.out.get(endpoint_id, 0) + 1

    def _is_overtaken(self, pool: PoolState, call: Call, member: Member) -> bool:
        """Whether a call that came back from a member is over, since the member has had later ones by now."""
        is_overtaken = pool.is_overtaken(call, member.endpoint_id)
        call.turned_back = None
        if is_overtaken:
            text = (
                f"{call}: no process listened at {member.endpoint_id} for a moment, and calls made later were run there"
            )
            self.refuse(call, NotRunError(f"{text}; to keep their order, this one was not run"))
        return is_overtaken

    def place_broadcast(self, pool: PoolState, broadcast: Broadcast) -> None:
        members = pool.choices
        if not members:
            self.refuse(broadcast, nobody_listens(broadcast))
            return
        calls = broadcast.calls(members)
        in_json = any(member.takes_json_only for member in members)  # such a reply does not say whose it is
        if not pool.shares_subject or in_json or self._apart:
            for endpoint_id, call in calls.items():
                call.pinned = endpoint_id
                self._take(pool, call)
        elif calls:
            self._flush(pool)
            self._sends.append(self._messages.send(pool, None, calls, self._now))

    def _flush(self, of: PoolState | None = None) -> None:
        for endpoint_id, (pool, member, calls) in list(self._joining.items()):
            if of is None or of is pool:
                del self._joining[endpoint_id]
                pool.out[endpoint_id] -= len(calls)
                for batch in _batches(member, calls):
                    self._sends.append(self._messages.send(pool, member, dict(enumerate(batch)), self._now))

    def finish(self) -> tuple[list[Send], list[Done]]:
        """The messages, in order, and the calls that are over."""
        self._flush()
        return self._sends, self._done


def _batches(member: Member, calls: list[Call]) -> Iterable[Sequence[Call]]:
    if member.takes_json_only:  # in the form that people write too, a message is one call
        return [[call] for call in calls]
    return frames.batches(calls, [len(call.payload) for call in calls])


def nobody_listens(item: Call | Broadcast) -> Exception:
    """Why a call ends for which there is no other member."""
    if isinstance(item, Call) and item.pinned is not None:
        return NotRunError(f"{item}: {item.pinned} has ended; the call was not run")
    return NobodyServesError(f"{item}: no actor serves {item.pool!r}; the call was not run")
