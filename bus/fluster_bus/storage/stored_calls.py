"""Calls to durable actors in their stream: how they are written, read, and dropped once they are handled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluster_bus.connection.connection import DEFAULT_TIMEOUT_S
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import MessageTooLargeError, NoRespondersError, StorageError, StreamNotFoundError
from fluster_bus.core.stream_bounds import MAX_CALL_BYTES
from fluster_bus.storage.feeds import Entry, Feed
from fluster_bus.storage.tables import sequence_of_ack

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

_ID_HEADER = "Nats-Msg-Id"
_REPLY_HEADER = "Fluster-Reply"  # the reply subject of the message itself gets the stream's acknowledgement
_BATCH = 16  # calls that are read at once
_TOO_LARGE = 10_054


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call as its stream has it."""

    sequence: int
    call_id: str
    reply: str  # an inbox; empty when no answer is wanted
    data: bytes

    @staticmethod
    def of(entry: Entry) -> StoredCall:
        reply = entry.headers.get(_REPLY_HEADER, "")
        call_id = entry.headers.get(_ID_HEADER) or str(entry.sequence)
        return StoredCall(entry.sequence, call_id, reply if subjects.is_inbox(reply) else "", entry.data)


async def store_call(
    bus: Bus,
    namespace: str,
    name: str,
    data: bytes,
    *,
    call_id: str,
    reply: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> bool:
    """Store a call; False when it was there already, by its id.

    Raises MessageTooLargeError, StreamNotFoundError, StorageError when there is no room, and what `Bus.request` raises.
    """
    headers = {_ID_HEADER: call_id, _REPLY_HEADER: reply}
    try:
        answer = await bus.request(subjects.durable_calls(namespace, name), data, timeout_s=timeout_s, headers=headers)
    except NoRespondersError as error:
        raise StreamNotFoundError(f"no stream takes calls to {name}: does the namespace {namespace} exist?") from error
    ack = json.loads(answer.data)
    if ack.get("error", {}).get("err_code") == _TOO_LARGE:
        raise MessageTooLargeError(
            f"a stored call has {len(data):,} bytes, more than its cluster takes ({MAX_CALL_BYTES >> 20} MiB with the headers, unless "
            "FLUSTER_MAX_CALL says else): put what is large where the actor finds it, and pass its name"
        )
    sequence_of_ack(answer, f"the call to {name}")
    return not ack.get("duplicate", False)


def calls_feed(bus: Bus, namespace: str, name: str) -> Feed:
    """The calls of one actor, in order. What is republished of them are headers, to wake the reader."""
    return Feed(
        bus,
        buckets.calls_stream(namespace),
        subject=subjects.durable_calls(namespace, name),
        watch=subjects.watch_calls(namespace, name),
        batch=_BATCH,
    )


async def drop_calls(bus: Bus, namespace: str, name: str, before: int) -> None:
    """Drop the calls of an actor that stand before sequence `before`. Only services may. Raises StorageError."""
    request = json.dumps({"filter": subjects.durable_calls(namespace, name), "seq": before}).encode()
    answer = await bus.request(server_subjects.stream_purge(buckets.calls_stream(namespace)), request)
    error = json.loads(answer.data).get("error")
    if error is not None:
        raise StorageError(f"the calls of {name} could not be dropped: {error.get('description')}")
