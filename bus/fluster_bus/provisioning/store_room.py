"""How much the servers' store can still set aside for streams."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, NamedTuple

import nats.errors
import nats.js.errors
from nats.js.api import StreamConfig

from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, StorageError
from fluster_bus.provisioning.replication import NoRoomError, placement_error
from fluster_bus.running.retries import retried
from fluster_bus.storage.store_errors import store_error

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

_TIMEOUT_S = 10.0
_ANSWER_S = 2.0  # what was asked while no server of a group led is answered by none


class StoreRoom(NamedTuple):
    """What all streams may set aside, None where the servers do not tell, and what is set aside, of one copy of each."""

    limit: int | None
    reserved: int

    def check(self, more_bytes: int) -> None:
        """Raise NoRoomError where so much more would not fit.

        A server that makes several streams at once would take too much, and change none of them from then on.
        """
        if self.limit is not None and more_bytes > max(self.limit - self.reserved, 0):
            raise NoRoomError(
                f"the server's store has {self.limit - self.reserved:,} bytes left to set aside, and not {more_bytes:,}"
            )


async def store_room(bus: Bus, replicas: int) -> StoreRoom:
    """What the account has for streams with so many copies. Raises StorageError."""

    async def ask(left_s: float) -> StoreRoom:
        timeout_s = min(left_s, _ANSWER_S)
        told = json.loads((await bus.request(subjects.JETSTREAM_INFO, timeout_s=timeout_s)).data)
        limit = int(told["limits"]["max_storage"])
        # An account's limit counts all copies, and what it says of its streams counts one of each.
        return StoreRoom(limit // replicas if limit >= 0 else None, int(told.get("reserved_storage", 0)))

    try:
        return await retried(ask, on=(BusError, KeyError), timeout_s=_TIMEOUT_S)
    except KeyError as error:
        raise StorageError("the server gives no state of its store: is JetStream enabled there?") from error


async def try_room(bus: Bus, more_bytes: int, replicas: int) -> None:
    """Raise NoRoomError where no server of a group, or too few, has room for so much more.

    Servers of a group take streams beyond their limit, as they learn of each other's room each 10 s only, and change none
    of them from then on. So one stream for all is tried first.
    """
    config = StreamConfig(
        name=subjects.ROOM_STREAM, subjects=[subjects.ROOM], max_bytes=more_bytes, num_replicas=replicas
    )

    async def make(left_s: float) -> None:
        try:
            async with asyncio.timeout(left_s):
                await bus.jetstream.add_stream(config)
        except nats.js.errors.APIError as error:
            why = placement_error(subjects.ROOM_STREAM, more_bytes, replicas, error)
            if why is None:
                raise
            raise why from error

    async def remove(left_s: float) -> None:
        async with asyncio.timeout(left_s):
            try:
                await bus.jetstream.delete_stream(subjects.ROOM_STREAM)
            except nats.js.errors.NotFoundError:
                return

    on = (nats.errors.Error, TimeoutError)
    try:
        await retried(remove, on=on, timeout_s=_TIMEOUT_S)  # one that was left, or another controller's
        try:
            await retried(make, on=on, timeout_s=_TIMEOUT_S)
        finally:
            await retried(remove, on=on, timeout_s=_TIMEOUT_S)
    except on as error:
        raise store_error("the room of the servers could not be tried", error) from error
