"""Calls whose callers wait for them, made by their own threads: the thread sends the call and reads its answer.

This is for a call, or a broadcast, that nothing of its client's comes before: nothing that was sent to its pool over the
client's other connection is unanswered. So it does not matter that two connections have no common order. And it is for
what usually happens: on all else that becomes of it (it fails, there are no responders, a member or its pool ends, its time is over)
the router takes its message over, by `take`.

Threads that wait for answers on a lane, each for its own, read for all of them in turn meanwhile (`LaneReaders`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any, Protocol, TypeVar

from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Broadcast, Call
from fluster.actors.protocol.frames import Moment
from fluster.actors.protocol.members import share_memory
from fluster.actors.results.futures import ActorFuture
from fluster.actors.routing.messages_out import BroadcastOut, MessageOut
from fluster_bus.access.address import BusAddress
from fluster_bus.core import codec, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import BusError, InvalidMessageError
from fluster_bus.direct.lane import Lane
from fluster_bus.direct.waiting import Eagerness, Waker
from fluster_bus.payloads import payloads
from fluster_bus.payloads.arena import Lent
from fluster_bus.running.blocked_waits import LOOK_S, wait_seeing_signals

T = TypeVar("T")


class Wait(Protocol):
    """Waits for the answers of a message, for so many seconds at most."""

    def __call__(self, patience_s: float | None = None, /) -> None: ...


_MAX_BYTES = 1 << 20  # what is larger may have to be stored first
_TIMER_RESOLUTION_S = 0.001  # not a moment early: the actor must find the call late as well

log = logging.getLogger(__name__)


class LaneCalls:
    """Those of one client. `settle` is called in threads that read, all else by `tell`, which has it done on the loop.

    `on_left` is given the number of a message whose thread waits no longer, though it may be answered yet; `on_lost` a number:
    messages with higher ones were out when the connection was lost.
    """

    def __init__(
        self,
        address: BusAddress,
        namespace: str,
        inbox: str,
        *,
        tell: Callable[..., object],
        settle: Callable[[Call, bytes], object],
        on_other: Callable[[int, MessageOut | None, Delivery], object],
        on_timeout: Callable[[int], object],
        on_left: Callable[[int], object],
        on_lost: Callable[[int], object],
    ) -> None:
        self._namespace = namespace
        self._inbox = inbox
        self._tell = tell
        self._settle, self._on_other, self._on_timeout, self._on_lost = settle, on_other, on_timeout, on_lost
        self._on_left = on_left
        self._numbers = itertools.count(-1, -1)  # the router numbers its own messages upwards
        self.out: dict[int, MessageOut | BroadcastOut] = {}
        self._taking = threading.Lock()  # held where a message, or a call of one, leaves our books
        self._eagerness = Eagerness.of_this_process()
        self._lane = Lane(address, "calls", on_disconnect=self._on_disconnect)
        self._readers = LaneReaders(self._lane)
        self._lane.subscribe(f"{inbox}.{subjects.ANY_TOKEN}", self._on_delivery)
        self._lane.start()

    # ---- from any thread --------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._lane.connected

    def send(self, message: MessageOut | BroadcastOut) -> Wait | None:
        """What waits until the message is answered, or is the router's; None when it could not be sent."""
        item: Call | Broadcast
        if isinstance(message, BroadcastOut):
            item = message.broadcast
            subject = subjects.actor_all(self._namespace, item.pool, item.method)
            # To gather the answers of many takes longer than one looks for them.
            when_done, eagerness = message.when_changed, None
        else:
            (item,) = message.calls.values()
            assert message.member is not None  # noqa: S101 - what goes to all is a BroadcastOut
            subject = subjects.method_of_member(message.member.address, item.method)
            future: Any = item.ticket  # now: one that is found to be a stream gets another
            when_done, eagerness = functools.partial(_when_done, future), self._eagerness
        payload = _carried(message, item.payload)
        if payload is None:
            return None
        number = next(self._numbers)
        _note_number(message, number)
        self.out[number] = message
        body = frames.encode_calls([item.to_wire(payload)])
        try:
            self._lane.publish(subject, body, reply=f"{self._inbox}.{number}")
        except BusError as error:
            log.debug("%s goes the other way: %s", item, error)
            if self._pop(number) is not None:
                _note_number(message, None)
                return None
        return functools.partial(self._wait, number, when_done, eagerness, item.deadline)

    def _wait(
        self,
        number: int,
        when_done: Callable[[Callable[[], object]], object],
        eagerness: Eagerness | None,
        deadline: Moment | None,
        patience_s: float | None = None,
    ) -> None:
        """Return when all are answered, or the message is alone no more, or patience ends: then the futures tell."""
        left_s = None
        if deadline is not None:
            left_s = frames.seconds_between(frames.now(), deadline) + _TIMER_RESOLUTION_S
        on_over = self._on_timeout
        if patience_s is not None and (left_s is None or patience_s < left_s):
            left_s, on_over = patience_s, self._on_left
        out = self.out
        self._readers.read_while(functools.partial(out.__contains__, number), when_done, left_s, eagerness)
        if number in out and not self._lane.closed:
            self._tell(on_over, number)
            self._lane.attend()  # who else would read the answers that come yet

    def _on_delivery(self, delivery: Delivery) -> None:
        subject, data, _reply, headers = delivery
        number = subjects.reply_number(subject)
        message = self.out.get(number)
        if headers is None and message is not None:
            try:
                endpoint_id, replies = frames.decode_replies(data)
            except InvalidMessageError as error:
                log.warning("an answer was dropped: %s", error)
                return
            _index, ok, payload = replies[0]
            if ok is True and (payload[:1] == codec.PICKLE or not payloads.is_stored(payload)):
                held = payload if payload[:1] == codec.PICKLE else payloads.held(payload)
                if isinstance(message, BroadcastOut) and message.take(endpoint_id, held):
                    if not message.missing:
                        self._pop(number)
                    return
                if self._is_settled(number, message, endpoint_id, held):
                    return
        # Out of our books at once: what follows, such as the end of a stream, must not pass for a plain result.
        self._tell(self._on_other, number, self._taken(number), delivery)

    def _is_settled(self, number: int, out: MessageOut | BroadcastOut, endpoint_id: str, payload: bytes) -> bool:
        """Give a call its result; False when its message was taken meanwhile, so that the router has to know."""
        message = out.make_calls() if isinstance(out, BroadcastOut) else out
        key = message.key(endpoint_id, 0)
        call = message.calls.get(key)
        if call is None:
            return True  # it is not waited for, like the answer of a member that is new
        # It leaves our books last: whom Ctrl-C stops in between leaves it to be ended with the connection.
        try:
            self._settle(call, payload)
        except InvalidStateError:
            log.debug("%s got another answer from the router", call)
        with self._taking:
            if self.out.get(number) is not out:
                return False
            message.calls.pop(key, None)
            if not message.calls:
                del self.out[number]
        return True

    def _on_disconnect(self) -> None:
        # By the time that the loop hears of it, others may be out on the next connection.
        self._tell(self._on_lost, next(self._numbers))

    # ---- on the loop ------------------------------------------------------------------------------------

    def take(self, number: int) -> MessageOut | None:
        """That message, whose thread reads for it no more; None when it was answered, or taken before."""
        message = self._taken(number)
        if message is not None:
            self._readers.interrupt()
        return message

    def _taken(self, number: int) -> MessageOut | None:
        """A message with its calls that is ours no more; None when they are all answered."""
        message = self._pop(number)
        if isinstance(message, BroadcastOut):
            message = message.make_calls()
        return message if message is not None and message.calls else None

    def _pop(self, number: int) -> MessageOut | BroadcastOut | None:
        with self._taking:
            return self.out.pop(number, None)

    def numbers(self, pool: str | None = None) -> list[int]:
        """The messages that are out, or those to one pool."""
        return [number for number, message in list(self.out.items()) if pool in (None, message.pool.name)]

    def when_seen(self, callback: Callable[[], object]) -> None:
        """Have `callback` run on the loop once all answers that were on their way have been handed out."""
        self._lane.when_seen(lambda: self._tell(callback))

    def close(self) -> None:
        self._lane.close(join=False)


