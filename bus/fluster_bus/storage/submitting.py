"""How a job is submitted: its request as a message in the queue, or stored, with a message that says where."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.core.errors import (
    BusError,
    CredentialsError,
    MessageTooLargeError,
    NoRespondersError,
    ObjectNotFoundError,
)
from fluster_bus.core.stream_bounds import MAX_INLINE_BYTES, PAYLOADS, REQUESTS
from fluster_bus.messages.jobs import JobRequest
from fluster_bus.messages.parts.wire_range import SPOKEN
from fluster_bus.messages.requests import NamespaceReply, NamespaceRequest, StoredRequest
from fluster_bus.storage.objects import CHUNK_BYTES, ObjectStore
from fluster_bus.storage.streams import append_data

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

log = logging.getLogger(__name__)

_KINDS = {kind.name: kind for kind in (PAYLOADS, REQUESTS)}
_ASK_TIMEOUT_S = 3.0


async def submit(bus: Bus, namespace: str, request: JobRequest, *, message_id: str) -> int:
    """The job's place in the queue of submissions. Sent twice under one `message_id` it is there once.

    Raises NamespaceFullError where as many submissions of the namespace wait as may, MessageTooLargeError, StorageError, BusError.
    """
    data = request.to_json()
    if len(data) > bus.max_payload:
        raise MessageTooLargeError(
            f"the request has {len(data):,} bytes, over the server's limit of {bus.max_payload:,}: pass a path or a name, and load "
            "the data inside the job"
        )
    if len(data) > MAX_INLINE_BYTES:
        stored = await store_request(bus, namespace, data)
        names = {"name": request.name, "job_id": request.job_id, "submission": request.submission}
        data = stored.model_copy(update=names).to_json()
    return await append_data(bus, subjects.jobs_submit(namespace), data, message_id=message_id)


async def store_request(bus: Bus, namespace: str, data: bytes) -> StoredRequest:
    """What may be submitted in the place of the request with this JSON.

    Raises NamespaceFullError where requests of as many jobs wait as have room, StorageError, BusError.
    """
    kind = REQUESTS if await _takes_requests(bus, namespace, data) else PAYLOADS
    sha256 = await ObjectStore(bus, namespace, kind).put(data)
    return StoredRequest(stored_request=sha256, size=len(data), kind=kind.name)


async def _takes_requests(bus: Bus, namespace: str, data: bytes) -> bool:
    """Whether requests are looked for in a stream of their own: older controllers, and servers with their permissions, have none.

    While no controller answers, the next one is of the release that made the stream, if there is one.
    """
    try:
        told = await bus.request(
            subjects.ensure_namespace(namespace), NamespaceRequest(wire=SPOKEN).to_json(), timeout_s=_ASK_TIMEOUT_S
        )
        if REQUESTS.name not in NamespaceReply.from_json(told.data).object_bytes:
            return False
    except BusError as error:
        log.info("no controller says where requests are stored: %s", error)
    first = subjects.object_part(REQUESTS.name, namespace, hashlib.sha256(data).hexdigest(), 0)
    try:
        await bus.request(first, data[:CHUNK_BYTES])
    except (NoRespondersError, CredentialsError):
        return False
    return True


async def forget_request(bus: Bus, namespace: str, stored: StoredRequest) -> None:
    """Have a stored request removed whose job is recorded or refused. Only for services. Raises BusError.

    One without a `submission` may be another's, too, and goes after its time, as those among the payloads do.
    """
    if stored.kind == REQUESTS.name and stored.submission is not None:
        await ObjectStore(bus, namespace, REQUESTS).remove(stored.stored_request)


async def read_request(bus: Bus, namespace: str, stored: StoredRequest) -> bytes:
    """The JSON of a stored request. Only for services.

    Raises ObjectNotFoundError, ObjectTooLargeError where there is more than it says, ObjectCorruptError, BusError.
    """
    store = ObjectStore(bus, namespace, _KINDS[stored.kind])
    try:
        return await store.get(stored.stored_request, max_bytes=stored.size)
    except ObjectNotFoundError:
        # A copy at another server may be behind the one that took it.
        await store.settle()
        return await store.get(stored.stored_request, max_bytes=stored.size)
