"""On how many servers of a group each stream lies, and what the servers say where that cannot be."""

from __future__ import annotations

from dataclasses import dataclass

import nats.js.errors

from fluster_bus.core.errors import StorageError

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
