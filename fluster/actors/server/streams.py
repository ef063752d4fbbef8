"""The generators that run in an actor, and the reports of their readers."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fluster.actors.definition.context import ActorContext
from fluster.actors.protocol import frames
from fluster.actors.protocol.flow_control import Window
from fluster.actors.server.mailbox import ConcurrencyGroup
from fluster.actors.server.outbox import Reply, ReplySink
from fluster.actors.server.producer import Items, Producer, StreamCall
from fluster_bus.payloads import payloads

log = logging.getLogger(__name__)


class Streams:
    """Those of one actor. Each runs in bursts on the group of its method, and is known by its call's key."""

    def __init__(
        self,
        context: ActorContext,
        *,
        outbox: ReplySink,
        max_item: int,
        store: Callable[[bytes], Future[bytes]],
        actor_loop: Callable[[], asyncio.AbstractEventLoop],
    ) -> None:
        self._context = context
        self.outbox = outbox
        self._max_item = max_item
        self._store = store
        self._actor_loop = actor_loop
        self._open: dict[tuple[str, int], Producer] = {}  # {(reply subject, index): of those that have not ended}

    def open(
        self,
        call: StreamCall,
        group: ConcurrencyGroup[Any],
        window: Window,
        items: Items,
        on_end: Callable[[Producer], None],
    ) -> None:
        """Begin with a generator, and run its first burst. `on_end` is called, in whichever thread, when it has ended."""
        producer = Producer(
            items,
            window,
            call=call,
            endpoint_id=str(self._context.endpoint_id),
            encode=functools.partial(payloads.encode_for, inbox=call.reply),
            store=self._stored,
            announce=self.outbox.add,
            resume=group.mailbox.put_back,
            on_end=on_end,
        )
        self._open[call.reply, call.index] = producer
        self.outbox.add(Reply(call.reply, producer.endpoint_id, call.index, frames.OPENED, tuple(window)))
        self.run_burst(producer, group)

    def _stored(self, data: bytes) -> Future[bytes] | None:
        """What goes instead of an item that no message can carry; None for one that goes as it is."""
        return self._store(data) if len(data) > self._max_item else None

    def run_burst(self, producer: Producer, group: ConcurrencyGroup[Any]) -> None:
        """Run a generator as far as its reader has room."""
        started_ns = time.perf_counter_ns()
        if not producer.is_async:
            self._end_burst(producer, group, started_ns, producer.run())
            return
        running = producer.run_on(self._actor_loop())
        if group.frees_its_thread:
            running.add_done_callback(lambda done: self._end_burst(producer, group, started_ns, done.result()))
        else:
            self._end_burst(producer, group, started_ns, running.result())

    def _end_burst(self, producer: Producer, group: ConcurrencyGroup[object], started_ns: int, ended: bool) -> None:
        producer.processing_ns += time.perf_counter_ns() - started_ns
        if not ended:
            group.stand_aside()
            return
        self._open.pop((producer.subject, producer.index), None)
        if producer.is_cancelled and isinstance(producer.error, Exception):
            log.info("a generator of %s failed while it was closed", self._context.actor_name, exc_info=producer.error)
        producer.on_end(producer)

    # ---- on the connection's loop -----------------------------------------------------------------------

    def on_read(self, reply: str, payload: bytes) -> None:
        """A reader tells how far it has come. Raises InvalidMessageError."""
        for key, items, size in frames.reads_of(reply, payload):
            producer = self._open.get(key)
            if producer is not None:
                producer.on_read(items, size)

    def all(self) -> list[Producer]:
        """Those that have not ended."""
        return list(self._open.values())
