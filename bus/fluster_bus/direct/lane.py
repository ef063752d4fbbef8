"""A small connection to NATS for threads that block: the thread that waits for a message reads the socket itself.

    thread ── publish ──► Line ──► server        the turn to read (waiting.py) goes from thread to thread; callbacks
    thread ◄─ receive ◄── Line ◄── server        run in the thread that has it

One thread more, the keeper, makes the connection and makes it anew when it is lost, sends pings, and reads when no other
thread does: a moment after the turn was given back, so that it never stands in the way of threads that come and go. When
others wait for the turn it gives it to them at once.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from fluster_bus.access.address import BusAddress
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import (
    BusError,
    ClosedError,
    CredentialsError,
    DisconnectedError,
    MessageTooLargeError,
)
from fluster_bus.direct import wire
from fluster_bus.direct.line import Dialler, Line
from fluster_bus.direct.pulse import PingTiming, Pulse
from fluster_bus.direct.waiting import Eagerness, OnTurn, PollInterval, Turns, Waker
from fluster_bus.direct.wire import Info, NumberedDelivery, Ping, Pong, ProtocolError, Refusal, Said

log = logging.getLogger(__name__)

_UNREAD_S = 0.005  # the keeper reads when no thread has for so long, at least
_LONGEST_INTERVAL_S = 0.04  # of the keeper while others take turns all the time; each costs them a change of threads
_ASLEEP_AFTER_S = 0.1
_CLOSE_TIMEOUT_S = 5.0

_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


class _Subscription(NamedTuple):
    subject: str
    queue: str
    callback: Callable[[Delivery], object]


def _nothing() -> None:
    pass


class Lane:
    """A connection to the bus that comes back by itself. Any thread may use it.

    It is connected some time after `start`; `on_connect` and `on_disconnect` are called every time. `on_wake` answers
    `wake`, and is called when the keeper begins to read. They run in the keeper or in a thread that uses the lane just
    then, and must not block.
    """

    def __init__(
        self,
        address: BusAddress,
        name: str,
        *,
        on_connect: Callable[[], object] = _nothing,
        on_disconnect: Callable[[], object] = _nothing,
        on_wake: Callable[[], object] = _nothing,
        pings: PingTiming | None = None,
    ) -> None:
        self.address = address
        self.name = name
        self.turns = Turns()
        self._on_connect, self._on_disconnect, self._on_wake = on_connect, on_disconnect, on_wake
        self._ping_timing = pings or PingTiming.of_this_process()
        self._line: Line | None = None
        self.closed: str | None = None  # why
        self.error: BusError | None = None  # why there is no connection
        self._standing = threading.Condition()  # over the line, whether it is closed, and the subscriptions
        self._numbers = itertools.count(1)
        self._subscriptions: dict[int, _Subscription] = {}
        self._pings: deque[Callable[[], object]] = deque()  # those out on this line: what waits for their PONG
        self._dialler = Dialler(address, name)
        self._heard = True  # anything since the last ping
        self._pulse = Pulse(self._ping_timing, time.monotonic())  # of this line
        self._asleep = False
        self._poll_interval = PollInterval(_UNREAD_S, _LONGEST_INTERVAL_S)  # of the keeper
        self._waker = Waker()
        self._keeper = threading.Thread(target=self._keep, name=f"{name} lane", daemon=True)

    # ---- life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect."""
        _lanes.add(self)
        self._keeper.start()

    @property
    def connected(self) -> bool:
        return self._line is not None

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until there is a connection.

        Raises CredentialsError as soon as the server refuses them, ConnectError when there is none in time, ClosedError.
        """
        with self._standing:
            self._standing.wait_for(
                lambda: self.connected or self.closed or isinstance(self.error, CredentialsError), timeout_s
            )
            if not self.connected:
                raise self.error if self.error is not None and not self.closed else self._unavailable()

    def _unavailable(self) -> BusError:
        if self.closed is not None:
            return ClosedError(self.closed)
        return DisconnectedError(f"the connection to {self.address} is lost; it is being rebuilt")

    def close(self, *, join: bool = True) -> None:
        """Send what is written, then leave. What waits for the server to see something is woken at once.

        With `join`, the keeper has ended on return.
        """
        try:
            self.flush()
        except BusError:
            log.debug("%s: the connection was lost while it was closed", self.name)
        with self._standing:
            if self.closed is not None:
                return
            self.closed = f"the connection {self.name!r} was closed"
            self._standing.notify_all()
        line = self._line
        if line is not None:
            self._lose(line, "closed")
        if self._keeper.ident is None:  # it was never started
            self._waker.close()
            return
        self.wake()
        if join and threading.current_thread() is not self._keeper:
            self._keeper.join(_CLOSE_TIMEOUT_S)

    def _after_fork(self) -> None:
        # Its locks may be held by threads that stayed behind, and the socket is the parent's: nothing is sent.
        self.closed = f"the connection {self.name!r} belongs to the process that was forked: make one here"
        self._line = None
        self._waker.close()

    # ---- sending ----------------------------------------------------------------------------------------

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes, in bytes."""
        line = self._line
        return line.max_payload if line is not None else 1 << 20

    def publish(
        self,
        subject: str,
        data: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
        flush: bool = True,
    ) -> None:
        """Send a message, with `flush=False` when `flush` is called.

        Raises DisconnectedError, ClosedError, MessageTooLargeError.
        """
        line = self._line
        if line is None:
            raise self._unavailable()
        if len(data) > line.max_payload:
            raise MessageTooLargeError(
                f"the message to {subject} has {len(data):,} bytes, over the server's limit of {line.max_payload:,}"
            )
        line.add(wire.publish(subject, data, reply, headers))
        if flush:
            self._flush(line)

    def flush(self) -> None:
        """Send what was added. A connection that is lost by it is reported by `on_disconnect`."""
        line = self._line
        if line is not None:
            self._flush(line)

    def _flush(self, line: Line, *, wait: bool = True) -> None:
        try:
            line.flush(wait=wait)
        except OSError as error:
            self._lose(line, str(error))
        except BaseException:  # Ctrl-C may have cut a message in two
            self._lose(line, "a thread was interrupted while it wrote")
            raise

    def when_seen(self, callback: Callable[[], object]) -> None:
        """Have `callback` run once the server has dealt with all that was sent before, and what it had sent to here by
        then was handed on; at once, when there is no connection, and as soon as it is lost.
        """
        with self._standing:
            line = self._line
            if line is not None:
                self._pings.append(callback)
                line.add(wire.PING)
        if line is None:
            callback()
        else:
            self._flush(line, wait=False)

    # ---- subscriptions ----------------------------------------------------------------------------------

    def subscribe(self, subject: str, callback: Callable[[Delivery], object], *, queue: str = "") -> int:
        """Have `callback` run for each message, in the order in which they come; the number of the subscription."""
        with self._standing:
            number = next(self._numbers)
            self._subscriptions[number] = _Subscription(subject, queue, callback)
            line = self._line
            if line is not None:
                line.add(wire.subscribe(number, subject, queue))
        if line is not None:
            self._flush(line)
        return number

    def unsubscribe(self, numbers: list[int], then: Callable[[], object] = _nothing) -> None:
        """Hear no more; what is on its way here is still handed on, and after that `then` is called."""
        with self._standing:
            if self._line is None:
                self._forget(numbers)  # before there is a connection again, which would take them up
            else:
                self._line.add(b"".join(map(wire.unsubscribe, numbers)))

        def gone() -> None:
            self._forget(numbers)
            then()

        self.when_seen(gone)

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self._subscriptions.pop(number, None)

    # ---- reading ----------------------------------------------------------------------------------------

    def receive(
        self, timeout_s: float | None = None, *, beside: Waker | None = None, eagerness: Eagerness | None = None
    ) -> None:
        """Wait for messages, or for a connection, and hand on what has come. For the thread whose turn it is.

        Where there is a connection, it returns as well when `beside` wakes.
        """
        line = self._line
        if line is None:
            with self._standing:
                self._standing.wait_for(lambda: self.connected or self.closed, timeout_s)
        elif line.wait(timeout_s) if beside is None else line.wait_beside(beside, timeout_s, eagerness):
            self._read(line)

    def leave(self, on_turn: OnTurn) -> None:
        """Give the turn back, or wait for it no more."""
        self.turns.leave(on_turn)
        if self._asleep:
            self.wake()

    def _read(self, line: Line) -> None:
        try:
            self._heard = True
            for said in line.read():
                if type(said) is not NumberedDelivery:
                    self._on_said(line, said)
                    continue
                subscription = self._subscriptions.get(said.subscription)
                if subscription is not None:
                    try:
                        subscription.callback(said.delivery)
                    except Exception:
                        log.exception("%s: %r failed", self.name, subscription.callback)
        except (OSError, ProtocolError) as error:
            self._lose(line, str(error))
        except BaseException:  # Ctrl-C may have dropped what was read
            self._lose(line, "a thread was interrupted while it read")
            raise

    def _on_said(self, line: Line, said: Said) -> None:
        if isinstance(said, Ping):
            line.add(wire.PONG)
            self._flush(line, wait=False)
        elif isinstance(said, Pong):
            if line is self._line:
                self._tell_ping()
        elif isinstance(said, Info):
            line.learn(said.values)
        elif isinstance(said, Refusal):
            log.warning("%s: the server says to user %s: %s", self.name, self.address.user, said.text)

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception:
            log.exception("%s: %r failed", self.name, callback)

    def _lose(self, line: Line, reason: str) -> None:
        """Have the keeper make another connection, and tell that this one was lost."""
        with self._standing:
            if self._line is line:
                self._line = None
                self.error = DisconnectedError(f"{self.name}: the connection to {self.address} was lost: {reason}")
        line.shut()
        self.wake()

    # ---- the keeper -------------------------------------------------------------------------------------

    def attend(self) -> None:
        """Have the keeper look soon, as there is something that may come to wait for it."""
        if self._poll_interval.shorten():
            self.wake()

    def wake(self) -> None:
        """Have the keeper look what there is to do, and call `on_wake`."""
        self._waker.wake()

    def _keep(self) -> None:
        stood = False
        while self.closed is None:
            line = self._line
            if line is None:
                if stood:
                    self._on_lost()
                stood = self._dial()  # it may be lost by the time that this is here again
                if not stood:
                    self._rest()
                continue
            self._ping_if_due(line)
            if self.turns.has(self.wake):
                if self.turns.wanted:
                    self.turns.leave(self.wake)
            elif self.turns.unchanged_s() >= _UNREAD_S and self.turns.take(self.wake):
                self._call(self._on_wake)
            if not self.turns.has(self.wake):
                self._doze()
            elif line.wait_beside(self._waker, self._until_ping_s()):
                self._read(line)
            self._look_awake()
        self.turns.leave(self.wake)
        self._tell_pings()
        self._waker.close()

    def _on_lost(self) -> None:
        log.info("%s", self.error)
        self._call(self._on_disconnect)
        self._tell_pings()

    def _tell_pings(self) -> None:
        while self._pings:
            self._tell_ping()

    def _tell_ping(self) -> None:
        try:
            callback = self._pings.popleft()
        except IndexError:  # the keeper has told them all, since the connection is lost
            return
        self._call(callback)

    def _look_awake(self) -> None:
        if self._waker.look():
            self._poll_interval.shorten()
            self._call(self._on_wake)

    def _doze(self) -> None:
        """Wait a moment; a long one when one thread has read for a while, a longer one when many take short turns."""
        unchanged_s = self.turns.unchanged_s()
        self._asleep = unchanged_s > _ASLEEP_AFTER_S
        if self._asleep and self.turns.unchanged_s() < unchanged_s:  # it was left before it could be seen that we sleep
            self._asleep = False
        interval_s = self._poll_interval.next_s(unchanged_s)
        self._waker.wait(self._until_ping_s() if self._asleep else interval_s)
        self._asleep = False

    def _until_ping_s(self) -> float:
        return max(self._pulse.due - time.monotonic(), 0.0)

    def _ping_if_due(self, line: Line) -> None:
        if self._until_ping_s() > 0:
            return
        # What has arrived unread is a sign of life as well: the thread that has the turn may be held up.
        if self._pulse.is_dead(time.monotonic(), heard=self._heard or line.has_arrived()):
            self._lose(line, f"the server has said nothing for {self._pulse.silent_s:g} s")
            return
        self._heard = False
        self.when_seen(_nothing)

    def _dial(self) -> bool:
        """True when a connection was made."""
        for made in self._dialler.attempts():
            if isinstance(made, Line):
                self._stand(made)
                return True
            self._fail(made)
            if self.closed is not None:
                break
        return False

    def _rest(self) -> None:
        deadline = time.monotonic() + self._dialler.next_pause_s()
        while self.closed is None and (left_s := deadline - time.monotonic()) > 0:
            self._waker.wait(left_s)
            self._look_awake()

    def _fail(self, error: BusError) -> None:
        level = logging.WARNING if isinstance(error, CredentialsError) else logging.DEBUG
        log.log(level, "%s: %s", self.name, error)
        with self._standing:
            self.error = error
            self._standing.notify_all()

    def _stand(self, line: Line) -> None:
        with self._standing:
            if self.closed is not None:
                line.shut()
                return
            for number, subscription in self._subscriptions.items():
                line.add(wire.subscribe(number, subscription.subject, subscription.queue))
            self._heard, self._pulse = True, Pulse(self._ping_timing, time.monotonic())
            self.error = None
            self._line = line
            self._standing.notify_all()
        self._flush(line)
        self._call(self._on_connect)


def _after_fork() -> None:
    for lane in list(_lanes):
        lane._after_fork()  # noqa: SLF001 - of this very class
    _lanes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
