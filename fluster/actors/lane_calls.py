"""Calls whose callers wait for them, made by their own threads: the thread sends the call and reads its answer.

This is for a call that nothing of its client's comes before: nothing that was sent to its pool over the client's other
connection is unanswered. So it does not matter that two connections have no common order. And it is for what usually
happens: on all else that becomes of a call (it fails, nobody listens, its member or its pool ends, its time is over)
the desk takes it over, by `take`, with the number of its message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any, NamedTuple, TypeVar

from fluster.actors import frames
from fluster.actors.calls import Call, Done
from fluster.actors.frames import Moment
from fluster.actors.futures import ActorFuture
from fluster.actors.members import Member
from fluster_bus import codec, subjects
from fluster_bus.address import BusAddress
from fluster_bus.delivery import Delivery
from fluster_bus.errors import BusError, InvalidMessageError
from fluster_bus.lane import Lane

T = TypeVar("T")

_MAX_BYTES = 1 << 20  # what is larger may have to be stored first
_TIMER_RESOLUTION_S = 0.001  # not a moment early: the actor must find the call late as well

log = logging.getLogger(__name__)


class AloneCall(NamedTuple):
    """A call that is out in a message of its own."""

    call: Call
    member: Member
    sent_at: Moment


class LaneCalls:
    """Those of one client. `settle` is called in threads that read, all else by `tell`, which has it done on the loop.

    `on_lost` is given a number: messages with higher ones were out when the connection was lost.
    """

    def __init__(
        self,
        address: BusAddress,
        inbox: str,
        *,
        tell: Callable[..., object],
        settle: Callable[[Done], object],
        on_other: Callable[[int, AloneCall | None, Delivery], object],
        on_timeout: Callable[[int], object],
        on_lost: Callable[[int], object],
    ) -> None:
        self._inbox = inbox
        self._tell = tell
        self._settle, self._on_other, self._on_timeout, self._on_lost = settle, on_other, on_timeout, on_lost
        self._numbers = itertools.count(-1, -1)  # the desk numbers its own messages upwards
        self._out: dict[int, AloneCall] = {}  # {number of the message: its call}
        self._lane = Lane(address, "calls", on_disconnect=self._on_disconnect)
        self._lane.subscribe(f"{inbox}.{subjects.ANY_TOKEN}", self._on_delivery)
        self._lane.start()

    # ---- from any thread --------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._lane.connected

    def send(self, call: Call, member: Member, now: Moment) -> bool:
        """False when it could not be sent."""
        if type(call.payload) is not bytes or len(call.payload) > _MAX_BYTES:
            return False
        number = next(self._numbers)
        call.number = number
        self._out[number] = AloneCall(call, member, now)
        body = frames.encode_calls([call.to_wire(call.payload)])
        try:
            self._lane.publish(
                subjects.method_of_member(member.address, call.method), body, reply=f"{self._inbox}.{number}"
            )
        except BusError as error:
            log.debug("%s goes the other way: %s", call, error)
            if self._out.pop(number, None) is None:
                return True  # it has ended meanwhile
            call.number = None
            return False
        if isinstance(call.ticket, LaneFuture):
            call.ticket.wait_alone = lambda: self._wait(number, call)
        return True

    def _wait(self, number: int, call: Call) -> None:
        """Return when the call is answered, or is alone no more: then its future tells."""
        left_s = None
        if call.deadline is not None:
            left_s = frames.seconds_between(frames.now(), call.deadline) + _TIMER_RESOLUTION_S
        ticket: Any = call.ticket
        out = self._out
        self._lane.read_until(
            lambda: number not in out, lambda wake: ticket.add_done_callback(lambda _done: wake()), left_s
        )
        if number in out and not self._lane.closed:
            self._tell(self._on_timeout, number)

    def _on_delivery(self, delivery: Delivery) -> None:
        number = int(subjects.last_token(delivery.subject))
        if delivery.headers is None and number in self._out:
            try:
                _endpoint_id, replies = frames.decode_replies(delivery.data)
            except InvalidMessageError as error:
                log.warning("an answer was dropped: %s", error)
                return
            _place, ok, payload = replies[0]
            if ok is True and codec.is_pickle(payload):  # else it lies elsewhere
                self._on_result(number, payload)
                return
        # Out of our books at once: what follows, such as the end of a stream, must not pass for a plain result.
        self._tell(self._on_other, number, self._out.pop(number, None), delivery)

    def _on_result(self, number: int, payload: bytes) -> None:
        alone = self._out.get(number)
        if alone is not None:
            # It leaves our books last: whom Ctrl-C stops in between leaves it to be ended with the connection.
            with contextlib.suppress(InvalidStateError):  # the desk was told something else of it
                self._settle(Done(alone.call, ok=True, payload=payload))
            self._out.pop(number, None)

    def _on_disconnect(self) -> None:
        # By the time that the loop hears of it, others may be out on the next connection.
        self._tell(self._on_lost, next(self._numbers))

    # ---- on the loop ------------------------------------------------------------------------------------

    def take(self, number: int) -> AloneCall | None:
        """The call of that message, whose thread reads for it no more; None when it was answered, or taken before."""
        alone = self._out.pop(number, None)
        if alone is not None:
            self._lane.interrupt()
        return alone

    def numbers(self, pool: str | None = None) -> list[int]:
        """The messages of the calls that are out, or of those to one pool."""
        return [number for number, alone in list(self._out.items()) if pool in (None, alone.call.pool)]

    def when_seen(self, callback: Callable[[], object]) -> None:
        """Have `callback` run on the loop once all answers that were on their way have been handed out."""
        self._lane.when_seen(lambda: self._tell(callback))

    def close(self) -> None:
        self._lane.close(join=False)


class LaneFuture(ActorFuture[T]):
    """The future of a call whose caller waits for it at once, and may read its answer himself."""

    def __init__(self, call: str, loop: asyncio.AbstractEventLoop | None = None, *more: Any) -> None:
        super().__init__(call, loop, *more)
        self.wait_alone: Callable[[], None] | None = None

    def _wait(self, timeout: float | None) -> None:
        if self.wait_alone is not None and timeout is None:
            self.wait_alone()
        super()._wait(timeout)
