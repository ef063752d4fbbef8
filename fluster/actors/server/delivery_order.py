"""Messages of several subscriptions, put back into the order in which each of their senders sent them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fluster_bus.core.delivery import Delivery


class DeliveryOrder:
    """Hands messages on, those that arrived together in the order of their numbers.

    Calls to one member and broadcasts arrive on different subscriptions, whose callbacks do not run in the order in
    which the messages came. The client numbers its messages in their reply subjects. All that was read from the
    socket before a message has reached its callback by the time that what this one scheduled is run (ready callbacks
    are run first in, first out), so sorting what came together is enough.
    """

    def __init__(self, accept: Callable[[Delivery], None], loop: asyncio.AbstractEventLoop) -> None:
        self._accept = accept
        self._loop = loop
        self._arrived: list[Delivery] = []
        self._mixed = False

    def on_call(self, delivery: Delivery) -> None:
        self._arrived.append(delivery)
        if len(self._arrived) == 1:
            self._loop.call_soon(self._hand_on)

    def on_broadcast(self, delivery: Delivery) -> None:
        self._mixed = True
        self.on_call(delivery)

    def _hand_on(self) -> None:
        arrived, self._arrived = self._arrived, []
        if self._mixed:
            self._mixed = False
            arrived.sort(key=_position)
        for delivery in arrived:
            self._accept(delivery)


def _position(delivery: Delivery) -> tuple[str, int]:
    inbox, _, number = delivery.reply.rpartition(".")
    return (inbox, int(number)) if number.isascii() and number.isdigit() else (delivery.reply, 0)
