"""The caller's end of calls to durable actors: each is stored, in the order in which they were made, then waited for.

The next is sent when the one before is acknowledged. One whose acknowledgement was lost is sent again under its id, and so
stored once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Broadcast, Call, Done
from fluster.actors.results.futures import ActorFuture
from fluster.errors import ActorDeadlockError, ActorTimeoutError, ConnectionLostError, MailboxFullError
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.connection import DEFAULT_TIMEOUT_S
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import (
    DisconnectedError,
    InvalidMessageError,
    RequestTimeoutError,
    StorageError,
    StreamNotFoundError,
)
from fluster_bus.payloads import payloads
from fluster_bus.running.coroutines import retried
from fluster_bus.storage.stored_messages import store_call

log = logging.getLogger(__name__)

MAX_WAITING, _MAX_BYTES = 100_000, 1 << 30  # calls that are not stored yet
# The streams of a server that was started anew answer a moment later than its connections.
_NOT_YET = (DisconnectedError, RequestTimeoutError, StreamNotFoundError)
_STORE_TIMEOUT_S = 30.0  # as long as other calls wait for a connection


class StoredCalls:
    """The stored calls of one client. `finish` gets calls that are over, `prepare` those that are to be stored: it may raise
    ActorDeadlockError. Lives on the loop of the client's connection.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        finish: Callable[[Iterable[Done]], None],
        *,
        prepare: Callable[[Call], None],
    ) -> None:
        self._bus = bus
        self._namespace = namespace
        self._finish = finish
        self._prepare = prepare
        # Without this process's place in it, by which memory could be shared: an answer outlives its sender.
        self._inbox = bus.inbox(namespace)
        self._names: set[str] = set()  # of durable actors
        self._numbers = itertools.count(1)
        self._waiting: deque[Call] = deque()
        self._bytes = 0  # of the calls that wait
        self._storing: int | None = None
        self._was_cut = False  # the connection was lost since that one was sent first
        self._out: dict[int, Call] = {}  # {number: call that is stored, or about to be}
        self._wake = asyncio.Event()
        self._started = False

    @property
    def in_use(self) -> bool:
        """Whether there is a durable actor that is known."""
        return bool(self._names)

    def add_name(self, name: str) -> None:
        """Calls to `name` are stored from now on."""
        self._names.add(name)
        if not self._started:
            self._started = True
            self._bus.spawn(self._run(), "stored calls")

    def remove_name(self, name: str) -> None:
        """Calls to `name` are sent to its members from now on."""
        self._names.discard(name)

    def take(self, items: Iterable[Call | Broadcast]) -> list[Call | Broadcast]:
        """Have the calls that are for durable actors be stored; give back the others."""
        others: list[Call | Broadcast] = []
        for item in items:
            if item.pool not in self._names or item.method == frames.PING:
                others.append(item)
            elif isinstance(item, Broadcast):
                text = f"{item}: {item.pool} is durable, and there is one of it: call it, rather than broadcast"
                self._finish([Done(item, ok=False, error=TypeError(text))])
            elif len(self._waiting) >= MAX_WAITING or self._bytes + len(item.payload) > _MAX_BYTES:
                text = f"{item}: {len(self._waiting):,} calls of this client wait to be stored: wait for some of them"
                self._finish([Done(item, ok=False, error=MailboxFullError(text))])
            else:
                self._add(item)
        return others

    def _add(self, call: Call) -> None:
        try:
            self._prepare(call)
        except ActorDeadlockError as error:
            self._finish([Done(call, ok=False, error=error)])
            return
        self._waiting.append(call)
        self._bytes += len(call.payload)
        self._wake.set()

    async def _run(self) -> None:
        await self._bus.subscribe(f"{self._inbox}.{subjects.ANY_TOKEN}", self._on_delivery)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                call = self._waiting.popleft()
                self._bytes -= len(call.payload)
                if not call.begun:
                    call.begun = call.ticket.begin(call)
                if call.begun and not call.ticket.done():
                    await self._store(call)

    async def _store(self, call: Call) -> None:
        number = self._storing = next(self._numbers)
        self._was_cut = False
        self._out[number] = call
        if isinstance(call.ticket, ActorFuture):  # it may run into its timeout, or be cancelled
            future = cast("ActorFuture[object]", call.ticket)
            future.add_done_callback(lambda _done: self._out.pop(number, None))
        try:
            error = await self._error_of_storing(call, number)
        finally:
            self._storing = None
        call.payload = b""  # it is the stream's now
        if error is not None and self._out.pop(number, None) is not None:
            self._finish([Done(call, ok=False, error=error)])

    async def _error_of_storing(self, call: Call, number: int) -> Exception | None:
        call_id, attempts, left_s = secrets.token_urlsafe(12), 0, _time_to_store(call)

        async def store(attempt_s: float) -> bool:
            nonlocal attempts
            attempts += 1
            return await store_call(
                self._bus,
                self._namespace,
                call.pool,
                body,
                call_id=call_id,
                reply=f"{self._inbox}.{number}",
                timeout_s=min(attempt_s, DEFAULT_TIMEOUT_S),
            )

        try:
            body = frames.encode_calls([call.to_wire(bytes(payloads.spelled_out(call.payload)))])
            is_first = await retried(store, on=_NOT_YET, timeout_s=left_s)
        except (DisconnectedError, RequestTimeoutError) as error:
            lost = isinstance(error, DisconnectedError)
            heard = "the connection is lost" if lost else "it was not acknowledged: is the server's disk full?"
            text = f"{call}: it was sent {attempts} times, and may be stored: then it is run; {heard}"
            return ConnectionLostError(text) if left_s == _STORE_TIMEOUT_S else ActorTimeoutError(text)
        except StreamNotFoundError as error:
            return error
        except StorageError as error:
            return MailboxFullError(f"{call} was not stored, and is not run: {error}")
        except Exception as error:  # the next are to be stored nevertheless
            return error
        if self._was_cut and not is_first:  # its answer may have come while the connection was lost
            return ConnectionLostError(f"{call}: the connection was lost while it was stored; it is run, unanswered")
        return None

    def _on_delivery(self, delivery: Delivery) -> None:
        call = self._out.pop(subjects.reply_number(delivery.subject), None)
        if call is None:
            return
        try:
            _endpoint_id, replies = frames.decode_replies(delivery.data)
        except InvalidMessageError as error:
            self._finish([Done(call, ok=False, error=error)])
            return
        _index, ok, payload = replies[0]
        self._finish([Done(call, bool(ok), payload)])

    def on_disconnected(self) -> None:
        """What is stored is run, and its answer may come while the connection is lost."""
        self._was_cut = True
        stored = [number for number in self._out if number != self._storing]
        self._finish(
            Done(
                call,
                ok=False,
                error=ConnectionLostError(
                    f"{call}: the connection to the bus was lost while the call was out; it is stored and run, unanswered"
                ),
            )
            for number in stored
            if (call := self._out.pop(number, None)) is not None
        )

    def close_pool(self, name: str) -> list[Call]:
        """The calls to `name` that are not answered, which are no longer waited for here; those that are stored are run."""
        self._names.discard(name)
        return self._take(lambda call: call.pool == name)

    def take_all(self) -> list[Call]:
        """The same, of all names."""
        return self._take(lambda _call: True)

    def _take(self, concerns: Callable[[Call], bool]) -> list[Call]:
        taken = [call for call in self._waiting if concerns(call)]
        self._waiting = deque(call for call in self._waiting if not concerns(call))
        self._bytes -= sum(len(call.payload) for call in taken)
        out = [number for number, call in list(self._out.items()) if concerns(call)]
        return taken + [call for number in out if (call := self._out.pop(number, None)) is not None]


def _time_to_store(call: Call) -> float:
    """In seconds. Those behind it wait; after its deadline it would not be run anyhow."""
    if call.deadline is None:
        return _STORE_TIMEOUT_S
    return min(_STORE_TIMEOUT_S, frames.seconds_between(frames.now(), call.deadline))
