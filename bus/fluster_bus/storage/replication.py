"""On how many servers of a group each stream lies, how much room they can still set aside, and what they say where there is too little."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import nats.errors
import nats.js.errors
from nats.js.api import StreamConfig

from fluster_bus.connection.connection import store_error
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import BusError, StorageError
from fluster_bus.running.coroutines import retried

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

REPLICAS_SETTING = "FLUSTER_REPLICAS"
MOST_REPLICAS = 3

_NOT_IN_A_GROUP, _NO_PEERS = 10_074, 10_005
_NO_ROOM = (10_047, 10_002)  # of the server, and of the account
_NO_ROOM_AT_PEERS = "insufficient storage"


@dataclass(frozen=True)
class Replication:
    """How many copies each stream has, 1 or 3.

    Without `replicas` there are three where the group has so many servers, and else one; what has more copies keeps them.
    Raises ValueError for another number.
    """

    replicas: int | None = None

    def __post_init__(self) -> None:
        if self.replicas not in (None, 1, MOST_REPLICAS):
            raise ValueError(
                f"replicas={self.replicas!r}: give 1, or {MOST_REPLICAS} where the servers are {MOST_REPLICAS} or more"
            )

    @property
    def tried(self) -> tuple[int, ...]:
        """The numbers to be tried, until the servers are enough for one."""
        return (MOST_REPLICAS, 1) if self.replicas is None else (self.replicas,)

    def wanted(self, replicas: int, present: int) -> int:
        """How many a stream is to have that has `present`, where `replicas` are tried."""
        return max(replicas, present) if self.replicas is None else replicas


class NoRoomError(StorageError):
    """The servers have not so much to set aside."""


class TooFewServersError(StorageError):
    """Fewer servers than copies; others may join the group."""


class SingleServerError(TooFewServersError):
    """The server is in no group, as long as it runs."""


def placement_error(
    stream: str, max_bytes: int | None, replicas: int, error: nats.js.errors.APIError
) -> StorageError | None:
    """The error to raise where a stream finds no place; None where `error` says something else."""
    text = error.description or ""
    if error.err_code in _NO_ROOM or (error.err_code == _NO_PEERS and _NO_ROOM_AT_PEERS in text):
        return NoRoomError(
            f"stream {stream} could not be made: the server's store has not {max_bytes or 0:,} bytes to set aside"
        )
    remedy = f"set {REPLICAS_SETTING} to 1, or give the cluster a group of {MOST_REPLICAS} servers with JetStream"
    if error.err_code == _NOT_IN_A_GROUP:
        return SingleServerError(f"stream {stream} cannot have {replicas} copies on a single server: {remedy}")
    if error.err_code == _NO_PEERS:
        return TooFewServersError(
            f"stream {stream} cannot have {replicas} copies, as the group has too few servers ({text}): {remedy}"
        )
    return None


_TIMEOUT_S = 10.0
_ANSWER_S = 2.0  # what was asked while no server of a group led is answered by none


class StorageCapacity(NamedTuple):
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


async def storage_capacity(bus: Bus, replicas: int) -> StorageCapacity:
    """What the account has for streams with so many copies. Raises StorageError."""

    async def ask(left_s: float) -> StorageCapacity:
        timeout_s = min(left_s, _ANSWER_S)
        told = json.loads((await bus.request(server_subjects.JETSTREAM_INFO, timeout_s=timeout_s)).data)
        limit = int(told["limits"]["max_storage"])
        # An account's limit counts all copies, and what it says of its streams counts one of each.
        return StorageCapacity(limit // replicas if limit >= 0 else None, int(told.get("reserved_storage", 0)))

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
        name=buckets.ROOM_STREAM, subjects=[subjects.ROOM], max_bytes=more_bytes, num_replicas=replicas
    )

    async def make(left_s: float) -> None:
        try:
            async with asyncio.timeout(left_s):
                await bus.jetstream.add_stream(config)
        except nats.js.errors.APIError as error:
            why = placement_error(buckets.ROOM_STREAM, more_bytes, replicas, error)
            if why is None:
                raise
            raise why from error

    async def remove(left_s: float) -> None:
        async with asyncio.timeout(left_s):
            try:
                await bus.jetstream.delete_stream(buckets.ROOM_STREAM)
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
