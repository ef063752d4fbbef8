"""What becomes of calls, told to those who wait for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

from fluster.actors.client.census import Explanations
from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Broadcast, Call, Done, Part
from fluster.actors.protocol.flow_control import Window
from fluster.actors.results.futures import ActorFuture
from fluster.actors.results.loop_calls import StoredPayloads, closed
from fluster.actors.results.reader import ActorStream, ItemsTicket, StreamReader
from fluster.actors.routing.routing_pass import NobodyServesError
from fluster_bus.connection.carrier import Carrier
from fluster_bus.payloads import payloads
from fluster_bus.storage.objects import ObjectStore

log = logging.getLogger(__name__)


class Outcomes:
    """Those of one client's calls. A call that failed is offered to `retry` first, which may take it.

    `tell_read` and `withdraw` tell actors of their streams, from any thread.
    """

    def __init__(
        self,
        bus: Carrier,
        store: ObjectStore,
        explanations: Explanations,
        *,
        loop: asyncio.AbstractEventLoop,
        retry: Callable[[Done], bool],
        tell_read: Callable[[Call], None],
        withdraw: Callable[[Call], None],
    ) -> None:
        self._bus = bus
        self._store = store
        self._stored = StoredPayloads(store, loop)
        self._explanations = explanations
        self._loop = loop
        self._retry = retry
        self._tell_read, self._withdraw = tell_read, withdraw

    def finish(self, done: Iterable[Done | Part], *, final: bool = False) -> None:
        """End calls, go on with streams. When it is `final`, nothing is tried again nor looked up."""
        unexplained: list[Done] = []
        for each in done:
            if isinstance(each, Part):
                self._on_part(each)
            elif each.ok:
                if payloads.is_stored(each.payload):
                    self._bus.spawn(self._fetch(each), "stored result")
                else:
                    self._settle(each)
            elif final or not self._retry(each):
                if isinstance(each.error, NobodyServesError) and not final:
                    unexplained.append(each)
                else:
                    self._settle(each)
        if unexplained:
            self._bus.spawn(self._explain(unexplained), "explanation")

    def _settle(self, done: Done) -> None:
        try:
            settle(done, done.error)
        except Exception:  # a fault of ours: those that follow are still settled
            log.exception("the outcome of %s could not be sent", done.call)

    def _on_part(self, part: Part) -> None:
        call = part.call
        ticket = call.ticket
        if part.kind == frames.OPENED and isinstance(ticket, ActorFuture):
            if call.timer is not None:
                call.timer.cancel()
            reader = StreamReader(
                str(call),
                Window(*part.payload),
                timeout_s=None if call.deadline is None else call.timeout_s,
                loop=self._loop,
                on_read=lambda: self._tell_read(call),
                withdraw=lambda: self._withdraw(call),
                fetch=self._stored.fetch,
            )
            call.ticket = reader
            # Only the user holds on to it: so it is closed when it is no longer wanted.
            stream: ActorStream[object] = ActorStream(reader)
            cast("ActorFuture[object]", ticket).set_result(stream)
        elif part.kind == frames.ITEMS and isinstance(ticket, ItemsTicket) and not ticket.take(*part.payload):
            self._withdraw(call)

    async def _fetch(self, done: Done) -> None:
        """End a call whose result lies in the object store."""
        try:
            payload = await payloads.fetched(done.payload, self._store)
        except Exception as error:
            settle(done, error)
        except asyncio.CancelledError:
            settle(done, closed())
            raise
        else:
            settle(replace(done, payload=payload), None)

    async def _explain(self, done: list[Done]) -> None:
        async for each, error in self._explanations.errors(done):
            settle(each, error)


def settle_result(call: Call, payload: bytes) -> None:
    """End one call with its payload, as far as its ticket is not over."""
    call.over = True
    if call.timer is not None:
        call.timer.cancel()
    if call.begun or call.begin():
        call.ticket.settle(True, payload)


def settle(done: Done, error: Exception | None) -> None:
    """End one call, with its payload or with an error."""
    call = done.call
    if isinstance(call, Broadcast):
        call.fail(error or closed())
        return
    if call.ticket.done():
        return  # its caller took it back, or it ran into its timeout where it waited
    call.over = True
    if call.timer is not None:
        call.timer.cancel()
    if not call.begin():
        return
    if error is not None:
        call.ticket.set_exception(error)
    else:
        call.ticket.settle(done.ok, done.payload)