def _note_number(message: MessageOut | BroadcastOut, number: int | None) -> None:
    if isinstance(message, BroadcastOut):
        message.number = number
    else:
        for call in message.calls.values():
            call.number = number


def _when_done(future: ActorFuture[object], wake: Callable[[], object]) -> None:
    future.add_done_callback(lambda _done: wake())


def _carried(message: MessageOut | BroadcastOut, payload: bytes) -> bytes | None:
    """A payload as it travels; None when it would have to be stored first, or its receivers cannot read what is lent."""
    if isinstance(payload, Lent):
        receivers = message.members if isinstance(message, BroadcastOut) else [message.member]
        if not share_memory(each for each in receivers if each is not None):
            return None
    return bytes(payload) if len(payload) <= _MAX_BYTES else None


class LaneFuture(ActorFuture[T]):
    """The future of a call whose caller waits for it at once, and may read its answer himself."""

    def __init__(self, call: str, loop: asyncio.AbstractEventLoop | None = None, *more: Any) -> None:
        super().__init__(call, loop, *more)
        self.wait_alone: Callable[[], None] | None = None  # if its call is carried

    def result(self, timeout: float | None = None) -> T:
        wait_alone, self.wait_alone = self.wait_alone, None  # it knows the call, which knows this future
        if wait_alone is not None and timeout is None and not self.done():
            wait_alone()
        return super().result(timeout)


