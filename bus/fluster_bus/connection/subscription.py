"""Interest in a subject."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fluster_bus.core.errors import ClosedError, DisconnectedError

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription as NatsSubscription

    from fluster_bus.connection.bus import Bus

log = logging.getLogger(__name__)


class Subscription:
    """Interest in a subject, until it is drained or dropped."""

    def __init__(self, bus: Bus, subscription: NatsSubscription) -> None:
        self._bus = bus
        self._subscription = subscription
        self._leaving = False

    async def drain(self) -> None:
        """Leave, after everything that is on its way here has been handled: nothing is lost, but by a lost connection."""
        if self._leaving:
            return
        self._leaving = True
        subscription = self._subscription
        try:
            # nats-py's own drain stops listening when its PONG is there, which may be before its UNSUB has left.
            await subscription._conn._send_unsubscribe(subscription._id)  # noqa: SLF001
            await self._bus.flush()
            await subscription._pending_queue.join()  # noqa: SLF001
        except (DisconnectedError, ClosedError):
            log.debug("%s: the connection was lost while leaving %s", self._bus.name, subscription.subject)
        finally:
            await self.unsubscribe()

    async def unsubscribe(self) -> None:
        """Leave at once; what is on its way here is dropped. Works without a connection, too."""
        self._leaving = True
        connection = self._subscription._conn  # noqa: SLF001
        # nats-py raises for a second time and has no getter; a connection that closes takes its subscriptions along.
        if not (self._subscription._closed or connection.is_closed or connection.is_draining):  # noqa: SLF001
            await self._subscription.unsubscribe()