class LaneReaders:
    """Those of one lane. What they wait for is brought about by the lane's callbacks, in the thread that reads."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._turns = lane.turns
        self._interrupter = Waker()

    def read_while(
        self,
        is_out: Callable[[], bool],
        when_done: Callable[[Callable[[], object]], object],
        timeout_s: float | None,
        eagerness: Eagerness | None = None,
    ) -> None:
        """Return when it `is_out` no more, or when the time is over or the lane is closed; take one's turn at reading meanwhile.

        `when_done(callback)` has a callback run once it is not, at once if it is not already. The reading thread sleeps as late as
        `eagerness` wants.
        """
        lane = self._lane
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while is_out() and lane.closed is None and (deadline is None or time.monotonic() < deadline):
            woken = threading.Event()
            try:
                try:
                    self._read_or_wait(woken, is_out, when_done, deadline, eagerness)
                finally:
                    lane.leave(woken.set)
            finally:
                lane.leave(woken.set)  # once more: Ctrl-C may come at any moment, in the midst of leaving too

    def interrupt(self) -> None:
        """Have the reading thread ask again whether it is done."""
        self._interrupter.wake()

    def _read_or_wait(
        self,
        woken: threading.Event,
        is_out: Callable[[], bool],
        when_done: Callable[[Callable[[], object]], object],
        deadline: float | None,
        eagerness: Eagerness | None,
    ) -> None:
        if not self._turns.ask(woken.set):
            self._lane.wake()  # it may be the keeper's turn
            when_done(woken.set)
            wait_seeing_signals(woken.wait, _left_s(deadline))
        if self._turns.has(woken.set):
            self._read_in_turn(is_out, deadline, eagerness)

    def _read_in_turn(self, is_out: Callable[[], bool], deadline: float | None, eagerness: Eagerness | None) -> None:
        lane = self._lane
        while is_out() and lane.closed is None and (deadline is None or time.monotonic() < deadline):
            # As wait_seeing_signals does.
            look_s = LOOK_S if deadline is None else min(deadline - time.monotonic(), LOOK_S)
            lane.receive(look_s, beside=self._interrupter, eagerness=eagerness)


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0)
